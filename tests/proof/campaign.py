"""Every search, for as long as it is given, on all cores.

    python -m tests.proof --budget 3600 --seed 7 [--only explorer --only fuzz]

Each technique gets its share of the time, cut into slices with seeds of their own, so that two
cores are busy to the end. What failed before is tried first. It prints what was done, writes it as
JSON if asked to, and fails if anything was found or if a search met none of what it should meet.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from tests.proof.report import Budget, Report, Technique

MODULES = (
    "explorer",
    "simulator",
    "kills",
    "power",
    "server",
    "machine",
    "isolation",
    "torture",
    "fuzz",
)
KEPT = Path(__file__).parents[2] / ".torture" / "failed.json"
SLICE = 60.0

# Each technique's part of the time, weighed by what an hour of two cores should reach. At the rates
# of a quiet machine (explorer 7,200 moves a second of a core, simulator 0.7 ms a lifetime, fuzzing
# 20 us a case, power 13 ms a case, stateful model 90 ms a story on two databases) each reaches it
# with a fifth or more to spare, for the hours in which the machine is slower.
SHARES = {
    "explorer": 1_100,
    "simulator": 700,
    "kills on SQLite": 280,
    "kills on PostgreSQL": 300,
    "power": 2_300,
    "server": 320,
    "stateful model": 2_700,
    "isolation": 70,
    "torture sqlite": 150,
    "torture postgres": 150,
    "fuzzing": 730,
}


class Slice(NamedTuple):
    """One search to be made: which, from which seed, for how many seconds."""

    name: str
    seed: int
    seconds: float


def techniques() -> dict[str, Technique]:
    """Every technique there is, by name."""
    found: dict[str, Technique] = {}
    for module in MODULES:
        for technique in import_module(f"tests.proof.{module}").TECHNIQUES:
            found[technique.name] = technique
    return found


def plan(chosen: Sequence[Technique], budget: float, seed: int, cores: int) -> Iterator[Slice]:
    """The slices in the order in which they are begun: each technique in turn, so that a run that
    is cut short has done something of everything.
    """
    shares = sum(SHARES[technique.name] for technique in chosen)
    left = {each.name: budget * cores * SHARES[each.name] / shares for each in chosen}
    whole_ones = {technique.name for technique in chosen if technique.whole}
    number = 0
    while left:
        for name in list(left):
            # The rest that would be too short is part of the last slice.
            seconds = left[name] if name in whole_ones or left[name] < 2 * SLICE else SLICE
            yield Slice(name, seed + number, seconds)
            number += 1
            left[name] -= seconds
            if left[name] <= 0:
                del left[name]


def search(piece: Slice) -> Report:
    """Make one search; that it cannot be made counts as a violation."""
    try:
        return techniques()[piece.name].run(piece.seed, Budget(piece.seconds))
    except Exception:
        report = Report(piece.name, "nothing", piece.seed)
        report.violate(f"the search itself failed:\n{traceback.format_exc()}")
        return report


def kept() -> list[Slice]:
    """What failed before."""
    if not KEPT.exists():
        return []
    return [Slice(**found) for found in json.loads(KEPT.read_text())]


def keep(failed: Sequence[Slice]) -> None:
    """Note what failed, for the next run."""
    KEPT.parent.mkdir(exist_ok=True)
    KEPT.write_text(json.dumps([piece._asdict() for piece in failed], indent=1))


def main() -> int:
    args = _arguments()
    known = techniques()
    chosen = [known[name] for name in args.only or known]
    began = time.monotonic()
    print(f"torture: budget {args.budget:g} s, seed {args.seed}, {args.cores} cores", flush=True)
    again = [piece for piece in kept() if piece.name in known]
    pieces = iter([*again, *plan(chosen, args.budget, args.seed, args.cores)])
    totals: dict[tuple[str, str], Report] = {}
    failed: list[Slice] = []
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.cores, mp_context=spawn, max_tasks_per_child=1) as pool:
        under_way: dict[Future[Report], Slice] = {}
        while True:
            while len(under_way) < args.cores and (piece := next(pieces, None)):
                under_way[pool.submit(search, piece)] = piece
            if not under_way:
                break
            for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                piece = under_way.pop(future)
                report = future.result()
                if report.violations:
                    failed.append(piece)
                    print(*report.lines(), sep="\n", flush=True)
                key = (report.technique, report.place)
                if key in totals:
                    totals[key].add(report)
                else:
                    totals[key] = report
    keep(failed)
    _tell(list(totals.values()), time.monotonic() - began, args.json)
    return 1 if failed else 0


def _tell(reports: Sequence[Report], seconds: float, path: Path | None) -> None:
    print(f"\ntorture: {seconds:,.0f} s")
    for report in reports:
        print(*report.lines(), sep="\n")
    found = sum(len(report.violations) for report in reports)
    print(f"{found} violations" if found else "no violation")
    if found:
        print(f"what failed is kept in {KEPT.relative_to(Path.cwd())} and tried first next time")
    if path is not None:
        path.write_text(
            json.dumps(
                [
                    {
                        "technique": report.technique,
                        "place": report.place,
                        "did": report.did,
                        "sometimes": report.sometimes,
                        "violations": report.violations,
                    }
                    for report in reports
                ],
                indent=1,
            )
        )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.proof", description=__doc__)
    parser.add_argument("--budget", type=float, default=3600.0, help="seconds")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1_000_000))
    parser.add_argument("--cores", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", action="append", help="a technique; may be given again")
    parser.add_argument("--json", type=Path, help="a file for the figures")
    return parser.parse_args()
