"""Statements of PostgreSQL that call a function of the schema, with its query written out: to see
how it is planned, and to spoil it.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from onward.store.migrate import functions
from onward.store.statements import twins

_PARTS = re.compile(
    r"FUNCTION onward\.\w+\((?P<parameters>.*?)\)\s+RETURNS SETOF .*? LANGUAGE plpgsql"
    r"(?P<settings>.*?)AS \$\$\s*BEGIN\s*RETURN QUERY\s*(?P<query>.*?);\s*END \$\$;",
    re.DOTALL,
)


class Written(NamedTuple):
    """A statement whose function is written out, and the settings under which that is planned."""

    text: str
    settings: list[str]

    @property
    def for_psycopg(self) -> str:
        return re.sub(r"(?<![:\w]):([a-z_]+)", r"%(\1)s", self.text.replace("%", "%%"))

    @property
    def numbered(self) -> tuple[str, list[str]]:
        """The text with `$1` and so on, and the names of its parameters in their order."""
        names = list(dict.fromkeys(re.findall(r"(?<![:\w]):([a-z_]+)", self.text)))
        text = re.sub(
            r"(?<![:\w]):([a-z_]+)", lambda found: f"${names.index(found[1]) + 1}", self.text
        )
        return text, names


def written_out(name: str) -> Written:
    """A statement as if the function that it reads from were a part of its text."""
    text = twins()[name].texts["postgres"]
    call = re.search(r"FROM onward\.(\w+)\((.*)\)(?: AS \w+)?$", text, re.DOTALL)
    parts = call and _PARTS.search(functions().get(call[1], ""))
    if not call or not parts:
        return Written(text, [])
    query = parts["query"]
    parameters = [each.split()[0] for each in parts["parameters"].split(",")]
    for parameter, value in zip(parameters, re.split(r",\s*", call[2]), strict=True):
        query = re.sub(rf"\b{parameter}\b", value, query)
    settings = re.findall(r"SET (\w+ = \w+)", parts["settings"])
    return Written(f"{_called(query)}\n{text[: call.start()]}FROM called", settings)


def _called(query: str) -> str:
    """The query under the name `called`; what writes may not stand deeper than that."""
    others, last = "WITH ", query
    if query.startswith("WITH "):
        at = query.rindex("\n    )\n") + len("\n    )")
        others, last = query[:at] + ", ", query[at:].lstrip()
    return f"{others}called AS (\n    {last}\n)"
