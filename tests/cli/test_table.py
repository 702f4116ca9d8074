"""Tables on screens of every width."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from onward.cli.table import Column, draw_table

COLUMNS = (
    Column("id"),
    Column("task", elastic=True),
    Column("queue", elastic=True, spare=True),
    Column("priority", spare=True),
    Column("when"),
)
ITEM = {
    "id": "01a22a82-d0a2-74fa",
    "task": "shop.charge_customer",
    "queue": "reports.daily",
    "priority": 5,
    "when": "in 59 min 55 s",
}


@pytest.mark.parametrize(("width", "spared"), [(120, ""), (80, "PRIORITY"), (66, "PRIORITY QUEUE")])
def test_lesser_columns_go_before_the_others_are_cut(width: int, spared: str) -> None:
    """The last of them first; what is left can be read."""
    console = Console(file=io.StringIO(), width=width, color_system=None)
    draw_table(console, COLUMNS, [ITEM], now=0.0)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert {title for title in ("QUEUE", "PRIORITY") if title not in text} == set(spared.split())
    for key in ("id", "task", "when"):
        assert str(ITEM[key]) in text
