"""examples/cluster: what merely starts workers starts them with options that there are, and the local one does it."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from command import ROOT, lent_boards
from postgres import postgresql_server, postgresql_url, queue_url
from test_docs import _why_wrong

from kerngen.job_queue.queue import Queue
from kerngen.report.page import write_report
from kerngen.tuning_db import Store

__all__ = ["postgresql_server", "postgresql_url", "queue_url"]

FOLDER = ROOT / "examples" / "cluster"


def commands(path: Path) -> Iterator[list[str]]:
    """Each `kerngen ...` that a file starts, as arguments."""
    said = path.read_text()
    if path.suffix == ".py":
        lists = [ast.literal_eval(n) for n in ast.walk(ast.parse(said)) if isinstance(n, ast.List) and _is_plain(n)]
        yield from (words[1:] for words in lists if words[:1] == ["kerngen"])
    elif path.suffix == ".yaml":
        for line in re.findall(r"command: \[kerngen, (.*)\]", said):
            yield [word.strip().strip('"') for word in line.split(",")]
    else:
        for line in re.findall(r"^(?!#)(?:.*\s)?kerngen (\w.*)$", said, re.MULTILINE):
            yield shlex.split(line.removesuffix("&").replace('"$@"', ""))


def _is_plain(node: ast.List) -> bool:
    return all(isinstance(e, ast.Constant) for e in node.elts)


@pytest.mark.parametrize(
    ("name", "count"), [("slurm.sbatch", 1), ("kubernetes.yaml", 2), ("ray_workers.py", 1), ("local.sh", 4)]
)
def test_the_commands_are_understood(name: str, count: int) -> None:
    found = list(commands(FOLDER / name))
    assert len(found) == count
    for args in found:
        args = ["8" if a == "$SLURM_CPUS_PER_TASK" else a for a in args]
        assert _why_wrong(args) is None, args
    assert any(args[0] == "worker" for args in found)
    assert _why_wrong(["worker", "--knd", "measure"]) is not None


def test_all_files_are_told_of() -> None:
    readme = (FOLDER / "README.md").read_text()
    assert {p.name for p in FOLDER.iterdir()} == {"README.md", *re.findall(r"\]\(([\w.]+)\)", readme)}


@pytest.mark.parametrize("name", ["slurm.sbatch", "local.sh"])
def test_shells_read_them(name: str) -> None:
    subprocess.run(["bash", "-n", FOLDER / name], check=True)


def test_the_local_one_tunes(queue_url: str, tmp_path: Path) -> None:
    """Two workers, as the README has it, on a server of this test's own."""
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "kerngen"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m kerngen "$@"\n')
    command.chmod(0o755)
    paths = {"PATH": f"{command.parent}{os.pathsep}{os.environ['PATH']}",
             "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}  # fmt: skip
    environment = os.environ | paths | {"KERNGEN_CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    with lent_boards(tmp_path / "cache"):
        done = subprocess.run(
            [FOLDER / "local.sh", queue_url, "--kernel", "embed,rmsnorm", "--trials", "1"], env=environment,
            capture_output=True, text=True, timeout=240, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "problems have a winner" in done.stdout
    assert re.search(r"predict-sm70-\w+ +3 succeeded", done.stdout), done.stdout
    assert len(set(re.findall(r"(\S+:\d+:\w+) .*takes predict-sm70", done.stderr))) == 2, done.stderr
    with Store.open(queue_url) as store:
        assert {w.kernel for w in store.winners()} == {"embed", "rmsnorm"}
        assert {w.provenance for w in store.winners()} == {"predicted"}
        made = write_report(tmp_path / "report.html", [store])
        assert (len(made.facts.points), len(made.facts.searches)) == (len(store.winners()),) * 2
    with Queue.open(queue_url) as queue:
        assert {s.job.model for s in queue.states()} == {"gemma-4-31b"}
