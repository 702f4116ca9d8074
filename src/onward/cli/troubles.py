"""Errors for people: what, why, how to fix it, without passwords; and the exit status of each."""

from __future__ import annotations

from urllib.parse import parse_qs, unquote, urlsplit

import click

from onward.cli.options import Place
from onward.cli.root import NOT_FOUND, PROBLEM, REFUSED, TIMED_OUT, UNREACHABLE, USAGE
from onward.cli.screen import message
from onward.cli.values import many_lines
from onward.errors import (
    DatabaseError,
    IllegalTransition,
    InvalidOption,
    OnwardError,
    WaitTimeout,
)
from onward.store.database import Refused
from onward.text import hide_passwords


def tell(error: OnwardError) -> None:
    """Say on stderr what happened."""
    message(many_lines(hide_passwords(without_passwords(f"error {error}"))))


def exit_code(error: OnwardError) -> int:
    """The exit status that an error leads to."""
    if isinstance(error, (IllegalTransition, Refused)):
        return REFUSED
    if isinstance(error, InvalidOption):
        return USAGE
    if isinstance(error, DatabaseError):
        return UNREACHABLE
    if isinstance(error, WaitTimeout):
        return TIMED_OUT
    return NOT_FOUND if isinstance(error, LookupError) else PROBLEM


def without_passwords(text: str) -> str:
    """The text with `***` where the password of this command's URL stands."""
    context = click.get_current_context(silent=True)
    place = context.obj if context is not None and isinstance(context.obj, Place) else Place()
    try:
        parts = urlsplit(place.chosen)
    except ValueError:  # Such a URL is never repeated.
        return text
    user = parts.netloc.rpartition("@")[0]
    raw = [user.partition(":")[2], *parse_qs(parts.query).get("password", [])]
    for secret in {spelling for word in raw for spelling in (word, unquote(word))}:
        text = text.replace(secret, "***") if len(secret) > 3 else text
    return text
