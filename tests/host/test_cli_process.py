"""Commands whose standard streams are closed or narrow, or whose arguments are no text."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from command import ROOT, Kerngen

from kerngen.tuning_db import Store

MODEL = str(ROOT / "examples" / "tiny" / "gemma-4-tiny")
RUN = ("run", MODEL, "--no-draft", "--max-new-tokens", "2")
TUNE = ("tune", "--arch", "sm70", "--model", "gemma-4-31b", "--jobs", "1")


@pytest.fixture
def kerngen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Kerngen:
    return Kerngen(tmp_path, monkeypatch, capsys)


def _closing(*numbers: int) -> Callable[[], None]:
    """What `>&-` does, in the process that is started."""

    def close() -> None:
        for number in numbers:
            os.close(number)

    return close


@pytest.mark.parametrize("args", [("arch", "ls"), (*RUN, "--prompt", "hi"), (*TUNE, "--kernel", "embed"), ("--help",)],
                         ids=lambda a: a[0])  # fmt: skip
def test_a_closed_stdout_is_said_at_once(kerngen: Kerngen, args: tuple[str, ...]) -> None:
    code, out, err = kerngen.run(*args, preexec_fn=_closing(1))
    assert (code, out) == (1, "")
    assert err == ("KerngenError: standard output is closed, and results go there\n"
                   "  to throw them away: >/dev/null\n")  # fmt: skip
    assert kerngen.files() == []


@pytest.mark.parametrize(
    "args",
    [("arch", "ls"), (*RUN, "--prompt", "hi"), (*TUNE, "--kernel", "embed"),
     ("compile", "--arch", "sm70", "--cases", "--kernel", "embed")],
    ids=lambda a: a[0],
)  # fmt: skip
@pytest.mark.parametrize("closed", [(2,), (0, 2)], ids=str)
def test_without_stderr_a_command_works(kerngen: Kerngen, args: tuple[str, ...], closed: tuple[int, ...]) -> None:
    code, out, err = kerngen.run(*args, preexec_fn=_closing(*closed))
    assert (code, err) == (0, "")
    assert out.strip()


def test_nothing_is_printed_into_a_file_that_took_a_closed_streams_number(kerngen: Kerngen) -> None:
    """A failure's message must not end up in the database that is open."""
    assert kerngen.run(*TUNE, "--kernel", "embed", preexec_fn=_closing(0, 2))[0] == 0
    with Store.open(kerngen.folder / "tuning.db", read_only=True) as store:
        assert len(store.winners()) == 14
    assert kerngen.run(*TUNE, "--kernel", "nonsense", preexec_fn=_closing(0, 2)) == (2, "", "")


def test_a_closed_stdin_is_an_empty_prompt(kerngen: Kerngen) -> None:
    code, out, err = kerngen.run(*RUN, preexec_fn=_closing(0))
    assert (code, out) == (2, "")
    assert err == "UsageError: the prompt is empty\n"


def test_what_the_encoding_lacks_is_escaped(kerngen: Kerngen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    code, out, err = kerngen.run("tune", *TUNE[1:], "--kernel", "embed", "--db", "größe.db")
    assert code == 0, err
    assert "database: gr\\xf6\\xdfe.db" in out


def test_a_file_name_that_is_no_text(kerngen: Kerngen) -> None:
    name = os.fsdecode(b"tuning\xff.db")
    code, out, err = kerngen.run("db", "ls", "--db", name)
    assert (code, out) == (1, "")
    assert err.startswith("DatabaseError: tuning\\udcff.db: no such file\n")
    code, out, err = kerngen.run(*TUNE, "--kernel", "embed", "--db", name)
    assert code == 0, err
    assert "database: tuning\\udcff.db" in out
    assert (kerngen.folder / name).is_file()
    code, out, err = kerngen.run("db", "ls", "--db", name, "--json")
    assert code == 0, err
    assert len(json.loads(out)) == 14


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("postgresql+psycopg://me:secret@host:port/x", "is not a database URL"),
        ("postgresql+psycopg://me:secret@host:port:1/x", "is not a database URL"),
        ("://me:secret@host", "is not a database URL"),
        ("mysql://me:secret@host/x", "neither SQLite nor PostgreSQL"),
    ],
)
def test_a_url_that_is_none(kerngen: Kerngen, url: str, says: str) -> None:
    code, out, err = kerngen.run("db", "ls", "--db", url)
    assert (code, out) == (2, "")
    assert says in err
    assert "postgresql+psycopg://USER@HOST/NAME" in err
    assert "secret" not in err
    assert "Traceback" not in err
