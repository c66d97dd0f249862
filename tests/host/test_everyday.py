"""What a first-time user meets at a terminal, through the installed command, one process each."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from command import ROOT, Kerngen

from kerngen.boards import DEVICES, NEAR, Device, distance, find_device
from kerngen.cli.chat import title
from kerngen.runtime.conversation import Conversation
from kerngen.runtime.session import load
from kerngen.system.cores import usable_cores
from kerngen.tuning_db.shipped import nearest_board

MODEL = str(ROOT / "examples" / "tiny" / "gemma-4-tiny")
SAY = ("run", MODEL, "--no-draft", "-n", "2")


# ---- what a run is asked


@pytest.mark.parametrize(
    ("args", "piped"),
    [(("hello",), ""), (("-p", "hello"), ""), (("-",), "hello\n"), (("-p", "-"), "hello"), ((), "hello\n")],
    ids=lambda v: " ".join(v) if isinstance(v, tuple) else "",
)
def test_a_prompt_is_an_argument_an_option_or_standard_input(
    kerngen: Kerngen, monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...], piped: str
) -> None:
    (kerngen.folder / "said.txt").write_text(piped)
    with (kerngen.folder / "said.txt").open() as file:
        monkeypatch.setattr(sys, "stdin", file)
        code, out, err = kerngen(*SAY, *args, "--json")
    assert code == 0, err
    assert json.loads(out)["num_tokens"] == 2
    assert json.loads(out)["num_prompt_tokens"] == json.loads(kerngen(*SAY, "hello", "--json")[1])["num_prompt_tokens"]


@pytest.mark.parametrize(("args", "says"), [
    (("hi", "-p", "hi"), "UsageError: PROMPT and --prompt are two things to say\n"),
    (("hi", "there"), "Got unexpected extra argument (there)"),
    (("hi", "-n", "0"), "0 is not in the range x>=1"),
], ids=lambda v: "")  # fmt: skip
def test_prompts_that_cannot_be(kerngen: Kerngen, args: tuple[str, ...], says: str) -> None:
    code, out, err = kerngen(*SAY, *args)
    assert (code, out) == (2, "")
    assert says in err


def test_a_chat_names_its_drafter() -> None:
    assert ", drafting with gemma-4-tiny-assistant; " in title(Conversation(load(MODEL, device="cpu")))


# ---- the process


def test_torchs_threads_sleep_while_they_wait(kerngen: Kerngen, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenMP says itself what it was told."""
    monkeypatch.setenv("OMP_DISPLAY_ENV", "TRUE")
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    one = {min(os.sched_getaffinity(0))}
    code, _, err = kerngen.run(*SAY, "hi", preexec_fn=lambda: os.sched_setaffinity(0, one))
    assert code == 0, err
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in err
    assert "OMP_NUM_THREADS = '1'" in err
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    _, _, err = kerngen.run(*SAY, "hi")
    assert "OMP_WAIT_POLICY = 'ACTIVE'" in err, "what the user says stays"


@pytest.mark.parametrize(("files", "cores"), [
    ({}, 64),
    ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "250000 100000\n"}, 3),
    ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "100000 100000\n",
      "sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, 1),
    ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, 64),
    ({"proc/self/cgroup": "4:memory:/x\n3:cpu,cpuacct:/pod\n", "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
      "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n", "sys/fs/cgroup/cpu/pod/cpu.cfs_quota_us": "50000\n",
      "sys/fs/cgroup/cpu/pod/cpu.cfs_period_us": "100000\n"}, 1),
    ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "0 0\n"}, 64),
], ids=["none", "version 2", "a group above", "no limit", "version 1", "nonsense"])  # fmt: skip
def test_cores_are_those_that_may_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert usable_cores(tmp_path) == cores


def test_a_user_without_a_home(kerngen: Kerngen, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one whom a container names by number: no HOME, no entry in the password file. No folder `~` is made."""
    for name in ("HOME", "KERNGEN_CACHE_DIR", "KERNGEN_DB", "CUPY_CACHE_DIR", "XDG_CACHE_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    (kerngen.folder / "sitecustomize.py").write_text(
        "import pwd\n"
        "def unknown(uid):\n"
        "    raise KeyError(uid)\n"
        "pwd.getpwuid = unknown\n"
    )  # fmt: skip
    monkeypatch.setenv("PYTHONPATH", f"{kerngen.folder}{os.pathsep}{os.environ['PYTHONPATH']}")
    code, out, err = kerngen.run("doctor")
    assert code == 0, err
    assert re.search(r"^-- +cache .*\n +export KERNGEN_CACHE_DIR=", out, re.MULTILINE)
    assert re.search(r"^-- +database .*\n +export KERNGEN_DB=", out, re.MULTILINE)
    code, _, err = kerngen.run("db", "keygen")
    assert (code, "Traceback" in err) == (1, False)
    assert not (kerngen.folder / "~").exists()


def test_ctrl_c_while_the_command_line_is_loaded_is_silent(kerngen: Kerngen) -> None:
    (kerngen.folder / "click.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n"
    )
    path = f"{kerngen.folder}{os.pathsep}{os.environ['PYTHONPATH']}"
    for command in (["-m", "kerngen"], ["-c", "from kerngen.__main__ import main; main()"]):
        done = subprocess.run([sys.executable, *command, "arch", "ls"], env=os.environ | {"PYTHONPATH": path},
                              timeout=60, capture_output=True, check=False,
                              preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))  # fmt: skip
        assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, b"", b"")


# ---- kernels that are wrong


def test_a_kernels_folder_that_is_wrong_is_said_and_the_others_work(
    kerngen: Kerngen, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, spec in (("unfinished", "def (\n"), ("costless", "Problem = 1\n")):
        (kerngen.folder / "own" / name).mkdir(parents=True)
        (kerngen.folder / "own" / name / "spec.py").write_text(spec)
    monkeypatch.setenv("KERNGEN_TEMPLATES", "own")
    out = kerngen.ok("kernel", "ls")
    said = "\n".join(r.getMessage() for r in caplog.records)
    assert re.search(r"kernel unfinished: .*own/unfinished/spec.py:1: SyntaxError: .*; left out", said)
    assert re.search(r"kernel costless: .*own/costless/spec.py: lacks .*cost", said)
    assert re.search(r"^rmsnorm ", out, re.MULTILINE)
    code, out, _ = kerngen("doctor")
    assert code == 1
    assert re.search(r"^-- +kernels +kernel .*unfinished/spec.py:1: SyntaxError", out, re.MULTILINE)
    code, _, err = kerngen("kernel", "show", "unfinished", "--arch", "sm70")
    assert (code, "SyntaxError" in err) == (1, True)


# ---- completion


@pytest.mark.parametrize(("line", "offered"), [
    ("tune --arch sm9", ["sm90"]), ("compile --arch sm70,sm12", ["sm70,sm120"]),
    ("tune --model gemma-4-e", ["gemma-4-e2b", "gemma-4-e4b"]), ("tune --kernel rms", ["rmsnorm"]),
    ("compile --device L4", ["L4", "L40S"]), ("kernel show attn_p", ["attn_prefill"]),
    ("bench model gemma-4-3", ["gemma-4-31b"]), ("db ls --arch sm8", ["sm80", "sm86", "sm89"]),
    ("run MODEL --device cp", ["cpu"]), ("tune --objective pre", ["predicted"]),
    ("doctor --model ./mod", ["./mod"]),
], ids=lambda v: v if isinstance(v, str) else "")  # fmt: skip
def test_values_complete(kerngen: Kerngen, monkeypatch: pytest.MonkeyPatch, line: str, offered: list[str]) -> None:
    monkeypatch.setenv("_KERNGEN_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", f"kerngen {line}")
    monkeypatch.setenv("COMP_CWORD", str(len(line.split())))
    out = kerngen.ok()
    assert [item.split(",", 1)[1] for item in out.splitlines()] == offered


# ---- boards


def test_a_board_without_sheets_takes_those_of_its_kind() -> None:
    def near(board: Device) -> str | None:
        found = nearest_board(board)
        return None if found is None else found.name

    assert {name: near(find_device(name)) for name in ("L40S", "RTX6000Ada", "RTXA6000", "A10")} == {
        "L40S": "RTX4090", "RTX6000Ada": "RTX4090", "RTXA6000": "RTX3090", "A10": None,
    }  # fmt: skip
    assert (
        distance(find_device("L40S"), find_device("RTX4090"))
        <= NEAR
        < distance(find_device("A10"), find_device("RTX3090"))
    )


def test_a_file_describes_a_board(kerngen: Kerngen) -> None:
    out = kerngen.ok("arch", "show", "NVIDIA L40S", "--toml")
    (kerngen.folder / "mine.toml").write_text(out)
    shown = json.loads(kerngen("arch", "show", "mine.toml", "--json")[1])
    original = DEVICES["L40S"]
    assert shown.pop("name") == "my L40S"
    assert all(shown[field] == getattr(original, field) for field in shown)
    kerngen.ok("tune", "--device", "mine.toml", "--model", "gemma-4-31b", "--kernel", "embed", "--dry-run")
    out = kerngen.ok("compile", "--device", "mine.toml", "--model", "gemma-4-31b", "--kernel", "embed", "--jobs", "1")
    assert re.search(r"^my L40S +embed ", out, re.MULTILINE)


@pytest.mark.parametrize(("old", "new", "says"), [
    ("num_sms = 142", 'num_sms = "many"', "num_sms = 'many' is not a whole number (streaming multiprocessors)"),
    ("num_sms = 142", "num_sms = 0", "num_sms = 0 is not between 0 and 1,000"),
    ("num_sms = 142", "num_sms = true", "num_sms = True is not a whole number"),
    ("mem_gbps = 864", "mem_gbps = 864000", "mem_gbps = 864000 is not between 0 and 100,000"),
    ("mem_gbps = 864", "mem_gbps = nan", "mem_gbps = nan is not between"),
    ("sm89", "ada", "unknown arch 'ada'\n  known: sm70"),
    ("my L40S", "l40s", "kerngen has a profile l40s; give yours a name of its own"),
    ("my L40S", "../x", "name = '../x' is not letters, digits"),
    ("l2_mib", "l2_bytes", "unknown field 'l2_bytes'\n  did you mean l2_mib?"),
    ('arch = "sm89"\n', "", "mine.toml lacks arch\n  a file to begin with: kerngen arch show H200 --toml"),
    ("num_sms =", "num_sms :", "mine.toml is no TOML: "),
    ("my L40S", "my \udcff", "mine.toml is not UTF-8: "),
])  # fmt: skip
def test_a_file_that_describes_none(kerngen: Kerngen, old: str, new: str, says: str) -> None:
    text = kerngen("arch", "show", "L40S", "--toml")[1]
    assert old in text
    (kerngen.folder / "mine.toml").write_text(text.replace(old, new), errors="surrogateescape")
    code, out, err = kerngen("tune", "--device", "mine.toml", "--model", "gemma-4-31b")
    assert (code, out) == (2, "")
    assert says in err


@pytest.mark.parametrize(("make", "says"), [
    (os.mkfifo, "is no regular file"),
    (lambda path: path.symlink_to("/dev/zero"), "is no regular file"),
    (Path.mkdir, "is no regular file"),
    (lambda path: path.write_text("#" * 100_000), "holds more than 65,536 B"),
], ids=["a pipe", "endless", "a folder", "large"])  # fmt: skip
def test_a_file_that_is_none(kerngen: Kerngen, make: Callable[[Path], object], says: str) -> None:
    make(kerngen.folder / "mine.toml")
    code, out, err = kerngen("arch", "show", "mine.toml")
    assert (code, out) == (2, "")
    assert err.startswith(f"UsageError: mine.toml: {says}")


def test_a_file_that_is_not_there(kerngen: Kerngen) -> None:
    code, _, err = kerngen("compile", "--device", "nowhere.toml", "--model", "gemma-4-31b")
    assert (code, "nowhere.toml: No such file or directory\n  a file to begin with: " in err) == (2, True)
