"""Hints from PostgreSQL: LISTEN, on a connection of its own.

A silent connection is asked every `PING_SECONDS` whether it lives, and an answer is waited for
`ASK_SECONDS`; a new one may take `connect_timeout`. So a wire that swallows everything is left
within about 25 seconds. Until then jobs are found by the poll.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import msgspec
import psycopg
from psycopg import sql

from onward.job import NewJob
from onward.store.postgres_link import ASK_SECONDS, deadline, lives, options

if TYPE_CHECKING:
    from onward.store.postgres import PostgresDatabase

PING_SECONDS = 15.0
"""How often a silent LISTEN connection is asked whether it still lives."""


class PostgresWakeup:
    """LISTEN on a connection of its own. When it is lost it is opened anew, and that counts as a
    hint.
    """

    def __init__(self, database: PostgresDatabase) -> None:
        self._database = database
        self.lane: tuple[str, int] | None = None
        self._connection: psycopg.AsyncConnection | None = None

    async def wait(self, timeout: float) -> bool:
        try:
            self.lane = None
            if self._connection is None:
                await self._listen()
                return True
            return await self._heard(self._connection, min(timeout, PING_SECONDS))
        except (psycopg.Error, OSError):
            await self.close()
            await asyncio.sleep(min(timeout, 1.0))
            return False

    async def _heard(self, connection: psycopg.AsyncConnection, timeout: float) -> bool:
        async with contextlib.aclosing(connection.notifies(timeout=timeout, stop_after=1)) as heard:
            async for hint in heard:
                self.lane = read_hint(hint.payload)
                return True
        if not await lives(connection):
            await self.close()
        return False

    async def _listen(self) -> None:
        database = self._database
        connection = await psycopg.AsyncConnection.connect(
            database.listen_url,
            autocommit=True,
            **options(database.listen_url),
        )
        self._connection = connection  # Known before the first wait, which may be cancelled.
        with deadline(connection, ASK_SECONDS):
            await connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(database.channel)))

    async def close(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(Exception):
                await self._connection.close()
            self._connection = None


_DECODER = msgspec.json.Decoder(tuple[str, Annotated[int, msgspec.Meta(ge=-100, le=100)]])


def write_hint(jobs: Sequence[NewJob]) -> str:
    """What a notification says about new jobs: the lane of the first among them."""
    if not jobs:
        return ""
    first = max(jobs, key=lambda job: job.priority)
    return msgspec.json.encode((first.queue, first.priority)).decode()


def read_hint(payload: str) -> tuple[str, int] | None:
    """The lane that a notification names; None if it names none that there can be: it comes from
    somebody else.
    """
    try:
        return _DECODER.decode(payload)
    except msgspec.DecodeError:
        return None
