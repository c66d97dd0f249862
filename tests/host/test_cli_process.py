"""Commands whose standard streams are closed or narrow, whose arguments are no text, and which are told to stop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import psutil
import pytest
from command import ROOT, Kerngen

from kerngen.cli.process import stopped_by
from kerngen.tuning_db import Store

MODEL = str(ROOT / "examples" / "tiny" / "gemma-4-tiny")
RUN = ("run", MODEL, "--no-draft", "--max-new-tokens", "2")
TUNE = ("tune", "--arch", "sm70", "--model", "gemma-4-31b", "--jobs", "1")
SHORT = (*TUNE, "--kernel", "embed", "--trials", "1")


def _closing(*numbers: int) -> Callable[[], None]:
    """What `>&-` does, in the process that is started."""

    def close() -> None:
        for number in numbers:
            os.close(number)

    return close


@pytest.mark.parametrize("args", [("arch", "ls"), (*RUN, "--prompt", "hi"), SHORT, ("--help",)],
                         ids=lambda a: a[0])  # fmt: skip
def test_a_closed_stdout_is_said_at_once(kerngen: Kerngen, args: tuple[str, ...]) -> None:
    code, out, err = kerngen.run(*args, preexec_fn=_closing(1))
    assert (code, out) == (1, "")
    assert err == ("KerngenError: standard output is closed, and results go there\n"
                   "  to throw them away: >/dev/null\n")  # fmt: skip
    assert kerngen.files() == []


@pytest.mark.parametrize(
    "args",
    [("arch", "ls"), (*RUN, "--prompt", "hi"), ("compile", "--arch", "sm70", "--cases", "--kernel", "embed")],
    ids=lambda a: a[0],
)
def test_without_stderr_a_command_works(kerngen: Kerngen, args: tuple[str, ...]) -> None:
    """One without stdin as well: streams are settled before a command is looked at, so not each needs both."""
    closed = (0, 2) if args[0] == "arch" else (2,)
    code, out, err = kerngen.run(*args, preexec_fn=_closing(*closed))
    assert (code, err) == (0, "")
    assert out.strip()


def test_a_tune_without_stdin_and_stderr_into_a_file_whose_name_is_no_text(
    kerngen: Kerngen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the encoding lacks is escaped. A failure's message must not end up in the database that is open, which may
    have the number of a closed stream.
    """
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    name = os.fsdecode("größe".encode() + b"\xff.db")
    code, out, err = kerngen.run(*SHORT, "--db", name, preexec_fn=_closing(0, 2))
    assert (code, err) == (0, "")
    assert "database: gr\\xf6\\xdfe\\udcff.db" in out
    with Store.open(kerngen.folder / name, read_only=True) as store:
        assert len(store.winners()) == 14
    assert kerngen.run(*TUNE, "--kernel", "nonsense", preexec_fn=_closing(0, 2)) == (2, "", "")
    code, out, err = kerngen.run("db", "ls", "--db", name, "--json")
    assert code == 0, err
    assert len(json.loads(out)) == 14
    kerngen.ok("db", "report", "--db", name, "-o", os.fsdecode(b"page\xff.html"))
    assert "größe\\udcff.db" in (kerngen.folder / os.fsdecode(b"page\xff.html")).read_text()


def test_a_closed_stdin_is_an_empty_prompt(kerngen: Kerngen) -> None:
    code, out, err = kerngen.run(*RUN, preexec_fn=_closing(0))
    assert (code, out) == (2, "")
    assert err == "UsageError: the prompt is empty\n"


def test_a_file_name_that_is_no_text_is_said(kerngen: Kerngen) -> None:
    code, out, err = kerngen.run("db", "ls", "--db", os.fsdecode(b"tuning\xff.db"))
    assert (code, out) == (1, "")
    assert err.startswith("DatabaseError: tuning\\udcff.db: no such file\n")


def test_a_board_that_is_no_text_is_in_no_database(kerngen: Kerngen) -> None:
    Store.open(kerngen.folder / "tuning.db").close()
    code, out, err = kerngen("db", "ls", "--device", os.fsdecode(b"H\xff"), "--db", "tuning.db")
    assert (code, out) == (0, "")
    assert err.startswith("no winners for device H\\udcff in ")


def test_a_reason_that_is_no_text(kerngen: Kerngen) -> None:
    said = ("db", "revoke", "rmsnorm", "--arch", "sm90", "--reason", os.fsdecode(b"slow\xff"))
    assert kerngen(*said) == (2, "", "UsageError: the reason is not UTF-8: character 4 is '\\udcff'\n")


@pytest.mark.parametrize(("url", "says"), [
    ("postgresql+psycopg://me:secret@host:port/x", "is not a database URL"),
    ("postgresql+psycopg://me:secret@host:port:1/x", "is not a database URL"),
    ("://me:secret@host", "is not a database URL"),
    (os.fsdecode(b"postgresql+psycopg://me:secret@host/\xff"), "is not a database URL"),
    ("mysql://me:secret@host/x", "neither SQLite nor PostgreSQL"),
])  # fmt: skip
def test_a_url_that_is_none(kerngen: Kerngen, url: str, says: str) -> None:
    code, out, err = kerngen.run("db", "ls", "--db", url)
    assert (code, out) == (2, "")
    assert says in err
    assert "postgresql+psycopg://USER@HOST/NAME" in err
    assert "secret" not in err
    assert "Traceback" not in err


# ---- being stopped


def _start(kerngen: Kerngen, *args: str) -> subprocess.Popen[str]:
    def heed() -> None:  # a shell starts background jobs with SIGINT ignored, and children inherit that
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    return subprocess.Popen([sys.executable, "-m", "kerngen", *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            text=True, preexec_fn=heed, start_new_session=True)  # fmt: skip


def _wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_tune_which_keeps_what_it_has(kerngen: Kerngen, number: signal.Signals) -> None:
    """SIGTERM as `timeout` sends it: to its group, then to it once more."""
    started = _start(kerngen, *TUNE, "--kernel", "attn_prefill")
    _wait_until(lambda: len(list((kerngen.folder / "cache").glob("v1/*/*.cubin"))) >= 3)
    children = psutil.Process(started.pid).children(recursive=True)
    os.killpg(started.pid, number)
    if number == signal.SIGTERM:
        started.send_signal(number)
    out, err = started.communicate(timeout=60)
    assert started.returncode == 128 + number, err
    assert err.strip().splitlines()[-1] == ("stopped" if number == signal.SIGINT else "stopped by SIGTERM")
    assert "Traceback" not in err
    assert "what was tried is kept, and the same command continues it" in out
    assert "time ran out" not in out
    with Store.open(kerngen.folder / "tuning.db", read_only=True) as store:
        assert store.measurements("attn_prefill")
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive


def test_sigterm_ends_a_compile(kerngen: Kerngen) -> None:
    """As Kubernetes sends it: to the process alone."""
    started = _start(
        kerngen, "compile", "--arch", "all", "--cases", "--kernel", "attn_prefill", "--jobs", "1", "-o", "out"
    )
    _wait_until(lambda: bool(list((kerngen.folder / "cache").rglob("*.cubin"))))
    children = psutil.Process(started.pid).children(recursive=True)
    started.send_signal(signal.SIGTERM)
    out, err = started.communicate(timeout=60)
    assert (started.returncode, out, err.strip()) == (143, "", "stopped by SIGTERM")
    assert not list((kerngen.folder / "out").rglob("*"))
    assert children
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive


def test_sigterm_that_is_ignored_stays_ignored(kerngen: Kerngen, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    seen: list[object] = []
    try:
        monkeypatch.setattr("kerngen.cli.run._read_prompt", lambda *_: seen.append(signal.getsignal(signal.SIGTERM)))
        kerngen("run", "./nowhere")
        assert seen == [signal.SIG_IGN]
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        kerngen("run", "./nowhere")
        assert callable(seen[1])
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "put back as it was"
    finally:
        signal.signal(signal.SIGTERM, before)


def test_the_code_is_that_of_sigterm_wherever_it_comes(kerngen: Kerngen) -> None:
    """In a text that is executed, too, of which the modules that are loaded have many: as `python -m kerngen`."""
    (kerngen.folder / "played.py").write_text(
        "import sys\n"
        "from kerngen.cli.process import stopped_by\n"
        "with stopped_by() as received:\n"
        "    try:\n"
        "        exec('import signal; signal.raise_signal(signal.SIGTERM); print(1)')\n"
        "    except KeyboardInterrupt:\n"
        "        sys.exit(128 + received())\n"
    )
    done = subprocess.run([sys.executable, "-m", "played"], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (143, "", "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_comes_as_an_object_is_destroyed_is_not_lost(number: signal.Signals) -> None:
    """Python can only print what is raised there. The collector may run at any instruction."""

    class Dying:
        def __del__(self) -> None:
            signal.raise_signal(number)

    def work() -> None:
        Dying()
        time.sleep(20)

    before = sys.unraisablehook, signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with stopped_by() as received, pytest.raises(KeyboardInterrupt):
            work()
        assert received() == number
    finally:
        signal.signal(signal.SIGINT, before[1])
    assert (sys.unraisablehook, signal.getsignal(signal.SIGTERM)) == (before[0], signal.SIG_DFL)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_options_complete(kerngen: Kerngen, shell: str) -> None:
    """As docs/quick-start.md says how."""
    page = (ROOT / "docs" / "quick-start.md").read_text()
    assert "_KERNGEN_COMPLETE" in page
    assert f"{shell}_source" in page
    code, out, _ = kerngen.run(env=os.environ | {"_KERNGEN_COMPLETE": f"{shell}_source"})
    assert code == 0
    assert "_kerngen_completion" in out
    words = {"COMP_WORDS": "kerngen compile --dev", "COMP_CWORD": "--dev" if shell == "fish" else "2"}
    code, out, _ = kerngen.run(env=os.environ | words | {"_KERNGEN_COMPLETE": f"{shell}_complete"})
    assert code == 0
    assert "--device" in out
