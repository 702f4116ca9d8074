"""Whether the searches have teeth: each seeded fault in each technique, and who caught it.

    python -m tests.proof.teeth [--seconds 5] [--only explorer] [--write]

Every pair gets a few seconds of its own. Without a fault each technique must find nothing; with
one, at least two techniques must find something. `--write` puts the table into
`docs/reliability.md`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tests.proof.campaign import techniques
from tests.proof.faults import FAULTS, seeded
from tests.proof.report import Budget

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
MARKS = re.compile(r"(<!-- faults -->\n).*(<!-- /faults -->)", re.DOTALL)
APART = ("torture", "fuzz", "server", "kills on PostgreSQL")
"""Real processes do not have the fault, parsers none of these, and two are too slow for so many."""

SOUND = "no fault"
LEAST = 2


class Bite(NamedTuple):
    """One technique on the product with one fault."""

    fault: str
    technique: str
    found: str | None


def bite(fault: str, technique: str, seconds: float) -> Bite:
    """Search for a while; an error that no product makes by itself is a find too."""
    run = techniques()[technique].run
    try:
        if fault == SOUND:
            report = run(1, Budget(seconds))
        else:
            with seeded(FAULTS[fault]):
                report = run(1, Budget(seconds))
    except Exception as error:
        return Bite(fault, technique, f"{type(error).__name__}: {error}"[:200])
    return Bite(fault, technique, report.violations[0][:200] if report.violations else None)


def hunt(names: Sequence[str], seconds: float, cores: int) -> list[Bite]:
    """Every fault in every technique."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(cores, mp_context=spawn, max_tasks_per_child=1) as pool:
        tries = [
            pool.submit(bite, fault, name, seconds) for fault in [SOUND, *FAULTS] for name in names
        ]
        bites: list[Bite] = []
        for one in tries:
            bites.append(one.result())
            print(f"{bites[-1].fault} | {bites[-1].technique} | {bites[-1].found}", flush=True)
        return bites


def table(bites: Sequence[Bite], names: Sequence[str]) -> list[str]:
    """The table for the page: a row a fault, a column a technique."""
    found = caught(bites)
    return [
        f"| Fault | Promise | {' | '.join(names)} |",
        f"|---|---|{'---|' * len(names)}",
        *(
            f"| {fault.name} | {fault.promise} | "
            + " | ".join("caught" if name in found[fault.name] else "" for name in names)
            + " |"
            for fault in FAULTS.values()
        ),
    ]


def caught(bites: Sequence[Bite]) -> Mapping[str, set[str]]:
    """Which techniques caught each fault."""
    return {
        fault: {each.technique for each in bites if each.fault == fault and each.found}
        for fault in [SOUND, *FAULTS]
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.proof.teeth", description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0, help="for each fault and technique")
    parser.add_argument("--cores", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", action="append", help="a technique; may be given again")
    parser.add_argument("--write", action="store_true", help="put the table into the page")
    args = parser.parse_args()
    names = args.only or [name for name in techniques() if not name.startswith(APART)]
    bites = hunt(names, args.seconds, args.cores)
    lines = table(bites, names)
    print("", *lines, sep="\n")
    if args.write:
        text = "\n".join(lines)
        PAGE.write_text(MARKS.sub(rf"\g<1>{text}\n\g<2>", PAGE.read_text()))
    found = caught(bites)
    wrong = [f"{SOUND}, yet something found by {name}" for name in found[SOUND]]
    wrong += [
        f"{fault}: caught by {len(by)}, {', '.join(sorted(by)) or 'nobody'}"
        for fault, by in found.items()
        if fault != SOUND and len(by) < LEAST
    ]
    print(*wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
