"""Calls in other processes: whose they are when one dies, and that nothing waits for what will never come."""

from __future__ import annotations

import gc
import multiprocessing.resource_tracker
import multiprocessing.spawn
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError, Future
from multiprocessing import current_process, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest

from kerngen.errors import KerngenError
from kerngen.system.cancellation import Cancellation
from kerngen.system.processes import ProcessDied, Processes, cancelled

# -- what is called


def _die(seconds: float = 0.0) -> None:
    time.sleep(seconds)
    os.kill(os.getpid(), signal.SIGKILL)


def _die_of_every_second(marker: str) -> str:
    path = Path(marker)
    if path.exists():
        return "answer"
    path.touch()
    raise SystemExit(_die())


def _die_half_way_through_the_answer() -> None:
    """As when it is killed while it writes an answer that is larger than a pipe holds."""
    for pipe in gc.get_objects():
        if isinstance(pipe, Connection) and pipe.readable and pipe.writable:
            os.write(pipe.fileno(), struct.pack("!i", 1_000_000) + b"the first few bytes")
    _die()


def _raise() -> None:
    raise KerngenError("no", hint="try again")


def _until_cancelled(marker: str) -> bool:
    Path(marker).touch()
    return cancelled().poll(20)


# -- tests


def test_a_process_is_kept_between_calls() -> None:
    with Processes(1) as processes:
        first, second = processes.submit(os.getpid), processes.submit(os.getpid)
        assert first.result(30) == second.result(30) != os.getpid()


def _from_a_daemon(answers: Any) -> None:
    with Processes(1) as processes:
        answers.put((current_process().daemon, processes.submit(os.getpid).result(30) != os.getpid()))


def test_a_daemonic_process_may_have_them() -> None:
    """A worker of vLLM is one, to which multiprocessing gives no children; it stays one."""
    context = get_context("spawn")
    answers = context.Queue()
    worker = context.Process(target=_from_a_daemon, args=(answers,), daemon=True)
    worker.start()
    assert answers.get(timeout=60) == (True, True)
    worker.join(30)
    assert worker.exitcode == 0


def test_a_script_without_a_guard_runs_once(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os\n"
        "from kerngen.system.processes import Processes\n"
        "print('begun', flush=True)\n"
        "with Processes(2) as processes:\n"
        "    assert processes.submit(os.getpid).result(60) != os.getpid()\n"
        "print(__name__)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["begun", "__main__"], done.stderr


def test_what_takes_its_process_down_fails_alone() -> None:
    with Processes(2) as processes:
        answers = [processes.submit(_die if i == 2 else pow, *(() if i == 2 else (2, i))) for i in range(6)]
        with pytest.raises(ProcessDied, match="the process died"):
            answers[2].result(30)
        assert [a.result(30) for i, a in enumerate(answers) if i != 2] == [1, 2, 8, 16, 32]


def test_half_an_answer_is_not_waited_for() -> None:
    with Processes(1) as processes:
        with pytest.raises(ProcessDied):
            processes.submit(_die_half_way_through_the_answer).result(30)
        assert processes.submit(abs, -1).result(30) == 1


def test_a_large_question_to_a_process_that_dies_of_the_one_before() -> None:
    with Processes(1) as processes:
        died, answer = processes.submit(_die, 0.2), processes.submit(len, b"x" * 10_000_000)
        assert isinstance(died.exception(30), ProcessDied)
        assert answer.result(30) == 10_000_000


def test_a_call_that_nobody_wants_is_told_so_or_does_not_begin(tmp_path: Path) -> None:
    begun, work = tmp_path / "begun", [Cancellation(), Cancellation()]
    with Processes(1) as processes:
        heeds = processes.submit(_until_cancelled, str(begun), cancellation=work[0])
        waits = processes.submit(os.getpid, cancellation=work[1])
        after = processes.submit(_until_cancelled, str(begun), cancellation=(last := Cancellation()))
        while not begun.exists():
            time.sleep(0.001)
        begun.unlink()
        for each in reversed(work):
            each.cancel()
        assert heeds.result(5)
        with pytest.raises(CancelledError):
            waits.result(5)
        while not begun.exists():
            time.sleep(0.001)
        assert not after.done(), "what was cancelled before is no affair of its"
        last.cancel()
        assert after.result(5)
    with pytest.raises(RuntimeError, match="none of Processes"):
        cancelled()


def test_a_second_try(tmp_path: Path) -> None:
    with Processes(1, tries=2) as processes:
        assert processes.submit(_die_of_every_second, str(tmp_path / "marker")).result(30) == "answer"
        with pytest.raises(ProcessDied):
            processes.submit(_die).result(30)


@pytest.mark.parametrize("gives_up", [True, False])
def test_who_outlives_what_keeps_processes_from_starting(gives_up: bool) -> None:
    with Processes(1, gives_up=gives_up) as processes:
        multiprocessing.resource_tracker.ensure_running()  # by the right program
        python = multiprocessing.spawn.get_executable()
        multiprocessing.spawn.set_executable("/bin/false")
        try:
            with pytest.raises(ProcessDied, match="ended as it started"):
                processes.submit(abs, -1).result(30)
        finally:
            multiprocessing.spawn.set_executable(python)
        if gives_up:
            with pytest.raises(ProcessDied, match="ended as it started"):
                processes.submit(abs, -1).result(30)
        else:
            assert processes.submit(abs, -1).result(30) == 1


def test_one_killed_between_calls_is_replaced() -> None:
    with Processes(1) as processes:
        process = psutil.Process(processes.submit(os.getpid).result(30))
        process.kill()
        process.wait(10)
        assert processes.submit(abs, -1).result(30) == 1


def test_errors_come_back_as_they_were() -> None:
    with Processes(1) as processes:
        with pytest.raises(KerngenError, match="no") as raised:
            processes.submit(_raise).result(30)
        assert raised.value.hint == "try again"
        assert "raise KerngenError" in raised.value.__notes__[0]
        with pytest.raises(TypeError, match=r"generator.*another process"):
            processes.submit(eval, "(i for i in [])").result(30)
        with pytest.raises(TypeError, match="pickle"):
            processes.submit(abs, (i for i in [1])).result(30)
        assert processes.submit(abs, -1).result(30) == 1, "and it goes on"


def test_close_ends_all_at_once() -> None:
    processes = Processes(2)
    pids = [processes.submit(os.getpid).result(30)]
    running, waiting = [processes.submit(time.sleep, 600) for _ in range(2)], processes.submit(abs, -1)
    while not all(r.running() for r in running):
        time.sleep(0.01)
    began = time.monotonic()
    processes.close()
    for future in (*running, waiting):
        with pytest.raises(CancelledError):
            future.result(30)
    assert time.monotonic() - began < 30
    assert not any(psutil.pid_exists(pid) for pid in pids)
    with pytest.raises(RuntimeError):
        processes.submit(abs, -1)


def test_none_is_left_by_who_closes_nothing() -> None:
    """Nor by one that is killed."""
    script = (
        "import os, sys, tempfile, time\n"
        "kept = tempfile.TemporaryDirectory()\n"  # whose finalizer is registered before multiprocessing's
        "from kerngen.system.processes import Processes\n"
        "if __name__ == '__main__':\n"
        "    processes = Processes(1)\n"
        "    print(processes.submit(os.getpid).result(30), flush=True)\n"
        "    sys.stdin.read()\n"
    )
    for end in ("exit", "kill"):
        with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as started:
            assert started.stdin is not None
            process = psutil.Process(int(started.stdout.readline()))
            if end == "kill":
                started.kill()
            else:
                started.stdin.close()
            process.wait(30)
            assert started.wait(30) == (-signal.SIGKILL if end == "kill" else 0)


def test_signals_are_left_to_the_parent() -> None:
    """Slurm, systemd and `timeout` send them to all of a group."""
    with Processes(1) as processes:
        pid = processes.submit(os.getpid).result(30)
        running = processes.submit(time.sleep, 0.5)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
            os.kill(pid, number)
        running.result(30)
        assert processes.submit(os.getpid).result(30) == pid


def test_a_fork_ends_nothing_of_its_parents() -> None:
    with Processes(1) as processes:
        running = processes.submit(time.sleep, 1.0)
        while not running.running():
            time.sleep(0.01)
        time.sleep(0.3)
        if (child := os.fork()) == 0:
            processes._kill()
            os._exit(0)
        os.waitpid(child, 0)
        running.result(30)


def test_a_callback_may_look_at_what_is_being_closed() -> None:
    processes = Processes(1)
    processes.submit(time.sleep, 600)
    waiting, seen = processes.submit(abs, -1), list[type]()

    def look(_: Future[int]) -> None:
        processes.close()
        with pytest.raises(RuntimeError) as refused:
            processes.submit(abs, -1)
        seen.append(refused.type)

    waiting.add_done_callback(look)
    processes.close()
    assert seen == [RuntimeError]


def test_they_are_called_from_any_thread() -> None:
    with Processes(2) as processes:
        seen: list[int] = []
        threads = [
            threading.Thread(target=lambda i=i: seen.append(processes.submit(abs, -i).result(30))) for i in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(seen) == list(range(8))
