"""From `module:app` to the app. The only place where user code is imported, and only by the name
that the operator gave.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from onward.app import Onward
from onward.errors import AppNotFound
from onward.text import hide_passwords

OURS = str(Path(__file__).parents[1])
"""Where Onward's own code is."""


def load_app(target: str) -> Onward:
    """The app that a target names.

    Args:
        target: `package.module:app`, or `package.module` where the module has one app, or
            `path/to/file.py:app`.

    Raises:
        AppNotFound: it leads to no app; the reason and the nearest thing are named.
    """
    place, _, name = target.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = _module(place, target)
    except AppNotFound:
        raise
    except (Exception, SystemExit) as error:
        raise _broken(place, error) from error
    return _named(module, name, target) if name else _only(module, target)


def target_of(app: Onward) -> str | None:
    """A target by which another process finds this app; None: it is at the top of no module."""
    for function in [task.function for task in app.tasks.values()]:
        module = sys.modules.get(function.__module__)
        names = [name for name, value in vars(module).items() if value is app] if module else []
        if module is None or not names:
            continue
        if module.__name__ != "__main__":
            return f"{module.__name__}:{names[0]}"
        if file := getattr(module, "__file__", None):
            return f"{Path(file).absolute()}:{names[0]}"
    return None


def modules_of(app: Onward) -> list[str]:
    """Where the tasks of this app are written: whoever imports the same has the same tasks."""
    names = {task.function.__module__ for task in app.tasks.values()}
    return sorted(names - {"__main__"})


def import_modules(names: Iterable[str]) -> None:
    """Import the modules in which another process found the tasks of its app.

    Raises:
        AppNotFound: one of them raises, or ends the program.
    """
    for name in names:
        try:
            importlib.import_module(name)
        except (Exception, SystemExit) as error:
            raise _broken(name, error) from error


def app_options(app: Onward) -> str:
    """What a process of its own needs to open the same database, as JSON."""
    return msgspec.json.encode({"url": app.url, **app.options}).decode()


def point_at(app: Onward, options: str) -> None:
    """Have an app use the database of another process's app, as `app_options` tells it."""
    found: dict[str, Any] = msgspec.json.decode(options)
    if found:
        app.use(found.pop("url"), **found)


def _broken(place: str, error: Exception | SystemExit) -> AppNotFound:
    """The app's own code raised while it was imported: where, without the frames of the import."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(("<frozen", OURS)) and "importlib" not in frame.filename
    ]
    told = [*traceback.format_list(frames), *traceback.format_exception_only(error)]
    return AppNotFound(
        f"{place} cannot be imported",
        why=hide_passwords("".join(told).strip()),
        fix='put what ends the program under `if __name__ == "__main__":`'
        if isinstance(error, SystemExit)
        else "mend what it says, or install what is missing where the worker runs",
    )


def _module(place: str, target: str) -> ModuleType:
    if place.endswith(".py"):
        return _from_file(Path(place), target)
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name and not (place + ".").startswith(error.name + "."):
            raise
        raise AppNotFound(
            f"there is no module {place!r} to take the app from",
            why=f"Python looked in {os.getcwd()} and in its own path",
            fix=f"run it from the folder that holds {place.partition('.')[0]}.py",
        ) from error


def _from_file(path: Path, target: str) -> ModuleType:
    if not path.exists():
        raise AppNotFound(
            f"there is no file {path}",
            why=f"the target is {target!r}, and Python looks in {os.getcwd()}",
            fix="path/to/file.py:app, or the module: package.module:app",
        )
    name, folder = _place_of(path.absolute())
    loaded = sys.modules.get(name)
    if loaded is None or getattr(loaded, "__file__", None) != str(path):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
        loaded = importlib.import_module(name)
    found = getattr(loaded, "__file__", None)
    if found is not None and Path(found).resolve() != path.resolve():
        raise AppNotFound(
            f"{path} is hidden behind another module of that name",
            why=f"`import {name}` gives {found}",
            fix="give the file another name",
        )
    return loaded


def _place_of(file: Path) -> tuple[str, Path]:
    """The name under which a file is imported, and the folder that must be in the path for it: a
    file of a package is imported as part of it, so that its tasks have the names they have
    elsewhere.
    """
    parts = [] if file.name == "__init__.py" else [file.stem]
    folder = file.parent
    while (folder / "__init__.py").exists():
        parts.insert(0, folder.name)
        folder = folder.parent
    return ".".join(parts), folder


def _named(module: ModuleType, name: str, target: str) -> Onward:
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if isinstance(found, Onward):
        return found
    raise AppNotFound(
        f"{target!r} is no Onward app",
        why=f"{module.__name__}.{name} is {'missing' if found is None else type(found).__name__}",
        fix=_advice(module),
    )


def _only(module: ModuleType, target: str) -> Onward:
    apps = _apps(module)
    if len(apps) == 1:
        return apps[0][1]
    raise AppNotFound(
        f"{target!r} does not say which app",
        why=f"the module has {len(apps)} apps at its top level",
        fix=_advice(module),
    )


def _apps(module: ModuleType) -> list[tuple[str, Onward]]:
    found = {
        id(value): (name, value)
        for name, value in vars(module).items()
        if isinstance(value, Onward)
    }
    return list(found.values())


def _advice(module: ModuleType) -> str:
    names = [name for name, _ in _apps(module)]
    if names:
        return f"onward worker {module.__name__}:{names[0]}"
    return f"write `app = Onward()` at the top level of {module.__name__}"
