"""The layers of the house: imports go downward only, and chance and the clock have their doors.

A newcomer who adds a module adds it to LAYERS (or, in the worker, to one of its three tiers) and
reads here what it may import.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "onward"

LAYERS: dict[str, tuple[str, ...]] = {
    "edges": ("bench", "cli", "demo"),
    "the face": ("onward",),
    "checks": ("overview", "overdue", "invariants", "diagram"),
    "worker": ("worker",),
    "front door": (
        "app",
        "task",
        "batch",
        "handle",
        "running",
        "events",
        "failure",
        "codec",
        "faithful",
        "foreign",
        "misfit",
        "names",
        "ids",
        "signals",
        "config",
    ),
    "storage": ("store",),
    "decisions": ("policy",),
    "words": ("job", "lifecycle", "errors", "text", "version"),
}
"""From top to bottom. `onward` is the package's own `__init__`, which only re-exports."""

NO_BUSINESS: dict[str, tuple[str, ...]] = {
    "storage": ("policy", "text", "version"),
    "decisions": ("store",),
}
"""What a layer may not import although it stands below or beside it."""

EXCEPTIONS = {
    ("onward.app", "onward.worker.embedded"): "app.worker() hands one out; imported when asked",
}
"""Imports against the rule, each with its reason."""

IMPURE = {
    *("asyncio", "threading", "concurrent", "multiprocessing", "subprocess", "signal"),
    *("time", "random", "secrets", "os", "io", "socket", "logging"),
    *("sqlite3", "apsw", "psycopg", "psycopg2", "asyncpg", "sqlalchemy"),
}
"""What words and decisions import nothing of: a value and a decision need no world."""

STAGES = {"listener", "claimer", "executor", "finisher", "keeper", "heart"}
PARTS = {
    *("board", "body", "changes", "clocks", "held", "isolation", "lanes", "loading", "refusing"),
    *("stage", "standstill", "threads"),
}
FRAMES = {
    *("aftermath", "child", "embedded", "isolated", "process", "steward", "supervisor", "worker"),
}
"""The worker's three tiers: parts below, stages on them, and what puts the stages together."""

TOPMOST = {"onward.worker.supervisor", "onward.worker.embedded"}

DRIVERS: dict[str, tuple[str, ...]] = {
    # The command line looks into a file without touching it: it may be somebody else's.
    "apsw": ("onward.store.sqlite_apsw", "onward.cli.places"),
    "sqlite3": ("onward.store.sqlite_stdlib",),
    "psycopg": ("onward.store.postgres", "onward.store.address", "onward.store.ways"),
    "psycopg2": (),
    "asyncpg": (),
    "sqlalchemy": (),
}
"""Who may import a driver; a caller's own is recognised without it. (See `belongs` for names.)"""

DOORS: dict[str, dict[str, str]] = {
    "onward.ids": {
        "time.time_ns": "an id carries the time at which it was made",
        "os.urandom": "and the system's randomness, which is safe across a fork",
    },
    "onward.handle": {
        "time.time": "how soon a job is due, in words",
        "time.sleep": "a wait looks again and again",
        "asyncio.sleep": "the same for async code",
    },
    "onward.store.sqlite": {
        "time.time": "the database's clock, where the database has none",
        "time.sleep": "a pause while another process switches the journal",
        "asyncio.sleep": "a wake-up looks for commits of other processes",
    },
    "onward.store.postgres": {
        "time.sleep": "a pause before a statement is repeated",
        "asyncio.sleep": "the same for async code, and before LISTEN is tried again",
    },
    "onward.overdue": {"time.sleep": "a suspicion is watched for a while"},
    "onward.worker.clocks": {
        "time.time": "compared with the database's clock",
        "asyncio.sleep": "a pause between steps, so that others can write",
    },
    "onward.worker.claimer": {"asyncio.sleep": "a turn for the jobs that were just claimed"},
    "onward.worker.aftermath": {"random": "the chance that jitter takes"},
    "onward.worker.finisher": {
        "random": "the chance that jitter takes",
        "asyncio.sleep": "a pause before a write is tried again",
    },
    "onward.worker.heart": {"asyncio.sleep": "a beat"},
    "onward.worker.keeper": {"asyncio.sleep": "a sweep, and a pause between steps of pruning"},
    "onward.worker.stage": {"asyncio.sleep": "a pause before a stage that stumbled goes on"},
    "onward.worker.steward": {"asyncio.sleep": "a watch"},
    "onward.worker.supervisor": {"asyncio.sleep": "a watch, and a pause before a new child"},
    "onward.worker.worker": {"asyncio.sleep": "a look for cancelled jobs"},
    "onward.worker.child": {"time.sleep": "a thread's sign of life"},
    "onward.bench.course": {
        "time.time": "a measurement across processes",
        "time.sleep": "a worker that is to be idle gets a moment between two jobs",
    },
    "onward.bench.scratch": {"os.urandom": "a place of its own for each bench"},
    "onward.bench.tasks": {"time.time": "what the bench asks of an idle worker"},
    "onward.cli.examination": {"time.time": "compared with the database's clock"},
    "onward.demo.tasks": {"asyncio.sleep": "what the demo calls work"},
    "onward.demo.tour": {
        "time.sleep": "a tour that people can follow",
        "os.urandom": "a queue of its own for each tour",
    },
}
"""The only modules that may ask for the time, for chance or for a pause, each with its reason.

(See `belongs` for names.)
"""

GUARDED = {
    *("time.time", "time.time_ns", "time.sleep", "asyncio.sleep", "os.urandom"),
    *("datetime.datetime.now", "datetime.datetime.utcnow", "datetime.datetime.today"),
    *("datetime.date.today", "uuid.uuid1", "uuid.uuid4"),
}
GUARDED_MODULES = {"random", "secrets"}


class Import(NamedTuple):
    """One import: who imports what, in which line."""

    module: str
    target: str
    line: int

    def __str__(self) -> str:
        return f"{self.module}:{self.line} imports {self.target}"


# --- reading the source ---------------------------------------------------------------------------


@cache
def modules() -> dict[str, ast.Module]:
    """Every module by its dotted name; a package by its own."""
    found: dict[str, ast.Module] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = ("onward", *path.relative_to(SOURCE).with_suffix("").parts)
        name = ".".join(parts).removesuffix(".__init__")
        found[name] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def imports() -> Iterator[Import]:
    """Every import, wherever it stands: inside functions and under TYPE_CHECKING too."""
    for module, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield Import(module, alias.name, node.lineno)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{module}:{node.lineno} is relative"
                for alias in node.names:
                    yield Import(module, _target(node.module or "", alias.name), node.lineno)


def _target(package: str, name: str) -> str:
    """`from onward.store import store` imports a module, `from onward.errors import X` a name."""
    inner = f"{package}.{name}"
    return inner if inner in modules() else package


def ours() -> list[Import]:
    return [each for each in imports() if each.target.split(".")[0] == "onward"]


def layer_of(module: str) -> str:
    part = module.split(".")[1] if "." in module else "onward"
    found = [name for name, parts in LAYERS.items() if part in parts]
    assert len(found) == 1, f"{module} is in the layers {found}: give it one in LAYERS"
    return found[0]


def level_of(module: str) -> int:
    """0 is the top; storage and decisions stand side by side."""
    name = layer_of(module)
    return list(LAYERS).index("storage" if name == "decisions" else name)


def stands_on(part: str, target: str) -> bool:
    return target.split(".")[1:2] == [part]


def belongs(module: str, homes: Iterable[str]) -> bool:
    """Whether it is one of these modules, or one cut off from it: `postgres_link` of `postgres`."""
    return any(module == home or module.startswith(f"{home}_") for home in homes)


# --- the layers -----------------------------------------------------------------------------------


def test_every_module_has_its_layer() -> None:
    for module in modules():
        layer_of(module)
    known = {part for parts in LAYERS.values() for part in parts} - {"onward"}
    there = {module.split(".")[1] for module in modules() if "." in module}
    assert known <= there, "LAYERS names modules that are gone"


def test_imports_go_downward_only() -> None:
    upward = [
        str(each)
        for each in ours()
        if level_of(each.target) < level_of(each.module)
        and (each.module, each.target) not in EXCEPTIONS
    ]
    assert upward == []


def test_every_exception_is_needed() -> None:
    made = {(each.module, each.target) for each in ours()}
    assert EXCEPTIONS.keys() <= made


def test_storage_knows_no_policy_and_decisions_know_no_storage() -> None:
    assert [
        str(each)
        for each in ours()
        for part in NO_BUSINESS.get(layer_of(each.module), ())
        if stands_on(part, each.target)
    ] == []


def test_words_and_decisions_touch_nothing_of_the_world() -> None:
    assert [
        str(each)
        for each in imports()
        if layer_of(each.module) in {"words", "decisions"} and each.target.split(".")[0] in IMPURE
    ] == []


def test_drivers_are_imported_by_their_adapters_only() -> None:
    assert [
        str(each)
        for each in imports()
        for driver in [each.target.split(".")[0]]
        if not belongs(each.module, DRIVERS.get(driver, (each.module,)))
    ] == []


# --- inside the worker ----------------------------------------------------------------------------


def tier_of(module: str) -> int:
    """0: frames, 1: stages, 2: parts."""
    part = module.split(".")[2]
    found = [place for place, tier in enumerate((FRAMES, STAGES, PARTS)) if part in tier]
    assert len(found) == 1, f"{module} is in no tier: add it to PARTS, STAGES or FRAMES"
    return found[0]


def inside_the_worker() -> list[Import]:
    prefix = "onward.worker."
    return [
        each for each in ours() if each.module.startswith(prefix) and each.target.startswith(prefix)
    ]


def test_every_module_of_the_worker_has_its_tier() -> None:
    for module in modules():
        if module.startswith("onward.worker."):
            tier_of(module)


def test_stages_do_not_know_each_other_nor_what_puts_them_together() -> None:
    assert [
        str(each)
        for each in inside_the_worker()
        if tier_of(each.target) < tier_of(each.module)
        or (tier_of(each.module) == tier_of(each.target) == 1 and each.module != each.target)
    ] == []


def test_nothing_in_the_worker_knows_its_two_tops() -> None:
    assert [str(each) for each in inside_the_worker() if each.target in TOPMOST] == []


# --- the clock, chance and pauses -----------------------------------------------------------------


def asked_for(tree: ast.Module) -> set[str]:
    """Which guarded names a module uses, however it has imported them."""
    known = dict(_names(tree))
    found = {
        target
        for target in known.values()
        if target in GUARDED or target.split(".")[0] in GUARDED_MODULES
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            spelt = ast.unparse(node)
            first, _, rest = spelt.partition(".")
            full = f"{known.get(first, first)}.{rest}"
            found |= {full} & GUARDED
    return {name.split(".")[0] if name.split(".")[0] in GUARDED_MODULES else name for name in found}


def _names(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Imported names and what they stand for."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.asname or alias.name.split(".")[0], alias.name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def used() -> dict[str, set[str]]:
    """Which guarded names each module uses."""
    return {module: asked_for(tree) for module, tree in modules().items()}


def test_time_chance_and_pauses_come_through_their_doors_only() -> None:
    stray = {
        module: {
            name
            for name in names
            if not belongs(module, [home for home, doors in DOORS.items() if name in doors])
        }
        for module, names in used().items()
    }
    assert _filled(stray) == {}, "inject it, or give the module a door and a reason in DOORS"


def test_every_door_is_used() -> None:
    walked = used()
    unused = {
        home: set(doors)
        - {name for module, names in walked.items() if belongs(module, [home]) for name in names}
        for home, doors in DOORS.items()
    }
    assert _filled(unused) == {}, "nobody goes through these doors any more: wall them up"


def _filled(found: dict[str, set[str]]) -> dict[str, list[str]]:
    return {module: sorted(names) for module, names in found.items() if names}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import time\ntime.time()", {"time.time"}),
        ("import time as t\nt.sleep(1)", {"time.sleep"}),
        ("from time import time as now", {"time.time"}),
        ("import time\nclock = time.time", {"time.time"}),
        ("from datetime import datetime\ndatetime.now()", {"datetime.datetime.now"}),
        ("import datetime as dt\ndt.date.today()", {"datetime.date.today"}),
        ("def f():\n import random\n return random.random()", {"random"}),
        ("from random import choice", {"random"}),
        ("import secrets", {"secrets"}),
        ("from uuid import uuid4", {"uuid.uuid4"}),
        ("import uuid\nuuid.uuid4().hex", {"uuid.uuid4"}),
        ("import asyncio\nasync def f(): await asyncio.sleep(1)", {"asyncio.sleep"}),
        ("import time\ntime.monotonic()", set()),
        ("import uuid\nuuid.uuid5(x, y)", set()),
        ("self.time.time()", set()),
    ],
)
def test_the_guard_of_the_doors_is_not_fooled(source: str, found: Iterable[str]) -> None:
    assert asked_for(ast.parse(source)) == set(found)
