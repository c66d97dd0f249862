"""A divided model's processes end together: when a rank dies or hangs, when rank 0 does, and as any program ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import divided_sessions
import pytest
import torch
from command import ROOT
from divided_models import make_pair
from divided_sessions import opens
from tiny_gemma import CPU, prompt

from kerngen.errors import RankFailed, UsageError
from kerngen.runtime.engine import Engine, Request
from kerngen.runtime.engine import ranks as ranks_module
from kerngen.runtime.engine.ranks import Ranks, local_device, torchrun_world
from kerngen.runtime.session import load
from kerngen.runtime.world import World

TINY = ROOT / "examples" / "tiny"
ENDS_S = 5.0  # within which a group ends when a rank has


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pair(tmp_path_factory.mktemp("dense"), "dense")[0]


def processes_of(group: Ranks) -> list[int]:
    return [other.pid for other in group._ranks]


def begun(group: Ranks, target: Path, how: Any = opens) -> tuple[Engine, Any]:
    """An engine in the midst of a request."""
    session = group.load(partial(how, target, None, "torch"))
    engine = Engine(session.model, ranks=group, max_len=900)
    handle = engine.submit(Request(prompt(9), 800))
    while len(handle.tokens) < 2:
        engine.step()
    return engine, handle


def ends(engine: Engine) -> tuple[RankFailed, float]:
    """Steps until the engine's group has ended: with what, and after how many seconds."""
    began = time.monotonic()
    try:
        while True:
            engine.step()
    except RankFailed as e:
        return e, time.monotonic() - began


def assert_gone(pids: list[int], within_s: float = ENDS_S) -> None:
    until = time.monotonic() + within_s
    while left := [pid for pid in pids if Path(f"/proc/{pid}").exists() and not _is_zombie(pid)]:
        assert time.monotonic() < until, f"processes {left} are still there"
        time.sleep(0.05)


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_a_killed_rank_ends_the_group_at_once_and_says_which(target: Path) -> None:
    group = Ranks(3, "cpu")
    try:
        engine, handle = begun(group, target)
        pids = processes_of(group)
        threading.Timer(0.2, os.kill, (pids[1], signal.SIGKILL)).start()
        error, seconds = ends(engine)
        assert f"rank 2 (process {pids[1]}) was killed by SIGKILL" in error.message
        assert seconds < ENDS_S
        assert_gone(pids)
        assert not handle.is_done
        with pytest.raises(RankFailed, match="rank 2"):  # and whoever asks for more hears the same
            engine.step()
        with pytest.raises(RankFailed, match="rank 2"):
            group.load(partial(opens, target, None, "torch"))
    finally:
        group.close()
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("how", ["stopped", "stuck"])
def test_a_rank_that_hangs_ends_the_group(target: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setattr(ranks_module, "PATIENCE_S", 2.5)  # so as to take less time here; 4 s else
    group = Ranks(2, "cpu")
    try:
        opened = divided_sessions.opens_and_hangs if how == "stuck" else opens
        engine, _ = begun(group, target, opened)
        (pid,) = processes_of(group)
        if how == "stopped":
            os.kill(pid, signal.SIGSTOP)
        error, seconds = ends(engine)
        want = "gave no sign of life" if how == "stopped" else "hangs: for"
        assert error.message.startswith(f"rank 1 (process {pid}) {want}"), error.message
        assert seconds < ENDS_S
        assert_gone([pid])
    finally:
        group.close()


def test_gpus_that_wait_for_each_other_end_the_group(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All processes are there, and a step does not end, as where a word that a GPU waits for was lost."""
    monkeypatch.setattr(ranks_module, "STEP_S", 1.0)
    group = Ranks(2, "cpu")
    try:
        engine, _ = begun(group, target)
        went_on = threading.Event()
        group.collectives.when_given_up.append(went_on.set)
        keep = engine._await
        lasts = partial(went_on.wait, 30)
        monkeypatch.setattr(
            engine, "_await", lambda who, how, wait, *n: keep(who, how, replace(wait, result=lasts), *n)
        )
        error, seconds = ends(engine)
        assert error.message == "a step has not ended within 1 s, and all ranks are there: their GPUs hang"
        assert seconds < ENDS_S
    finally:
        group.close()


def test_steps_that_may_compile_have_the_patience_of_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, until the engine has been made ready: what one rank compiles in 20 s takes another 30."""
    group = object.__new__(Ranks)
    group.device, group._is_loading, group._is_ready = "cuda:0", False, False
    monkeypatch.setattr(ranks_module, "board_of", lambda device: "H200" if device else "")
    assert group._patience == ranks_module.LOAD_PATIENCE_S
    group._is_ready = True
    assert group._patience == ranks_module.PATIENCE_S
    group.device, group._is_ready = None, False
    assert group._patience == ranks_module.PATIENCE_S


def test_a_library_that_waits_for_ever_keeps_nobody(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As NCCL may for a GPU that waits for a rank that is gone."""
    left: list[bool] = []
    monkeypatch.setattr(ranks_module, "END_S", 1.0)
    monkeypatch.setattr(ranks_module, "leave_at_once", lambda: left.append(True))
    group = Ranks(2, "cpu")
    destroy, forever = torch.distributed.destroy_process_group, threading.Event()
    monkeypatch.setattr(ranks_module.dist, "destroy_process_group", forever.wait)
    began = time.monotonic()
    group.close()
    forever.set()
    destroy()
    assert left
    assert time.monotonic() - began < ENDS_S


STUCK = """
import os, signal, sys, threading, time
from kerngen.errors import RankFailed
from kerngen.runtime.engine import ranks
from kerngen.runtime.session import load

if __name__ == "__main__":
    ranks.END_S = 1.0
    session = load(sys.argv[1], draft=False, backend="torch", device="cpu", tensor_parallel=2)
    session.generate("Once", chat=False, max_new_tokens=2)
    (other,) = session.ranks.pids
    if sys.argv[2] == "idle":
        os.kill(other, signal.SIGKILL)
        time.sleep(4)
    else:  # as in NCCL, which waits for a rank that is gone
        ranks.Distributed._gathered = lambda *_: time.sleep(600)
        threading.Timer(0.5, os.kill, (other, signal.SIGKILL)).start()
    try:
        session.generate("Once", chat=False, max_new_tokens=2)
    except RankFailed as e:
        print("caught:", e.message)
"""


@pytest.mark.parametrize("where", ["in a library", "idle"])
def test_rank_0_does_not_stay_in_a_library_that_waits_for_a_dead_rank(tmp_path: Path, where: str) -> None:
    """Its process says why and ends; where nothing is computed it is there to say so itself."""
    script = tmp_path / "stuck.py"
    script.write_text(STUCK)
    done = subprocess.run(
        [sys.executable, str(script), str(TINY / "gemma-4-tiny"), where], capture_output=True, text=True, timeout=90,
        check=False, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    if where == "idle":
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith("caught: rank 1 (process ")
    else:
        assert (done.returncode, done.stdout) == (1, "")
        said = r"RankFailed: rank 1 \(process \d+\) was killed by SIGKILL\n  open the model anew; .*\n"
        assert re.fullmatch(said, done.stderr), done.stderr


def test_graphs_are_freed_before_the_group_ends(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL waits for those that have its kernels."""
    order: list[str] = []
    group = Ranks(2, "cpu")
    engine, _ = begun(group, target)
    destroy = torch.distributed.destroy_process_group
    monkeypatch.setattr(ranks_module.dist, "destroy_process_group", lambda: (order.append("group"), destroy()))
    monkeypatch.setattr(engine.runner._graphs, "reset", lambda: order.append("graphs"))
    group.close()
    assert order == ["graphs", "group"]


def test_ranks_are_connected_before_anything_is_opened() -> None:
    group = Ranks(2, "cpu")
    try:
        assert group.collectives.begun == 4
    finally:
        group.close()


def test_who_leaves_at_once_runs_no_librarys_clean_up() -> None:
    """However the process ends, and with the exit code that it has: a thread may be in the midst of a library."""
    code = (
        "import ctypes, sys\n"
        "libc = ctypes.CDLL(None)\n"
        "libc.on_exit(ctypes.cast(libc.abort, ctypes.c_void_p), None)\n"
        "from kerngen.system.leaving import leave_at_once\n"
        "leave_at_once()\n"
        "print('said')\n"
    )
    for end, exit_code in (("", 0), ("sys.exit(3)\n", 3), ("raise ValueError\n", 1)):
        done = subprocess.run([sys.executable, "-c", code + end], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (exit_code, "said\n")


def test_who_leaves_at_once_waits_for_no_thread() -> None:
    code = (
        "import threading, time\n"
        "from kerngen.system.leaving import leave, leave_at_once\n"
        "threading.Thread(target=time.sleep, args=(60,)).start()\n"
        "print('said')\n"
        "leave_at_once()\n"
        "leave(3)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout) == (3, "said\n")


def test_a_rank_that_cannot_open_its_part_says_why(target: Path, capfd: pytest.CaptureFixture[str]) -> None:
    group = Ranks(2, "cpu")
    try:
        with pytest.raises(RankFailed, match="rank 1: ZeroDivisionError: of this rank alone"):
            group.load(partial(divided_sessions.opens_and_fails, target, None, "torch"))
    finally:
        group.close()


OWNER = """
import sys
from kerngen.runtime.session import load
if __name__ == "__main__":
    session = load(sys.argv[1], draft=False, backend="torch", device="cpu", tensor_parallel=2)
    print(*(other.pid for other in session.ranks._ranks), flush=True)
    sys.stdin.read()
    print(session.generate("Once upon a time", chat=False, max_new_tokens=16).text)
"""


def test_no_rank_is_left_when_rank_0_is_killed(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    script = tmp_path / "owner.py"
    script.write_text(OWNER)
    temporary = tmp_path_factory.mktemp("t")
    with subprocess.Popen(
        [sys.executable, str(script), str(TINY / "gemma-4-tiny")], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True, env=os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)},
    ) as owner:  # fmt: skip
        assert owner.stdout is not None
        pids = [int(pid) for pid in owner.stdout.readline().split()]
        assert len(pids) == 1
        assert any(temporary.glob(f"{ranks_module.FOLDER}*/ranks"))
        owner.kill()
    assert_gone(pids)
    assert not any(temporary.iterdir()), "nor what they met by"


def test_torchrun_may_start_the_ranks(tmp_path: Path) -> None:
    script = tmp_path / "owner.py"
    script.write_text(OWNER)
    with ranks_module.socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given = {"PYTHONPATH": str(ROOT), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
             "MASTER_PORT": str(port)}  # fmt: skip
    started = [
        subprocess.Popen(
            [sys.executable, str(script), str(TINY / "gemma-4-tiny")], stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, text=True, env=os.environ | given | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in (1, 0)
    ]  # fmt: skip
    said = [process.communicate(timeout=90)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0]
    assert said[0] == ""
    alone = load(TINY / "gemma-4-tiny", draft=False, backend="torch", device="cpu")
    text = alone.generate("Once upon a time", chat=False, max_new_tokens=16).text
    assert said[1].partition("\n")[2] == text + "\n"


def test_what_torchrun_says_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torchrun_world() is None
    for name, value in {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert torchrun_world() == World(1, 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="2 of 4 ranks on this host"):
        torchrun_world()
    monkeypatch.setenv("RANK", "one")
    with pytest.raises(UsageError, match="are to be numbers"):
        torchrun_world()


def test_a_rank_takes_the_gpu_of_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [local_device("cuda:2", rank) for rank in range(2)] == ["cuda:2", "cuda:3"]
    assert local_device("cuda", 1) == "cuda:1"
    assert local_device("cpu", 1) == "cpu"
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert local_device("cuda", 1) == "cuda:3"


def test_more_ranks_than_gpus_start_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process was about to be started"))
    with pytest.raises(UsageError, match="4 ranks take GPUs up to cuda:3; there are 2"):
        Ranks(4)
    with pytest.raises(UsageError, match="2 ranks take GPUs up to cuda:2; there are 2"):
        Ranks(2, "cuda:1")


def test_a_model_that_does_not_divide_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ranks, "__init__", lambda *_: pytest.fail("a process was about to be started"))
    with pytest.raises(UsageError, match="cannot be divided among 4 ranks: its query heads: 2 are 2 times 1"):
        load(TINY / "gemma-4-tiny", backend="torch", device=str(CPU), tensor_parallel=4)
    with pytest.raises(UsageError, match="1 rank or more, not 0"):
        load(TINY / "gemma-4-tiny", backend="torch", device=str(CPU), tensor_parallel=0)
