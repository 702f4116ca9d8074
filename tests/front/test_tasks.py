"""What can be a task, and under which name."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from onward import InvalidOption, Onward
from onward.errors import DuplicateTask, UnknownTask
from onward.task import SyncTask
from tests.front.shop import Address


def test_two_functions_may_not_claim_one_name(app: Onward) -> None:
    @app.task(name="shop.twice")
    def one() -> None: ...

    with pytest.raises(DuplicateTask, match=r"shop\.twice") as refused:

        @app.task(name="shop.twice")
        def two() -> None: ...

    assert refused.value.why.count(__file__) == 2
    assert app.tasks["shop.twice"] is one
    app.task(name="shop.twice")(one.function)  # The same function again is no second one.


def test_two_objects_may_not_claim_one_name(app: Onward) -> None:
    """What has no source of its own is the same only if it is the same object."""
    one = Callable_()
    task = app.task(name="shop.called")(one)
    app.task(name="shop.called")(one)
    with pytest.raises(DuplicateTask, match=r"shop\.called"):
        app.task(name="shop.called")(Callable_())
    with pytest.raises(DuplicateTask, match=r"shop\.called"):
        app.task(name="shop.called")(lambda: None)
    assert app.tasks["shop.called"].function is task.function is one


def test_a_task_that_is_not_there_is_missed_with_the_nearest_names(
    app: Onward, send: SyncTask[..., int]
) -> None:
    with pytest.raises(UnknownTask, match=r"shop\.sned") as missing:
        app.find_task("shop.sned")
    assert "shop.send" in missing.value.why


class Callable_:
    """A thing that can be called."""

    def __call__(self) -> None: ...


def _generates() -> Iterator[int]:
    yield 1


async def _generates_later() -> Any:
    yield 1


@pytest.mark.parametrize("thing", [5, "name", Address, _generates, _generates_later])
def test_what_is_no_function_with_a_body_to_run_is_no_task(idle_app: Onward, thing: Any) -> None:
    with pytest.raises(InvalidOption) as refused:
        idle_app.task(thing)
    assert refused.value.fix


def test_a_task_of_a_task_is_refused(app: Onward, send: SyncTask[..., int]) -> None:
    with pytest.raises(InvalidOption):
        app.task(send)


def test_a_callable_without_a_name_needs_one(app: Onward) -> None:
    with pytest.raises(InvalidOption, match="no name of its own"):
        app.task(Callable_())
    assert app.task(name="shop.called")(Callable_()).enqueue().task == "shop.called"


def test_a_task_and_a_call_are_shown_by_name_and_without_arguments(
    send: SyncTask[..., int],
) -> None:
    """They end up in logs."""
    call = send.call("hunter2")
    assert repr(send) == "<Task shop.send>"
    assert repr(call) == f"<Call of shop.send as {call.job.id}>"


def test_a_task_looks_like_its_function_and_can_be_called(app: Onward) -> None:
    @app.task
    def double(n: int) -> int:
        """Twice as much."""
        return 2 * n

    @app.task
    async def triple(n: int) -> int:
        return 3 * n

    looks = cast(Any, double)
    assert (looks.__name__, looks.__module__) == ("double", __name__)
    assert looks.__doc__ == "Twice as much."
    assert double.name == f"{__name__}.test_a_task_looks_like_its_function_and_can_be_called.double"
    assert double(2) == 4
    assert asyncio.run(triple(2)) == 6
    assert double.using(priority=1)(2) == 4


SCRIPT = """
from onward import Onward
app = Onward("sqlite:///unused.db")

@app.task
def work() -> None: ...

if __name__ == "__main__":
    print(work.name)
"""


# As multiprocessing imports the script of its parent.
SPAWNED = """
import runpy
print(runpy.run_path("jobs.py", run_name="__mp_main__")["work"].name)
"""


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["jobs.py"], "jobs.work"),
        (["-m", "jobs"], "jobs.work"),
        (["-m", "shop.jobs"], "shop.jobs.work"),
        (["-m", "shop"], "shop.work"),
        (["-c", "import shop.__main__ as m; print(m.work.name)"], "shop.work"),
        (["-c", "import jobs; print(jobs.work.name)"], "jobs.work"),
        (["-c", SPAWNED], "jobs.work"),
    ],
    ids=["file", "-m", "-m in a package", "-m a package", "package", "module", "spawned"],
)
def test_a_script_has_the_name_under_which_it_would_be_imported(
    tmp_path: Path, command: list[str], name: str
) -> None:
    (tmp_path / "shop").mkdir()
    for place in ("jobs.py", "shop/jobs.py", "shop/__main__.py"):
        (tmp_path / place).write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == name, done.stderr
