"""What is found where a text belongs. In SQLite a foreign hand may have left something else there:
a BLOB, perhaps a pickle. That is named, and never read.
"""

from __future__ import annotations

_NO_TEXT = "(no text but "


def stored_text(value: object) -> str:
    """A text as it was stored; what names anything else is no JSON."""
    if isinstance(value, str):
        return value
    found = f"a BLOB of {len(value):,} bytes" if isinstance(value, bytes) else type(value).__name__
    return f"{_NO_TEXT}{found})"


def is_no_text(text: str) -> bool:
    """Whether this stands for something else that was found where a text belongs."""
    return text.startswith(_NO_TEXT)
