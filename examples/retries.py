"""Failures, retries, and the dead: what becomes of a job that keeps failing, and how it is saved.

Run it: python retries.py. It runs its own worker.
"""

from __future__ import annotations

from pathlib import Path

from onward import BURY, Backoff, Discard, JobFailed, Onward, Snooze, current

app = Onward("sqlite:///retries.db")

soon = Backoff(base=0.05, factor=2)
bridge = Path("bridge-is-open")


@app.task(max_attempts=4, backoff=soon)
def flaky() -> int:
    """Fails twice. Each failure is charged; the delay grows from one to the next."""
    if current().attempt < 3:
        raise ConnectionError("the far end hung up")
    return current().attempt


@app.task(max_attempts=2, backoff=soon)
def deliver(parcel: str) -> str:
    """Fails until somebody does something about it."""
    if not bridge.exists():
        raise RuntimeError("the bridge is closed")
    return f"{parcel} is delivered"


@app.task(on_error={ValueError: BURY})
def parse(text: str) -> int:
    """Another try would meet the same text: a ValueError makes the job dead at once."""
    return int(text)


@app.task
def patient() -> str:
    """Not yet: a snooze is no failure, and costs nothing."""
    if current().attempt == 1:
        raise Snooze(0.05)
    return "now"


@app.task
def outdated() -> None:
    raise Discard("there is a newer report")


def main() -> None:
    bridge.unlink(missing_ok=True)  # of an earlier run
    with app.worker():
        print("flaky succeeded at attempt", flaky.enqueue().wait(timeout=30))
        print("patient:", patient.enqueue().wait(timeout=30))
        for job in (outdated.enqueue(), parse.enqueue("many"), deliver.enqueue("the parcel")):
            try:
                job.wait(timeout=30)
            except JobFailed as error:
                print(f"{job.task.rpartition('.')[2]} is {job.state}: {error.why}")
        print("dead:", app.counts()["dead"])
        save(job.id)


def save(id: str) -> None:
    """A human has mended the cause: the job leaves quarantine with a new attempt, history stays."""
    bridge.touch()
    app.requeue(id)
    job = app.get(id)
    print(job.wait(timeout=30))
    print("its attempts:", [f"{a.number} {a.state}" for a in job.attempts()])


if __name__ == "__main__":
    main()
