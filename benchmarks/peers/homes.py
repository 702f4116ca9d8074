"""Environments: each system is installed into one of its own, made on first use and kept.

They are in the folder that `PEERS_ROOT` names, else in `onward-peers` in the user's cache
directory. What is pinned in `requirements/` is installed by pip or npm as they are configured here.
When the pins change, the environment is made again.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.peers.systems import System

HERE = Path(__file__).parent
STAMP = "installed"
NODE = (22, 18)
NODE_PACKAGE = "22.23.5"
NEWER = ("python3.14", "python3.13", "python3.12")


class Unavailable(Exception):
    """A system cannot be measured on this machine; the message says why, and what would help."""


def root() -> Path:
    """The folder of all environments."""
    if named := os.environ.get("PEERS_ROOT"):
        return Path(named)
    if sys.platform == "darwin":
        return Path.home() / "Library/Caches/onward-peers"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "onward-peers"


def prepare(system: System) -> list[str]:
    """The words that start a system's adapter; makes its environment if it is not there.

    Raises:
        Unavailable: it cannot be installed, or what it runs on is missing.
    """
    pins = system.pins.read_text()
    home = root() / system.key
    if not (home / STAMP).exists() or (home / STAMP).read_text() != pins:
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir(parents=True)
        if system.node:
            _install_node(home, system.pins)
        else:
            _install_python(home, system)
        (home / STAMP).write_text(pins)
    if system.node:
        modules = home / "node_modules"
        adapter = str(HERE / "adapters" / system.adapter)
        return ["env", f"NODE_PATH={modules}", _node(modules), adapter]
    return [str(home / "bin/python"), "-m", f"benchmarks.peers.adapters.{system.adapter}"]


# --- Python ---------------------------------------------------------------------------------------


def _install_python(home: Path, system: System) -> None:
    _run([_python(system.python), "-m", "venv", str(home)])
    _run([str(home / "bin/python"), "-m", "pip", "install", "--quiet", "-r", str(system.pins)])


def _python(least: tuple[int, int]) -> str:
    """The interpreter that runs this, so that all systems have the same; another only where a
    system needs a newer one.
    """
    for name in (sys.executable, os.environ.get("PEERS_PYTHON"), *NEWER):
        if name and (path := shutil.which(name)) and _python_version(path) >= least:
            return path
    wanted = ".".join(str(part) for part in least)
    raise Unavailable(f"needs Python {wanted} or newer; PEERS_PYTHON can name one")


def _python_version(path: str) -> tuple[int, ...]:
    program = "import sys; print(*sys.version_info[:2])"
    done = subprocess.run([path, "-c", program], capture_output=True, text=True, check=False)
    return tuple(int(word) for word in done.stdout.split()) if done.returncode == 0 else ()


# --- Node -----------------------------------------------------------------------------------------


def _install_node(home: Path, pins: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise Unavailable("needs Node and npm; there is no npm on PATH")
    shutil.copy(pins, home / "package.json")
    words = [npm, "install", "--silent", "--prefix", str(home)]
    if _node_version(shutil.which("node")) < NODE:
        machine = {"x86_64": "x64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
        words.append(f"node-{sys.platform}-{machine}@{NODE_PACKAGE}")
    _run(words)


def _node(modules: Path) -> str:
    """The Node that was installed beside the system, else the one on PATH."""
    installed = [str(path) for path in modules.glob("node-*/bin/node")]
    found = [*installed, shutil.which("node")][0]
    if found is None or _node_version(found) < NODE:
        raise Unavailable(f"needs Node {NODE[0]}.{NODE[1]} or newer")
    return found


def _node_version(path: str | None) -> tuple[int, ...]:
    if path is None:
        return ()
    done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    return tuple(int(word) for word in done.stdout.strip().lstrip("v").split(".") if word)


def _run(words: list[str]) -> None:
    done = subprocess.run(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        raise Unavailable(f"could not be installed:\n{done.stdout[-1_000:]}")
