"""Many processes on one database file: nothing is lost, whoever is killed and whenever."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

from kerngen.tuning_db import Store

# Forked after the imports, so that 64 processes cost one start-up. Each process opens the file itself and, after
# each committed transaction, notes so in a log of its own.
_WRITERS = """
import os, sys, traceback
sys.path.insert(0, sys.argv[1])
from test_tuning_db import add_build, measured
from kerngen.tuning_db import Store

path, logs, count, rows = sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
children = []
for child in range(count):
    if pid := os.fork():
        children.append(pid)
        continue
    try:
        with Store.open(path) as store, open(f"{logs}/{child}", "w", buffering=1) as log:
            for n in range(rows):
                with store.transaction():   # the build and its measurement land together
                    build = add_build(store, n % 4, keep_image=n == 0)
                    id = store.add_measurement(measured(build, n % 4, 1.0 + n, run=f"{child}.{n}"))
                print(id, file=log)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
sys.exit(any([os.waitpid(pid, 0)[1] for pid in children]))
"""


def spawn_writers(path: Path, logs: Path, count: int, rows: int) -> subprocess.Popen[bytes]:
    logs.mkdir(exist_ok=True)
    arguments = [str(Path(__file__).parent), str(path), str(logs), str(count), str(rows)]
    return subprocess.Popen(
        [sys.executable, "-c", _WRITERS, *arguments], stderr=subprocess.PIPE, start_new_session=True
    )


def noted(logs: Path) -> set[str]:
    """Ids that were committed, by the writers' own account: whole lines only."""
    lines = [line for log in logs.iterdir() for line in log.read_text().splitlines(keepends=True)]
    return {line.strip() for line in lines if line.endswith("\n")}


def integrity(path: Path) -> str:
    with closing(sqlite3.connect(path)) as c:
        return str(c.execute("PRAGMA integrity_check").fetchone()[0])


def test_64_writers_lose_nothing(tmp_path: Path) -> None:
    """On a file that is not there yet, so that all of them race to make it."""
    path, logs = tmp_path / "tuning.db", tmp_path / "logs"
    writers = spawn_writers(path, logs, 64, 6)
    _, errors = writers.communicate(timeout=90)
    assert writers.returncode == 0, errors.decode()
    with Store.open(path) as store:
        ids = {o.id for o in store.measurements()}
    assert len(ids) == 64 * 6
    assert ids == noted(logs)
    assert integrity(path) == "ok"


def test_a_kill_loses_nothing_that_was_committed(tmp_path: Path) -> None:
    path = tmp_path / "tuning.db"
    committed: set[str] = set()
    for kill in range(3):
        logs = tmp_path / f"logs{kill}"
        writers = spawn_writers(path, logs, 4, 100_000)
        deadline = time.monotonic() + 30
        while len(noted(logs)) < 20 and time.monotonic() < deadline:
            time.sleep(0.01)
        os.killpg(writers.pid, signal.SIGKILL)
        writers.communicate()
        assert len(noted(logs)) >= 20
        committed |= noted(logs)
        with Store.open(path) as store:
            rows = store.measurements()
            assert committed <= {o.id for o in rows}
            for build_id in {o.measurement.build_id for o in rows}:
                store.build(str(build_id))  # half a transaction would leave a measurement without its build
        assert integrity(path) == "ok"
