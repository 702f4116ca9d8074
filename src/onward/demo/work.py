"""What the demo's jobs compute, as plain functions of bytes: for the tasks, and for the check."""

from __future__ import annotations

import hashlib
import zlib
from collections import Counter

from msgspec import Struct

REFUSALS = 3
"""After so many attempts the far end always answers, so that a job which keeps trying succeeds."""


class Words(Struct, frozen=True, kw_only=True):
    """Statistics of a text."""

    lines: int
    words: int
    distinct: int
    longest_line: int


class Packed(Struct, frozen=True, kw_only=True):
    """A file's size in bytes before and after compression, and a checksum of what comes out."""

    before: int
    after: int
    checksum: int


def digest_of(data: bytes) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def words_of(data: bytes) -> Words:
    """Statistics of a text.

    Raises:
        UnicodeDecodeError: it is no text.
    """
    text = data.decode("utf-8")
    counts = Counter(text.lower().split())
    return Words(
        lines=text.count("\n"),
        words=counts.total(),
        distinct=len(counts),
        longest_line=max((len(line) for line in text.split("\n")), default=0),
    )


def packed(data: bytes) -> Packed:
    """Compress a file, and read it back to be sure."""
    small = zlib.compress(data, level=9)
    return Packed(before=len(data), after=len(small), checksum=zlib.crc32(zlib.decompress(small)))


def is_refused(digest: str, attempt: int) -> bool:
    """Whether the far end refuses this attempt: one in five of the first few."""
    return attempt <= REFUSALS and int(digest[2 * attempt : 2 * attempt + 2], 16) < 51
