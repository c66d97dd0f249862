"""What the torture tests need: processes that write and are killed, and small disks. How long: KERNGEN_TEST_TORTURE.

`python torture.py PATH LOGS COUNT [ROWS]` forks COUNT writers to the database PATH, which end after ROWS rows. Without
ROWS it kills one of them after another with SIGKILL, wherever it is, and puts another in its place, until it is killed.
A writer notes in a log of its own what was committed, after the commit.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest

TORTURE_S = float(os.environ.get("KERNGEN_TEST_TORTURE") or 0)
POINTS = 8  # dynamic values that rows are of
DERIVES_EVERY = 25  # rows, of a writer in eight


def main(path: str, logs: str, count: int, most: int = 0) -> None:
    from test_tuning_db import H200, add_build, key_of, measured

    from kerngen.arch import Target
    from kerngen.tuning_db import Store

    def write(child: int) -> None:
        rng = random.Random(child)
        with Store.open(path) as store, open(f"{logs}/{child}", "w", buffering=1) as log:
            n = 0
            while not most or n < most:
                config = rng.randrange(16)
                with store.transaction():  # a build and its measurement land together
                    build = add_build(store, config, keep_image=True)
                    row = measured(build, config, 10.0 + config, problem=key_of(64 << rng.randrange(POINTS)),
                                   run=f"{child}.{n}")  # fmt: skip
                    id = store.add_measurement(row)
                print(id, file=log)
                n += 1
                if child % 8 == 0 and n % DERIVES_EVERY == 0:
                    store.recompute_winners("toy", key_of().static_key, Target.of(H200))

    def fork(child: int) -> int:
        if pid := os.fork():
            return pid
        try:
            write(child)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        os._exit(1)

    rng = random.Random(0)
    children = [fork(child) for child in range(count)]
    made = count
    if most:
        failed = [pid for pid in children if os.waitpid(pid, 0)[1]]
        sys.exit(bool(failed))
    while True:
        time.sleep(rng.uniform(0.01, 0.3))
        victim = rng.randrange(count)
        os.kill(children[victim], signal.SIGKILL)
        if os.waitpid(children[victim], 0)[1] != signal.SIGKILL:
            sys.exit("a writer ended by itself")
        children[victim] = fork(made)
        made += 1


def start_writers(path: Path, logs: Path, *numbers: int) -> subprocess.Popen[str]:
    logs.mkdir()
    command = [sys.executable, __file__, str(path), str(logs), *map(str, numbers)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)


@contextlib.contextmanager
def killed_writers(path: Path, logs: Path, count: int) -> Iterator[subprocess.Popen[str]]:
    """They write within it; at its end all of them are killed at once."""
    process = start_writers(path, logs, count)
    try:
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)


def noted(logs: Path) -> set[str]:
    """Ids that were committed, by the writers' own account: whole lines only."""
    lines = [line for log in logs.iterdir() for line in log.read_text().splitlines(keepends=True)]
    return {line.strip() for line in lines if line.endswith("\n")}


@contextlib.contextmanager
def small_disk(folder: Path, kilobytes: int) -> Iterator[Path]:
    """A file system of its own that is so large, at `folder`. Skips where it cannot be made: that takes root."""
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={kilobytes}k", "kerngen-test", str(folder)]
    if why := _mount(*options):
        pytest.skip(f"no file system can be mounted here: {why}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def read_only(folder: Path) -> None:
    """Make a `small_disk` one that nobody can write to."""
    assert not _mount("-o", "remount,ro", str(folder))


def _mount(*options: str) -> str:
    try:
        done = subprocess.run(["mount", *options], capture_output=True, text=True, check=False)
    except OSError as e:
        return str(e)
    return done.stderr.strip() or (f"mount: exit {done.returncode}" if done.returncode else "")


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:]))
