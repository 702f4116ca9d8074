"""The fast form of the fuzzing, inputs that once failed, and proof that it finds what it is for."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from onward.job import NewJob
from onward.store.database import Database
from onward.store.sqlite import SqliteDatabase
from tests.proof import fuzz
from tests.proof.fuzz import TARGETS, fuzz_columns
from tests.proof.report import Budget
from tests.proof.tiers import first

CASES = 200_000
FEW = 12_000

# `target`, `input`: what a search has found. Each was wrong once, or looked it.
FOUND: list[tuple[str, Any]] = [
    ("stored_errors", '"message":"\ufeff'),
    ("stored_errors", "[" * 5_000),
    ("shown_values", "\ud800"),
    ("shown_values", [10**400, float("nan"), Ellipsis]),
    ("clean_texts", ("\x00" * 500, 80)),
    ("durations", (10**400, "lease")),
    ("durations", (float("nan"), "beat")),
    ("codec_texts", (fuzz.KINDS[0][0], "[" * 5_000)),
    ("codec_texts", (fuzz.KINDS[0][0], '{"x":"\ud800"}')),
    ("codec_calls", (fuzz.KINDS[0][0], 10**5_000)),
    ("queue_options", ["mail:²"]),
    ("duration_options", "9" * 400),
    ("file_urls", "sqlite:///\x00"),
    ("server_urls", f"postgresql://user:{fuzz.SECRET}@[::1"),
    ("server_urls", f"postgresql://user:a/{fuzz.SECRET}@host"),
]


def test_no_parser_is_upset() -> None:
    """200,000 cases; each target has its part."""
    report = fuzz.fuzz(1, CASES)
    assert report.violations == []
    assert report.did.total() >= CASES
    assert set(report.did) == set(TARGETS)
    assert min(report.did.values()) >= 1_000


@pytest.mark.parametrize(("kind", "count"), [("apsw", 200), ("sqlite3", 60), ("postgres", 60)])
def test_hostile_text_comes_back_from_every_column(kind: str, count: int) -> None:
    report = fuzz_columns(kind, 1, count)
    assert report.violations == []
    assert report.did["texts"] == count
    assert report.sometimes["texts of a megabyte"] > 0


@pytest.mark.parametrize(("target", "case"), FOUND)
def test_what_was_found_stays_mended(target: str, case: Any) -> None:
    assert TARGETS[target].wrong(case) is None


# --- it finds what is broken ----------------------------------------------------------------------


def bare_id(value: object) -> str:
    return str(uuid.UUID(str(value)))


def nothing(*args: object, **kwargs: object) -> None:
    """Says nothing, whatever it is told."""


def as_it_is(text: Any, *args: object) -> str:
    return str(text)


def anything(name: str) -> bool:
    return True


def bare_error(name: str, why: str, *, noun: str = "") -> Exception:
    return ValueError(why)


FAULTS: dict[str, tuple[str, str, Any]] = {
    "an id that is no id is no error of ours": ("ids", "tests.proof.fuzz.parse_id", bare_id),
    "any name is a name": ("names", "onward.names._is_name", anything),
    "the password is shown": ("server_urls", "onward.store.postgres.shown", as_it_is),
    "control characters are stored": ("clean_texts", "onward.text._UNSAFE", re.compile("\x00")),
    "control characters are sent to terminals": (
        "shown_values",
        "onward.cli.values._visible",
        as_it_is,
    ),
    "arguments are bent": ("codec_calls", "onward.codec.compare_arguments", nothing),
    "unreadable arguments are no error of ours": (
        "codec_texts",
        "onward.codec.unreadable",
        bare_error,
    ),
    "errors are stored as they come": ("failures", "onward.failure.clean_text", as_it_is),
    "durations are what float() reads": (
        "duration_options",
        "onward.cli.options._DURATION",
        re.compile(r"(.+?)\s*(ms|s|m|h|d|w)?"),
    ),
    "limits are what int() reads": ("queue_options", "onward.cli.worker.check_name", as_it_is),
}


@pytest.mark.parametrize("fault", first(6, FAULTS))
def test_a_broken_parser_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the target that is for it."""
    name, place, broken = FAULTS[fault]
    monkeypatch.setattr(place, broken)
    monkeypatch.setattr(fuzz, "TARGETS", {name: TARGETS[name]})
    assert fuzz.fuzz(1, FEW).violations


def spoilt(write: Callable[..., Any]) -> Callable[..., Any]:
    """A database that trims what it is given."""

    def enqueue(self: Database, jobs: list[NewJob]) -> Any:
        return write(self, [replace(job, args=job.args.strip(' {}"')) for job in jobs])

    return enqueue


def test_a_column_that_changes_its_text_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SqliteDatabase, "enqueue", spoilt(SqliteDatabase.enqueue))
    assert fuzz_columns("apsw", 1, 20).violations


def test_text_that_is_not_cleaned_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "storable", as_it_is)
    assert fuzz_columns("apsw", 1, 100).violations


def test_the_deep_form_ends_with_its_budget() -> None:
    (technique,) = fuzz.TECHNIQUES
    start = time.monotonic()
    report = technique.run(7, Budget(1.0))
    assert report.violations == []
    assert report.did.total() > 1_000
    assert time.monotonic() - start < 30
