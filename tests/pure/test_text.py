"""Texts for people: safe to make, short, clean, and without secrets, whatever the value does."""

from __future__ import annotations

import datetime as dt
import sys
import time
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onward.text import clean_text, hide_passwords, is_secret, safe_repr, said, type_name
from tests.pure import payloads
from tests.pure.payloads import Colour, Text, anything, hostile_class

# ---------------------------------------------------------------------------- secrets


@pytest.mark.parametrize(
    "name",
    ["password", "db_passwd", "SECRET_KEY", "token", "api_key", "apikey", "Authorization",
     "credentials", "private_key", "set-cookie"],
)  # fmt: skip
def test_names_that_look_secret(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize("name", ["user", "key", "path", "author", "id"])
def test_names_that_do_not_look_secret(name: str) -> None:
    assert not is_secret(name)


# ---------------------------------------------------------------------------- values and types


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("a\x00\x1b[31m\ud800", r"'a\x00\x1b[31m\ud800'"),
        ((1,), "(1,)"),
        ([1, {"a": {2}}], "[1, {'a': {2}}]"),
        (list(range(100)), "[0, 1, 2, 3, 4, 5, …]"),
        ([[[[[1]]]]], "[[[[…]]]]"),
        (10**5000, "<int of 16,610 bits>"),
        ({"user": {"password": "x"}}, "{'user': {'password': ***}}"),
        (Text("secret"), f"<{payloads.__name__}.Text object>"),
        (Colour.RED, f"{payloads.__name__}.Colour.RED"),
        (dt.date(2024, 1, 1), "datetime.date(2024, 1, 1)"),
    ],
    ids=range(10),
)
def test_a_value_is_shown_safely(value: object, shown: str) -> None:
    assert safe_repr(value).startswith(shown)


@given(anything)
@settings(deadline=None)
def test_a_shown_value_is_short_and_printable(value: object) -> None:
    shown = safe_repr(value)
    assert len(shown) <= 80
    assert clean_text(shown, 80) == shown


def test_the_name_of_a_type_is_taken_past_its_metaclass() -> None:
    assert type_name(int) == "int"
    assert type_name(Decimal) == "decimal.Decimal"
    assert type_name(hostile_class()) == f"{payloads.__name__}.HostileClass"
    odd = type("Odd", (), {"__module__": 5})
    odd.__qualname__ = "a\x00\ud800"
    assert type_name(odd) == r"a\x00\ud800"


def test_a_class_of_no_module_has_its_bare_name() -> None:
    """Code that is run from a text may have no `__name__`, and so may its classes."""
    odd: type = eval("type('Odd', (), {})", {})
    with pytest.raises(AttributeError):
        print(odd.__module__)
    assert type_name(odd) == "Odd"
    assert safe_repr(odd()) == "<Odd object>"


@pytest.mark.parametrize("value", [{"a": [1], "b": [2]}, {1, 2}, [{"a": [1]}]], ids=range(3))
def test_a_value_that_changes_while_it_is_looked_at_is_shown_as_its_type(value: Any) -> None:
    """Another thread may do so at any moment; here that thread is whoever is told of each call."""
    changing: Any = value[0] if type(value) is list else value

    def change(*_: object) -> None:
        if type(changing) is dict:
            changing[len(changing)] = [0]
        else:
            changing.add(len(changing) * 100)

    sys.setprofile(change)
    try:
        shown = safe_repr(value)
    finally:
        sys.setprofile(None)
    assert shown == f"<{type(value).__name__} object>"


# ---------------------------------------------------------------------------- errors


class Broken(Exception):
    def __str__(self) -> str:
        raise LookupError


def test_an_error_is_said_with_its_message_where_that_can_be_had() -> None:
    assert said(ValueError("no\x00")) == r"ValueError: no\x00"
    assert said(Broken()) == f"{__name__}.Broken"


# ---------------------------------------------------------------------------- clean text


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("plain\n\ttext é", "plain\n\ttext é"),
        ("boom\x00tail", r"boom\x00tail"),
        ("x\ud800y\udfff", r"x\ud800y\udfff"),
        ("\x1b[31mred\r\x7f\x9b", r"\x1b[31mred\x0d\x7f\x9b"),
        ("", ""),
    ],
    ids=range(5),
)
def test_unsafe_characters_become_visible(text: str, cleaned: str) -> None:
    assert clean_text(text, 1000) == cleaned


def test_a_long_text_is_cut_in_the_middle_and_says_so() -> None:
    cleaned = clean_text("a" * 500 + "b" * 500, 100)
    assert len(cleaned) <= 100
    assert cleaned.startswith("aaa")
    assert cleaned.endswith("bbb")
    head, _, rest = cleaned.partition(" […")
    said, _, tail = rest.partition(" characters cut…] ")
    assert int(said) == 1000 - len(head) - len(tail)


def test_an_escape_is_never_cut_in_half() -> None:
    cleaned = clean_text("\x00" * 1000, 101)
    head, _, tail = cleaned.partition(" […")
    assert head.replace(r"\x00", "") == ""
    assert tail.partition("…] ")[2].replace(r"\x00", "") == ""
    assert len(clean_text("\x00" * 99, 100)) <= 100  # Short enough only before it is escaped.


@given(st.text(st.characters()), st.integers(0, 200))
@settings(deadline=None)
def test_clean_text_is_bounded_valid_and_leaves_nothing_unsafe(text: str, limit: int) -> None:
    cleaned = clean_text(text, limit)
    assert len(cleaned) <= limit
    cleaned.encode()
    assert all(character.isprintable() or character.isspace() or ord(character) > 159
               for character in cleaned)  # fmt: skip
    assert "\x00" not in cleaned


# ---------------------------------------------------------------------------- passwords


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("no postgresql://bob:pw@db/shop!", "no postgresql://bob:***@db/shop!"),
        ("redis://:pw@h:1/0", "redis://:***@h:1/0"),
        ("smtp://me@x.com:p@w/#?@h", "smtp://me@x.com:***@h"),
        ("http://host:80/a and a@b", "http://host:80/a and a@b"),
        ("x://h/d?user=u&sslpassword=pw&a=1", "x://h/d?user=u&sslpassword=***&a=1"),
        ("x://h/d?PassWord=p&w&a=1", "x://h/d?PassWord=***&a=1"),
        ("host=h password = 'p \\' w' port=1", "host=h password = *** port=1"),
        ("PGPASSWORD=pw psql", "PGPASSWORD=*** psql"),
        ('{"password":"p w","a":1}', '{"password":***,"a":1}'),
        ("{'user': {'passwd': 'p w'}, 'a': 1}", "{'user': {'passwd': ***}, 'a': 1}"),
        ("if password == other", "if password == other"),
        ("password='never ends", "password=***"),
    ],
    ids=range(12),
)
def test_passwords_are_hidden(text: str, hidden: str) -> None:
    assert hide_passwords(text) == hidden
    assert hide_passwords(hidden) == hidden
    assert clean_text(text, 200) == hidden


@pytest.mark.parametrize("size", [10, 300, 1_950, 5_000])
def test_a_password_at_a_cut_is_hidden(size: int) -> None:
    """Wherever a long text is cut: the `@` that ends the password may be far beyond."""
    url = "postgresql://bob:" + "hunter2" * 100 + "@db/shop "
    text = "x" * size + " " + url + "y" * size + " " + url + "z" * size
    for limit in range(40, 600, 40):
        assert "hunter2" not in clean_text(text, limit) + safe_repr(text, limit)


@pytest.mark.parametrize("piece", ["passw", "password=x&", "password='\\", "://x:", "://", "p"])
def test_no_text_takes_long_to_look_through(piece: str) -> None:
    began = time.process_time()
    hide_passwords(piece * 100_000)
    assert time.process_time() - began < 5
