"""How a command line names a database: what an error tells to run must run as it stands."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onward.store.database import Database


def options_of(database: Database) -> str:
    """The options that lead a command to this database; a password is not among them."""
    return f"--database {shlex.quote(database.shown_url)}{schema_option(database)}"


def schema_option(database: Database) -> str:
    """`--schema NAME` behind a space; nothing where the schema is the default, or there is none."""
    return "" if database.schema in {"", "onward"} else f" --schema {database.schema}"
