"""From a URL to a database: `sqlite:///file` or `postgresql://…`, one URL apart."""

from __future__ import annotations

from os.path import expanduser
from pathlib import Path
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

from onward.errors import DriverMissing, InvalidOption
from onward.store.address import checked
from onward.store.database import Database

_SYNCHRONOUS = {"full": "FULL", "normal": "NORMAL", "extra": "EXTRA"}


def open_database(
    url: str,
    *,
    schema: str = "onward",
    listen_url: str | None = None,
    sqlite_driver: str = "apsw",
) -> Database:
    """The database at a URL; nothing is opened or connected yet.

    Args:
        url: `sqlite:///relative.db`, `sqlite:////absolute.db`, or `postgresql://user@host/name`.
        schema: PostgreSQL only: the schema of Onward's tables.
        listen_url: PostgreSQL only: a direct address for LISTEN, beside a pooled `url`.
        sqlite_driver: SQLite only: `apsw`, or `sqlite3` where the application opens the same file
            with it.

    Raises:
        InvalidOption: no such kind of database, or a URL that leads nowhere.
        DriverMissing: the driver is not installed.
    """
    scheme = url.partition(":")[0].lower()
    if scheme == "sqlite":
        return _sqlite(url, sqlite_driver)
    if scheme in {"postgresql", "postgres"}:
        return _postgres(url, schema, listen_url)
    raise InvalidOption(
        f"the database URL {_shorten(url)!r} names no database that Onward knows",
        why="it begins with neither sqlite:// nor postgresql://",
        fix="sqlite:///onward.db for a file, postgresql://user@host/name for a server",
    )


def _sqlite(url: str, driver: str) -> Database:
    from onward.store.sqlite import SqliteDatabase
    from onward.store.sqlite_driver import driver as load

    parts = _split(url)
    path = unquote(parts.path.removeprefix("/"))
    if not path.isprintable() or (path.startswith("~") and expanduser(path) == path):
        raise InvalidOption(
            f"the database URL {_shorten(url)!r} names no file",
            why="its path has characters that cannot be printed, or the ~ of somebody unknown here",
            fix="sqlite:////home/you/onward.db",
        )
    if parts.netloc or not path or path == ":memory:" or path.endswith("/"):
        raise InvalidOption(
            f"the database URL {_shorten(url)!r} names no file",
            why="every process and thread must see the same jobs, so SQLite needs a file"
            + ("; sqlite:// takes three slashes before a path" if parts.netloc else ""),
            fix="sqlite:///onward.db (beside you) or sqlite:////var/lib/app/onward.db (absolute)",
        )
    wanted = parse_qs(parts.query).get("synchronous", ["full"])[0].lower()
    if wanted not in _SYNCHRONOUS:
        raise InvalidOption(
            f"synchronous={wanted} is not a durability of SQLite",
            fix="full (the default: a commit survives a power cut) or normal",
        )
    return SqliteDatabase(Path(path), load(driver), synchronous=_SYNCHRONOUS[wanted])


def _split(url: str) -> SplitResult:
    try:
        return urlsplit(url)
    except ValueError as error:
        raise InvalidOption(
            f"the database URL {_shorten(url)!r} cannot be read",
            why=str(error),
            fix="percent-encode what means something in a URL: urllib.parse.quote(path)",
        ) from None


def _postgres(url: str, schema: str, listen_url: str | None) -> Database:
    try:
        from onward.store.postgres import PostgresDatabase
    except ImportError as error:
        raise DriverMissing(
            "the PostgreSQL driver is not installed",
            why=str(error),
            fix="pip install 'onward[postgres]'",
        ) from error
    listen = checked(listen_url) if listen_url else None
    return PostgresDatabase(checked(url), schema=schema, listen_url=listen)


def _shorten(url: str) -> str:
    """The URL for a message: not too long, and nothing of it where it may hold a password."""
    if "@" in url or "password" in url.lower():
        scheme, colon, _ = url.partition("://")
        return f"{scheme}://…" if colon and scheme.isalnum() else "…"
    return url if len(url) <= 80 else url[:77] + "..."
