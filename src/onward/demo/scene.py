"""Where the demo takes place: a folder of its own, and a database that its app is pointed at."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

from msgspec import Struct

from onward.demo.tasks import app
from onward.store.database import Database
from onward.store.migrate import check_version
from onward.store.options import options_of


class Scene(Struct, frozen=True, kw_only=True):
    """A folder, and a database. `own`: the database is a file in the folder, and goes with it."""

    folder: Path
    url: str
    schema: str
    own: bool
    keep: bool

    @property
    def database(self) -> Database:
        return app.database

    @property
    def environment(self) -> Mapping[str, str]:
        """How a process finds the database; its command line is no place for a password."""
        return {"ONWARD_URL": self.url, "ONWARD_SCHEMA": self.schema}

    @property
    def options(self) -> str:
        """How to name the database to a command."""
        return options_of(self.database)


@contextmanager
def scene(url: str | None, *, schema: str, keep: bool) -> Generator[Scene]:
    """Open the database, and leave nothing behind but what is to be kept.

    Args:
        url: of the database; None: a file in the demo's own folder.
        schema: PostgreSQL only: the schema of Onward's tables.
        keep: whether the folder stays, with the database in it.
    """
    folder = Path(tempfile.mkdtemp(prefix="onward-demo-"))
    own = f"sqlite:///{folder}/onward.db"
    app.use(url or own, schema=schema)
    try:
        yield Scene(folder=folder, url=url or own, schema=schema, own=url is None, keep=keep)
    finally:
        app.close()
        if url is not None or not keep:
            shutil.rmtree(folder, ignore_errors=True)


def make_tables(database: Database) -> list[str]:
    """Make Onward's tables where there are none; returns the migrations that were applied.

    Raises:
        SchemaMissing: there are tables of another version, which the demo leaves as they are.
    """
    applied = database.schema_version()
    if applied == 0:
        return database.migrate()
    check_version(database, applied)
    return []
