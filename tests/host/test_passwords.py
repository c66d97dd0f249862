"""A database's URL has a password in it: whatever a command prints, answers or refuses, it is not shown."""

from __future__ import annotations

from pathlib import Path

import pytest
from command import Kerngen
from sqlalchemy import make_url
from test_tuning_db import H200, add_build, key_of, measured

from kerngen.arch import Target
from kerngen.system.urls import hide_password, without_password
from kerngen.tuning_db import Store

SECRET = "s3cret-word"
DEAD = f"postgresql+psycopg://me:{SECRET}@127.0.0.1:1/name"


@pytest.fixture
def kerngen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Kerngen:
    return Kerngen(tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize("command", [
    ("db", "ls"), ("db", "ls", "--json"), ("db", "stats"), ("db", "show", "rmsnorm", "--arch", "sm90"),
    ("db", "report", "-o", "r.html"), ("db", "import", "x.db"), ("db", "revoke", "abcdabcd", "--reason", "no"),
    ("db", "dump", "-o", "text"), ("db", "gc"), ("worker", "--arch", "sm70"),
    ("tune", "--arch", "sm70", "--model", "gemma-4-31b", "--kernel", "embed"),
])  # fmt: skip
def test_a_server_that_is_not_there_is_an_error_without_its_password(
    kerngen: Kerngen, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    Store.open(kerngen.folder / "x.db").close()
    monkeypatch.setenv("KERNGEN_DB", DEAD)
    code, out, err = kerngen(*command)
    assert code == 1, out + err
    assert "me:***@127.0.0.1:1/name: " in err
    assert SECRET not in out + err + caplog.text


def test_a_server_with_nothing_in_it_is_named_without_its_password(
    kerngen: Kerngen, monkeypatch: pytest.MonkeyPatch, postgresql_url: str
) -> None:
    url = make_url(postgresql_url).set(password=SECRET).render_as_string(hide_password=False)
    assert SECRET in url
    monkeypatch.setenv("KERNGEN_DB", url)
    Store.open(kerngen.folder / "x.db").close()
    for command in ("db import x.db", "db import x.db --json", "doctor", f"db ls --db {url}", f"db stats --db {url}",
                    "db gc", "db gc --json", f"db verify {url}", f"db verify {url} --json"):  # fmt: skip
        _, out, err = kerngen(*command.split())
        assert SECRET not in out + err
    with Store.open() as store:
        store.add_measurement(measured(build := add_build(store), 0, 10.0))
        store.recompute_winners("toy", key_of().static_key, Target.of(H200))
        assert SECRET not in store.where + store.name
    for command in (("db", "ls", "--db", url), ("db", "ls", "--db", url, "--json"), ("db", "show", "toy", "--db", url),
                    ("db", "revoke", build[:12], "--reason", "no")):  # fmt: skip
        _, out, err = kerngen(*command)
        assert SECRET not in out + err


@pytest.mark.parametrize("url", [
    f"postgresql+psycopg://me:{SECRET}@h:port/x", f"postgresql://me:a/{SECRET}@h/x", f"mysql://me:{SECRET}@h/x",
    f"postgresql+psycopg://me:p@{SECRET}@127.0.0.1:1/x", f"postgresql+psycopg://127.0.0.1:1/x?password={SECRET}",
    f"postgresql+psycopg://me@127.0.0.1:1/x?sslpassword={SECRET}&password=p",
    f"postgresql+psycopg://127.0.0.1:1/x?nonsense={SECRET[:0]}&password={SECRET}",
])  # fmt: skip
def test_a_url_that_is_wrong_is_quoted_without_its_password(kerngen: Kerngen, url: str) -> None:
    for command in (("db", "ls", "--db", url), ("worker", "--db", url, "--arch", "sm70"), ("db", "verify", url)):
        code, out, err = kerngen(*command)
        assert code != 0
        assert SECRET not in out + err


def test_what_is_shown_of_a_url() -> None:
    shown = {
        "postgresql+psycopg://u:p@h:5432/d": "postgresql+psycopg://u:***@h:5432/d",
        "postgresql://u@h/d?application_name=a:b@c": "postgresql://u@h/d?application_name=a:b@c",
        "postgresql://u:a@b/c?d@h/x": "postgresql://u:***@h/x",
        "postgresql://h/d?user=u&PassWord=p&sslmode=off": "postgresql://h/d?user=u&PassWord=***&sslmode=off",
        "http://h:8000/v1": "http://h:8000/v1",
        "/tmp/a:b@c.db": "/tmp/a:b@c.db",
    }
    assert {url: without_password(url) for url in shown} == shown
    assert hide_password("no user u with p%20w or 'p w'", "x://u:p%20w@h") == "no user u with *** or '***'"
    assert hide_password("a password", "x://u:a@h") == "*** password"
