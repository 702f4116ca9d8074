"""A place beside one's own jobs that is measured in their stead, and gone afterwards: on SQLite a
file in the same folder, on PostgreSQL a schema in the same database.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from contextlib import closing, contextmanager

from msgspec import Struct

from onward.bench.tasks import app
from onward.store.database import Database
from onward.store.url import open_database


class Scratch(Struct, frozen=True):
    """A database with empty tables, and how a process finds it."""

    database: Database
    environment: Mapping[str, str]


@contextmanager
def scratch(url: str) -> Generator[Scratch]:
    """Make the place, point the bench's app at it, and remove it at the end of the block.

    Args:
        url: of the database to be measured; nothing of what is there is touched.
    """
    name = f"onward_bench_{os.urandom(4).hex()}"
    with closing(open_database(url)) as own:
        path = getattr(own, "path", None)
    if path is not None:
        _, mark, query = url.partition("?")
        url = f"sqlite:///{path.with_name(f'{name}.db')}{mark}{query}"
    app.use(url, schema=name)
    try:
        app.database.migrate()
        yield Scratch(app.database, {"ONWARD_URL": url, "ONWARD_SCHEMA": name})
    finally:
        app.database.destroy()
        app.close()
