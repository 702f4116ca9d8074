"""From a URL to a database: `sqlite:///file` or `postgresql://…`, one URL apart."""

from __future__ import annotations

from os.path import expanduser
from pathlib import Path, PurePath
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from onward.errors import DriverMissing, InvalidOption
from onward.store.address import checked
from onward.store.database import Database
from onward.store.sqlite_place import url_of

_SYNCHRONOUS = {"full": "FULL", "normal": "NORMAL", "extra": "EXTRA"}
_KINDS = "sqlite:///onward.db for a file, postgresql://user@host/name for a server"


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
    url = _text(url, "the database URL")
    scheme = url.partition(":")[0].lower()
    if scheme == "sqlite":
        return _sqlite(url, sqlite_driver)
    if scheme in {"postgresql", "postgres"}:
        return _postgres(url, schema, listen_url)
    raise InvalidOption(
        f"the database URL {_shorten(url)!r} names no database that Onward knows",
        why="it begins with neither sqlite:// nor postgresql://",
        fix=_KINDS,
    )


def _text(given: object, what: str) -> str:
    """What is given as a URL. Of what is no text only the kind is told: it may hold a password."""
    if isinstance(given, str):
        return given
    raise InvalidOption(
        f"{what} is no text: it is {'None' if given is None else type(given).__name__}",
        why="a URL says which kind of database it is, and where",
        fix=f"Onward({url_of(given)!r})" if isinstance(given, PurePath) else _KINDS,
    )


def _sqlite(url: str, driver: str) -> Database:
    from onward.store.sqlite import SqliteDatabase
    from onward.store.sqlite_driver import driver as load

    parts = _split(url)
    path = unquote(parts.path.removeprefix("/"))
    # What splits a URL drops tabs and line ends from it.
    if not (url + path).isprintable() or (path.startswith("~") and expanduser(path) == path):
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
    synchronous = _synchronous(url, parts)
    return SqliteDatabase(Path(path), load(driver), synchronous=synchronous)


def _synchronous(url: str, parts: SplitResult) -> str:
    """The durability that a URL asks for; it may ask for nothing else."""
    if "#" in url:
        raise InvalidOption(
            f"the database URL {_shorten(url)!r} goes on behind a #",
            why="what stands there is no part of a file's name, and says nothing about a database",
            fix="write %23 for a # in the file's name, or leave it out",
        )
    given = parse_qsl(parts.query, keep_blank_values=True)
    for name, _ in given:
        if name != "synchronous":
            raise _no_parameter(url, name)
    wanted = "&".join(value.lower() for _, value in given) if given else "full"
    if wanted not in _SYNCHRONOUS:
        raise InvalidOption(
            f"synchronous={wanted} is not a durability of SQLite",
            why="it is said more than once" if len(given) > 1 else "",
            fix="full (the default: a commit survives a power cut) or normal",
        )
    return _SYNCHRONOUS[wanted]


def _no_parameter(url: str, name: str) -> InvalidOption:
    from difflib import get_close_matches  # Needed only here.

    near = get_close_matches(name.lower(), ["synchronous"], cutoff=0.4)
    shown = _shorten(url)
    which = "a parameter" if shown != url else f"the parameter {name[:40]!r}"
    return InvalidOption(
        f"the database URL {shown!r} has {which}, which means nothing for SQLite",
        why="synchronous is the only one, with the value full, normal or extra",
        fix=("did you mean synchronous? " if near else "")
        + "sqlite:///onward.db?synchronous=normal; a ? in the file's name is written %3F",
    )


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
    listen = None if listen_url is None else _text(listen_url, "listen_url")
    return PostgresDatabase(
        checked(url), schema=schema, listen_url=checked(listen) if listen else None
    )


def _shorten(url: str) -> str:
    """The URL for a message: not too long, and nothing of it where it may hold a password."""
    if "@" in url or "password" in url.lower():
        scheme, colon, _ = url.partition("://")
        return f"{scheme}://…" if colon and scheme.isalnum() else "…"
    return url if len(url) <= 80 else url[:77] + "..."
