"""The version of the installed package."""

from __future__ import annotations

from functools import cache
from importlib import metadata


@cache
def version() -> str:
    """The version, as the package's metadata has it."""
    try:
        return metadata.version("onward")
    except metadata.PackageNotFoundError:
        return "unknown"
