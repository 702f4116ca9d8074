"""Options that commands share, and what their values may look like."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import click
from click.core import ParameterSource

F = TypeVar("F", bound=Callable[..., Any])


class Place(NamedTuple):
    """Which database a command is about. `url` and `told_schema` are None where none was named on
    the command line; `schema` may also be that of the environment.
    """

    url: str | None = None
    schema: str = "onward"
    told_schema: str | None = None

    @property
    def chosen(self) -> str:
        """The URL, or else `ONWARD_URL`, or else the file beside you."""
        from onward.config import default_url  # Not for a page of help.

        return self.url or default_url()

    def check_schema(self, url: str) -> None:
        """Refuse a schema that was asked for where there are none."""
        if self.told_schema is not None and url.lower().startswith("sqlite:"):
            raise click.UsageError(
                f"--schema {self.told_schema}: the database is SQLite, and only PostgreSQL has"
                " schemas."
            )


def _place(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
    """Keep what was named; what stands nearer to the command wins, and the environment least."""
    if value is None:
        return
    known = context.obj if isinstance(context.obj, Place) else Place()
    if parameter.name == "database":
        context.obj = known._replace(url=value)
    elif context.get_parameter_source("schema") is ParameterSource.COMMANDLINE:
        context.obj = known._replace(schema=value, told_schema=value)
    elif known.told_schema is None:
        context.obj = known._replace(schema=value)


def place_options(function: F) -> F:
    """`--database` and `--schema`."""
    schema = schema_option(SCHEMA, "ONWARD_SCHEMA")
    text = "sqlite:///file.db or postgresql://user@host/name"
    default = "[default: ONWARD_URL, or sqlite:///onward.db]"
    return database_option(f"{text} {default}.")(schema(function))


SCHEMA = "PostgreSQL only: the schema of Onward's tables."


def database_option(text: str) -> Callable[[F], F]:
    """`--database` alone, with its line in the help."""
    return click.option("--database", metavar="URL", callback=_place, expose_value=False, help=text)


def schema_option(text: str, variable: str | None = None) -> Callable[[F], F]:
    """`--schema` alone, with its line in the help."""
    return click.option(
        "--schema",
        metavar="NAME",
        callback=_place,
        expose_value=False,
        envvar=variable,
        help=text,
    )


def json_option(function: F) -> F:
    """`--json`."""
    return click.option(
        "--json", "as_json", is_flag=True, help="Print one JSON document instead of text."
    )(function)


def which_options(aged: str) -> Callable[[F], F]:
    """`--task`, `--queue` and `--older-than`: which jobs. `aged` says since when they are old."""

    def decorate(function: F) -> F:
        age = click.option(
            "--older-than",
            metavar="AGE",
            callback=parse_duration,
            help=f"That {aged} longer ago than this: 90s, 10m, 2h, 3d.",
        )
        queue = click.option("--queue", metavar="NAME", help="Of this queue.")
        task = click.option("--task", metavar="NAME", help="Of this task.")
        return task(queue(age(function)))

    return decorate


def bulk_options(function: F) -> F:
    """`--limit`, `--yes` and `--dry-run`: how many, and whether to ask."""
    limit = click.option(
        "--limit",
        type=click.IntRange(1),
        metavar="N",
        help="How many at most, from the highest id.",
    )
    yes = click.option("--yes", "-y", is_flag=True, help="Do not ask.")
    dry_run = click.option("--dry-run", is_flag=True, help="Only show what would be changed.")
    return limit(yes(dry_run(function)))


def check_may_go_on(verb: str, *, yes: bool, dry_run: bool) -> None:
    """Refuse what would have to ask where nobody can answer."""
    if not yes and not dry_run and not sys.stdin.isatty():
        raise click.UsageError(
            f"{verb} asks first, and here is no terminal: --yes says yes, --dry-run only looks."
        )


def examples(*lines: str, note: str = "") -> str:
    """The end of a help page: examples that can be copied."""
    block = "\n".join(["\b", "Examples:", *(f"  {line}" for line in lines)])
    return f"{note}\n\n{block}" if note else block


_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|min|h|d|w)?")
_SECONDS = {"ms": 0.001, "s": 1, "m": 60, "min": 60, "h": 3_600, "d": 86_400, "w": 604_800}


def parse_duration(_: click.Context, parameter: click.Parameter, value: str | None) -> float | None:
    """For an option: a duration in seconds, from `90`, `90s`, `10m`, `2h`, `3d`."""
    if value is None:
        return None
    match = _DURATION.fullmatch(value.strip().lower())
    if match is None:
        raise click.BadParameter(
            f"{value!r} is no duration. Use s, m, h or d, for example 90s or 10m.", param=parameter
        )
    return float(match[1]) * _SECONDS[match[2] or "s"]
