"""`onward doctor`: examines everything, and says what each finding means and how to fix it."""

from __future__ import annotations

import click

from onward.cli.examination import Diagnosis, Level, examine
from onward.cli.options import Place, examples, json_option, place_options
from onward.cli.root import PROBLEM, UNREACHABLE
from onward.cli.screen import Part, Screen, print_json
from onward.cli.values import one_line

_SIGNS: dict[Level, Part] = {
    "ok": ("✓", "green"),
    "note": ("!", "yellow"),
    "bad": ("✗", "bold red"),
}

_MOST_ROWS = 5


@click.command(
    epilog=examples(
        "onward doctor",
        "onward doctor --database postgresql://app@db/shop",
        "onward doctor --json",
    )
)
@json_option
@place_options
@click.pass_obj
def doctor(place: Place, as_json: bool) -> None:
    """Examine the database, the workers and every promise that Onward makes.

    Each line is ✓ sound, ! worth a look, or ✗ bad, with its meaning and what to do. Nothing is
    changed. Exit status 1 if something is bad, 5 if the database cannot be examined.
    """
    found = list(examine(place))
    if as_json:
        print_json(
            "doctor/1",
            findings=[
                {name: getattr(each, name) for name in each.__struct_fields__} for each in found
            ],
        )
    else:
        _show(Screen(), found)
    bad = [each for each in found if each.level == "bad"]
    if bad:
        gone = any(each.code == "database" for each in bad)
        click.get_current_context().exit(UNREACHABLE if gone else PROBLEM)


def _show(screen: Screen, found: list[Diagnosis]) -> None:
    wide = max(len(each.name) for each in found)
    for each in found:
        name = (f"{each.name:<{wide}}", "bold")
        screen.line(_SIGNS[each.level], " ", name, f"  {one_line(each.what, 1_000)}")
        if each.level == "ok":
            continue
        screen.line("    why: ", one_line(each.meaning, 1_000))
        screen.line("    fix: ", one_line(each.fix, 1_000))
        for row in each.rows[:_MOST_ROWS]:
            screen.line("      ", one_line(row))
        if len(each.rows) > _MOST_ROWS:
            screen.line(f"      … and {len(each.rows) - _MOST_ROWS:,} more")
    counts = {level: sum(each.level == level for each in found) for level in _SIGNS}
    screen.line("")
    screen.line(f"{counts['ok']} sound, {counts['note']} to look at, {counts['bad']} bad")
