"""The version that workers and commands say they are of."""

from __future__ import annotations

from importlib import metadata

import pytest

from onward.version import version


def test_the_version_is_that_of_the_installed_package() -> None:
    assert version() == metadata.version("onward")


def test_a_package_that_runs_from_its_source_is_of_an_unknown_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker is not kept from its work by the lack of metadata."""

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert version.__wrapped__() == "unknown"
