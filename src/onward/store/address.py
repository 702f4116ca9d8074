"""A server's URL: what may be shown of it, and what is wrong with it, said without its password.

libpq quotes what it cannot read, and that may be a part of the password: so whatever it could not
read is refused here first, in words of our own.
"""

from __future__ import annotations

import re
from urllib.parse import SplitResult, unquote, urlsplit

from onward.errors import InvalidOption

_STRAY_PERCENT = re.compile(r"%(?![0-9A-Fa-f]{2})")
_HOST = re.compile(r"(\[[^\]]*\]|[^:\[\]]*)(:\d*)?")


def checked(url: str) -> str:
    """The URL as libpq reads it.

    Raises:
        InvalidOption: libpq would not read it, or would read something else out of it.
    """
    from psycopg import ProgrammingError
    from psycopg.conninfo import conninfo_to_dict

    parts = _split(url)
    if not url.isprintable():
        raise _unreadable("it has characters that cannot be printed, or bytes that are no UTF-8")
    try:
        unquote(url, errors="strict")
    except UnicodeDecodeError:
        raise _unreadable("what is percent-encoded in it is no UTF-8") from None
    user, at, place = parts.netloc.rpartition("@")
    if not url.partition(":")[2].startswith("//"):
        raise _unreadable("after its scheme come two slashes")
    beyond = parts.path + ("" if at else parts.query)
    if "@" in user + beyond or parts.fragment or _STRAY_PERCENT.search(user):
        raise _unreadable("a user or a password has characters that mean something in a URL")
    if any(not equals for _, equals, _ in _pairs(parts)):
        raise _unreadable("a parameter has no value; an & in one is written %26")
    if not all(map(_HOST.fullmatch, place.split(","))):
        raise _unreadable("a port is no number")
    spelt = f"postgresql{url[len(parts.scheme) :]}"
    try:
        conninfo_to_dict(spelt)
    except ProgrammingError as error:
        # Without the user and the password, what libpq says can be repeated.
        plain = f"postgresql://{place}{parts.path}?{shown_query(parts)}"
        raise _unreadable(_said_of(plain) or type(error).__name__) from None
    return spelt


def shown(url: str) -> str:
    """A URL that has been checked, without its password, for messages."""
    parts = urlsplit(url)
    user, at, place = parts.netloc.rpartition("@")
    query = shown_query(parts)
    host = f"{user.partition(':')[0]}{at}{place}"
    return f"{parts.scheme}://{host}{parts.path}{'?' if query else ''}{query}"


def shown_query(parts: SplitResult) -> str:
    """The parameters of a URL, but for passwords."""
    # A piece without a `=` may be the rest of a password with an & in it.
    shown = [
        f"{name}={value}"
        for name, equals, value in _pairs(parts)
        if equals and "password" not in unquote(name).lower()
    ]
    return "&".join(shown)


def _pairs(parts: SplitResult) -> list[tuple[str, str, str]]:
    return [pair.partition("=") for pair in parts.query.split("&") if pair]


def _split(url: str) -> SplitResult:
    try:
        return urlsplit(url)
    except ValueError:  # Brackets that are no IPv6 address.
        raise _unreadable("a bracket stands where it means something in a URL") from None


def _said_of(plain: str) -> str | None:
    """What libpq says of a URL that has nothing to hide."""
    from psycopg import ProgrammingError
    from psycopg.conninfo import conninfo_to_dict

    try:
        conninfo_to_dict(plain)
    except ProgrammingError as error:
        return str(error).strip()
    return None


def _unreadable(why: str) -> InvalidOption:
    return InvalidOption(
        "the database URL cannot be read (it is not shown: it may hold a password)",
        why=why,
        fix="percent-encode user and password: urllib.parse.quote(password, safe='')",
    )
