"""Jobs that refuse to be claimed: by a row that was damaged past the rules, or by a rule that a
DBA has added.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from onward.store.database import Database
from tests.store.builders import hand

DAMAGE = "UPDATE onward.job SET finished_at = created_at WHERE id IN ({ids})"


def damage(database: Database, ids: Sequence[str]) -> None:
    """Give queued jobs an end, which no rule of the schema allows."""
    with hand(database) as dba:
        if dba.dialect == "sqlite":
            dba.sql("PRAGMA ignore_check_constraints = ON")
        else:
            dba.sql("ALTER TABLE onward.job DISABLE TRIGGER job_moves")
        dba.sql(DAMAGE.format(ids=_listed(ids)))
        if dba.dialect == "postgres":
            dba.sql("ALTER TABLE onward.job ENABLE TRIGGER job_moves")


def undamage(database: Database) -> None:
    """Take the ends away again."""
    with hand(database) as dba:
        dba.sql("UPDATE onward.job SET finished_at = NULL WHERE state = 'queued'")


def forbid(database: Database, ids: Sequence[str]) -> None:
    """A rule of somebody's own: these jobs do not run."""
    freeze(database, "job", f"new.state = 'running' AND old.id IN ({_listed(ids)})")


def allow(database: Database) -> None:
    """The rule is gone."""
    thaw(database, "job")


def freeze(database: Database, table: str, which: str) -> None:
    """A trigger says no to every update of rows of which `which` is true."""
    with hand(database) as dba:
        if dba.dialect == "sqlite":
            dba.sql(
                f"CREATE TRIGGER frozen BEFORE UPDATE ON onward.{table} WHEN {which}"
                " BEGIN SELECT RAISE(ABORT, 'not this one'); END"
            )
        else:
            dba.sql(
                "CREATE FUNCTION onward.frozen() RETURNS trigger LANGUAGE plpgsql AS"
                " $$ BEGIN RAISE EXCEPTION 'not this one'; END $$"
            )
            dba.sql(
                f"CREATE TRIGGER frozen BEFORE UPDATE ON onward.{table} FOR EACH ROW"
                f" WHEN ({which}) EXECUTE FUNCTION onward.frozen()"
            )


def thaw(database: Database, table: str) -> None:
    """Take the trigger away."""
    with hand(database) as dba:
        if dba.dialect == "sqlite":
            dba.sql("DROP TRIGGER frozen")
        else:
            dba.sql(f"DROP TRIGGER frozen ON onward.{table}")
            dba.sql("DROP FUNCTION onward.frozen")


WAYS: dict[
    str, tuple[Callable[[Database, Sequence[str]], None], Callable[[Database], None], str]
] = {
    "damaged": (damage, undamage, "job_end|job refuses queued > running"),
    "forbidden": (forbid, allow, "not this one"),
}
"""Each way to refuse, what mends it, and a pattern of what the database then says."""


def _listed(ids: Sequence[str]) -> str:
    return ", ".join(f"'{id_}'" for id_ in ids)
