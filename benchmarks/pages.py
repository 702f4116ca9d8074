"""Puts measured figures where people read them: in the tables of `docs/performance.md`, and in the
chart of the README.

    python -m benchmarks S1 S3 S4 S6 S7 S13 --json docs/figures/onward.json
    python -m benchmarks S8 S9 S10 S11 S14 S15 --json docs/figures/long.json
    python -m benchmarks.peers --json docs/figures/peers.json
    python -m benchmarks.pages
"""

from __future__ import annotations

import re
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import msgspec

from benchmarks.measure import Line, shown_number, shown_target
from benchmarks.stage import ROOT

FIGURES = ROOT / "docs" / "figures"
PAGE = ROOT / "docs" / "performance.md"
CHART = ROOT / "docs" / "drain.svg"


class Bar(NamedTuple):
    """One bar of the chart."""

    name: str
    rate: float
    ours: bool


def lines_of(path: Path) -> list[Line]:
    """The lines that a run wrote."""
    return [Line(**each) for each in msgspec.json.decode(path.read_bytes())]


def table(lines: list[Line]) -> str:
    """Lines as a table in Markdown."""
    rows = [
        "| | Workload | Median | From – to | Ratio | To | Target |",
        "|---|---|--:|--:|--:|---|---|",
    ]
    for each in lines:
        spread = "" if each.spread is None else " – ".join(map(shown_number, each.spread))
        cells = (
            each.mark,
            each.what,
            f"{shown_number(each.value)} {each.unit}",
            spread,
            "" if each.ratio is None else f"{each.ratio:.2f}",
            each.to,
            shown_target(each),
        )
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def fill_in(page: str, name: str, text: str) -> str:
    """Put a table between its two marks."""
    found, count = re.subn(
        rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)",
        lambda match: f"{match[1]}\n{text}\n\n{match[2]}",
        page,
        flags=re.DOTALL,
    )
    if count != 1:
        raise ValueError(f"the page has no place for {name}")
    return found


def drawn(bars: list[Bar]) -> str:
    """A chart of horizontal bars, legible on light and on dark."""
    left, wide, high, gap = 210, 420, 22, 8
    most = max(bar.rate for bar in bars)
    height = len(bars) * (high + gap) + 34
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + wide + 90} {height}" '
        'font-family="system-ui, sans-serif" font-size="13" role="img">',
        "<title>No-op jobs a second, one worker process, two cores</title>",
        '<text x="0" y="16" fill="#888">no-op jobs a second, one worker process, two cores</text>',
    ]
    for number, bar in enumerate(bars):
        y = 30 + number * (high + gap)
        length = max(1.0, bar.rate / most * wide)
        colour, weight = ("#2f7d4f", "600") if bar.ours else ("#9aa5b1", "400")
        middle = y + high * 0.7
        parts += [
            f'<text x="{left - 10}" y="{middle:.0f}" text-anchor="end" fill="#888" '
            f'font-weight="{weight}">{bar.name}</text>',
            f'<rect x="{left}" y="{y}" width="{length:.0f}" height="{high}" rx="3" '
            f'fill="{colour}"/>',
            f'<text x="{left + length + 8:.0f}" y="{middle:.0f}" fill="#888">'
            f"{bar.rate:,.0f}</text>",
        ]
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    """Fill the page and draw the chart from the files of figures."""
    ours = lines_of(FIGURES / "onward.json")
    peers: dict[str, dict[str, Any]] = msgspec.json.decode((FIGURES / "peers.json").read_bytes())
    page = fill_in(PAGE.read_text("utf-8"), "onward", table(ours))
    page = fill_in(page, "long", table(lines_of(FIGURES / "long.json")))
    parts: list[str] = []
    for name, found in peers.items():
        if "figures" in found:
            lines = [Line(**each) for each in found["figures"]]
            parts.append(f"**{name}.** {'; '.join(found['title'].splitlines())}\n\n{table(lines)}")
        else:
            parts.append(f"**{name}.** Not measured: {found['problem']}")
    PAGE.write_text(fill_in(page, "peers", "\n\n".join(parts)), "utf-8")
    CHART.write_text(drawn(sorted(bars(peers), key=lambda bar: -bar.rate)), "utf-8")


def bars(peers: dict[str, dict[str, Any]]) -> list[Bar]:
    """One process's drain of each, and of Onward beside them: of the same run, because a machine is
    half as fast another day.
    """
    found: list[Bar] = []
    beside: dict[str, list[float]] = {}
    for name, figures in peers.items():
        if "figures" not in figures:
            continue
        lines = [Line(**each) for each in figures["figures"]]
        drains = [each for each in lines if is_drain(each, name)]
        found += [Bar(name, each.value, ours=False) for each in drains[:1]]
        dialect = next(d for d in ("postgresql", "sqlite") if f"Onward on {d}" in figures["title"])
        own = [each.value for each in lines if is_drain(each, "Onward")]
        beside.setdefault(dialect, []).extend(own)
    return [
        *found,
        *(Bar(f"Onward, {dialect}", median(own), ours=True) for dialect, own in beside.items()),
    ]


def is_drain(each: Line, name: str) -> bool:
    """Whether this is the drain of one process by this system."""
    return "drain" in each.what and "one process" in each.what and name in each.what


if __name__ == "__main__":
    main()
