"""Passwords: in no text that is made of a URL, whoever wrote it and however wrongly."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Iterator
from urllib.parse import quote

import pytest
from psycopg.conninfo import conninfo_to_dict

from onward import DatabaseUnavailable, InvalidOption, Onward, OnwardError
from onward.store import address

SECRET = "hunter2-Zq"
PLACE = "127.0.0.1:1/shop"
URLS = [
    f"postgresql://bob:{SECRET}@{PLACE}",
    f"postgres://bob:{SECRET}@{PLACE}",
    f"POSTGRESQL://bob:{SECRET}@{PLACE}",
    f"postgresql://{PLACE}?user=bob&password={SECRET}",
    f"postgresql://{PLACE}?user=bob&sslpassword={SECRET}",
    f"postgresql://{PLACE}?user=bob&PassWord={SECRET}",
    f"postgresql://bob:{SECRET}@{PLACE}?nonsense=1",
    f"postgresql://bob:{SECRET}@127.0.0.1:port/shop",
    f"postgresql://bob:a@{SECRET}@{PLACE}",
    f"postgresql://bob:{SECRET}/b@{PLACE}",
    f"postgresql://bob:{SECRET}#b@{PLACE}",
    f"postgresql://bob:{SECRET}?b@{PLACE}",
    f"postgresql://bob:{SECRET}%zz@{PLACE}",
    f"postgresql://bob:{SECRET}[@{PLACE}",
    f"postgresql://bob:{SECRET}",
    f"postgresql://bob:{SECRET}/shop",
    f"postgresql:/bob:{SECRET}@{PLACE}",
    f"postgresql:bob:{SECRET}@{PLACE}",
    f"host=127.0.0.1 port=1 user=bob password={SECRET}",
    f"mysql://bob:a@{SECRET}@{PLACE}",
    f"bob:{SECRET}@{PLACE}",
    f"sqlite://bob:{SECRET}@{PLACE}",
    f"postgresql://{PLACE}?user=bob&p%61ssword={SECRET}",
    f"postgresql://{PLACE}?user=bob&password=a&{SECRET}",
    f"postgresql://bob:{SECRET}@[x",
]


@pytest.mark.parametrize(
    "url",
    [
        "sqlite://[",
        "sqlite:///~nosuchuser/x.db",
        "sqlite:////tmp/a%00b.db",
        "postgresql://u:\udcff@h/x",
        "postgresql://[x",
        "postgresql://bob:%99@db/shop",
        "postgresql://%99@db/shop",
        "postgresql://%99/shop",
        "postgresql://db/%99",
        "postgresql://db/shop?application_name=%99",
    ],
)
def test_a_url_that_leads_nowhere_is_an_error_of_ours(url: str) -> None:
    with pytest.raises(InvalidOption) as caught:
        Onward(url)
    assert caught.value.fix


@pytest.mark.parametrize("url", URLS)
def test_a_password_is_in_no_text_that_is_made_of_its_url(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    texts: list[str] = []
    for error in _errors_of(url, texts):
        texts += [*traceback.format_exception(error), repr(error), error.fix]
        assert error.fix
    assert len(texts) >= 3
    assert SECRET not in "".join(texts) + caplog.text


def _errors_of(url: str, texts: list[str]) -> Iterator[OnwardError]:
    """Everything that this URL leads to; nobody answers there."""
    try:
        app = Onward(url)
    except InvalidOption as error:
        yield error
        return
    texts += [repr(app), app.database.shown_url]
    for step in (app.counts, app.database.migrate, lambda: asyncio.run(app.acounts())):
        with pytest.raises(DatabaseUnavailable) as away:
            step()
        yield away.value


def test_a_password_that_is_quoted_as_it_should_be_is_what_the_server_gets() -> None:
    url = f"postgresql://bob:{quote('p@ss/w%rd#?[', safe='')}@{PLACE}"
    assert conninfo_to_dict(address.checked(url))["password"] == "p@ss/w%rd#?["
    assert address.shown(url) == f"postgresql://bob@{PLACE}"
    assert (
        address.shown("postgresql:///shop?host=/run&password=x") == "postgresql:///shop?host=/run"
    )


@pytest.mark.parametrize(
    "url",
    [
        "postgresql:///shop",
        "postgresql://bob@[::1]:5432/shop",
        "postgresql://one:1,two:2/shop?target_session_attrs=read-write",
        "postgres://bob@db.example",
        "postgresql://bob@db.example:5432/shop?options=-c%20a%3Db",
    ],
)
def test_every_good_url_of_a_server_is_taken(url: str) -> None:
    assert Onward(url).database.dialect == "postgres"
