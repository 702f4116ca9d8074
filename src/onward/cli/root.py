"""The command tree, and what holds for all of it: lazy imports, near names, errors, exit codes."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import click

from onward.cli.options import Place, place_options
from onward.errors import OnwardError

PROBLEM, USAGE, NOT_FOUND, UNREACHABLE, REFUSED, TIMED_OUT, INTERRUPTED = 1, 2, 3, 5, 6, 7, 130
"""Exit statuses."""

_SECTIONS: Mapping[str, Mapping[str, str]] = {
    "Run": {
        "worker": "Run jobs.",
        "demo": "See Onward at work: jobs, a crash, a recovery.",
        "bench": "Measure your database in half a minute.",
    },
    "Look": {
        "status": "Show the system on one screen.",
        "workers": "List the workers.",
        "lifecycle": "Show every state and every legal move of a job.",
    },
    "Jobs": {
        "job": "List, show, cancel and requeue jobs.",
        "dead": "List, requeue and discard dead jobs.",
    },
    "Care": {
        "db": "Create, migrate, prune and read the database.",
        "doctor": "Examine the database, the workers and every promise that Onward makes.",
    },
}


class Family(click.Group):
    """A group of commands that knows the nearest name to a wrong one."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in self.list_commands(ctx):
            from difflib import get_close_matches

            near = get_close_matches(args[0], self.list_commands(ctx), n=1, cutoff=0.5)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            ctx.fail(f"there is no command {args[0]!r}.{hint}")
        return super().resolve_command(ctx, args)


class Root(Family):
    """The tree. A command's module is imported when the command is called."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Bytes that are no text are refused here, not by whoever meets them first."""
        for word in args:
            if not word.isascii() and word.encode(errors="replace").decode() != word:
                ctx.fail(f"{word!r} is no text: it has bytes that are no UTF-8.")
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for section in _SECTIONS.values() for name in section]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        found: click.Command = getattr(importlib.import_module(f"onward.cli.{cmd_name}"), cmd_name)
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, section in _SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(f"{name:<9}", text) for name, text in section.items()])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except OnwardError as error:
            from onward.cli.troubles import exit_code, tell

            tell(error)
            ctx.exit(exit_code(error))
        except (KeyboardInterrupt, click.Abort):
            click.echo("\ninterrupted", err=True)
            ctx.exit(INTERRUPTED)


def _show_version(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        from onward.version import version

        click.echo(f"onward {version()}")
        context.exit()


_EPILOG = """\b
Examples:
  onward demo
  onward worker shop.jobs:app --concurrency 16
  onward status --database postgresql://app@db/shop
  onward dead requeue --task billing.charge

\b
Exit status: 0 done, 1 a problem was found, 2 wrong usage, 3 not found,
5 no database, 6 refused, 7 timed out, 130 interrupted.

\b
The database: --database, else ONWARD_URL, else sqlite:///onward.db."""


@click.group(
    cls=Root,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=_EPILOG,
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show the version, and exit.",
)
@place_options
@click.pass_context
def root(context: click.Context) -> None:
    """Onward: background jobs for Python."""
    if not isinstance(context.obj, Place):
        context.obj = Place()
