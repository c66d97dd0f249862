"""What a start costs: a fresh process finds all that was tuned for the 31B in a sealed file, and compiles nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sheets import measured_store

from kerngen.tuning_db import Store
from kerngen.tuning_db.dist.keys import SecretKey
from kerngen.tuning_db.dist.seal import seal

# Nothing of these may be needed: to import one is an error, as where it is not installed. cupy_backends has NVRTC.
ABSENT = ("sqlalchemy", "alembic", "optuna", "jinja2", "torch", "cupy", "cupy_backends")

CHILD = """
import json, sys, time
began = time.perf_counter()
sys.modules.update(dict.fromkeys({absent!r}))
from collections import Counter
from kerngen.arch import Target, find_device
from kerngen.runtime.selection import Selector
from kerngen.templates import find_kernel
from kerngen.tuning_db import open_source
from kerngen.tuning_db.read.reader import Reader

queries, rows = Counter(), Reader._rows
def counted(self, table, *rest):
    queries[table] += 1
    return rows(self, table, *rest)
Reader._rows = counted

problems = [(find_kernel(name), fields) for name, fields in json.load(open(sys.argv[1]))]
loaded = time.perf_counter()
selector = Selector([open_source(sys.argv[2])], Target.of(find_device("H200")))
asked = [(kernel, kernel.problem_type(**fields)) for kernel, fields in problems]
choices = [selector.choice(kernel, problem) for kernel, problem in asked]
bound = time.perf_counter()
for kernel, problem in asked:
    selector._selector(kernel, problem).choice(problem)
again = time.perf_counter()
print(json.dumps({{
    "code": [None if c.cubin is None else len(c.cubin.image) for c in choices],
    "sources": dict(Counter(c.source for c in choices)), "queries": queries,
    "load_s": loaded - began, "bind_s": bound - loaded, "lookup_us": 1e6 * (again - bound) / len(asked),
}}))
"""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """What an H200 measured, sealed and signed, with images that are none; and what was tuned."""
    folder = tmp_path_factory.mktemp("startup")
    copy = measured_store(folder / "copy.sqlite")
    with Store.open(copy, read_only=True) as store:
        fresh = [w for w in store.winners() if not w.stale]
    key = SecretKey(b"k" * 32, "a release")
    seal(copy, folder / "bundle.kgdb", {"name": "31b"}, keys=[key])
    (folder / "release.pub").write_text(key.public.line)
    (folder / "problems.json").write_text(json.dumps([(w.kernel, w.problem.fields) for w in fresh]))
    return folder, fresh


def test_a_start_compiles_nothing_renders_nothing_and_reads_each_row_once(prepared: tuple[Path, list[Any]]) -> None:
    folder, fresh = prepared
    script = folder / "start.py"
    script.write_text(CHILD.format(absent=ABSENT))
    environment = {k: v for k, v in os.environ.items() if not k.startswith("KERNGEN_")}
    environment |= {"KERNGEN_TRUST": str(folder / "release.pub"), "KERNGEN_NO_COMPILE": "1"}
    command = [sys.executable, str(script), str(folder / "problems.json"), str(folder / "bundle.kgdb")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    print(f"imports {said['load_s']:.3f} s, {len(fresh)} points bound in {said['bind_s']:.3f} s, "
          f"then {said['lookup_us']:.1f} us each")  # fmt: skip
    assert len(fresh) > 200, "most of what is shipped was tuned for an older source: tune again"
    assert None not in said["code"], "every configuration comes with its machine code"
    assert said["sources"] == {"bundle: exact device (measured)": len(fresh)}
    lines = {w.problem.static_key for w in fresh}
    assert said["queries"]["line"] == len(lines)
    assert said["queries"]["artifact"] <= len({w.build_id for w in fresh})
    assert set(said["queries"]) <= {"line", "artifact", "revocation"}
    assert said["queries"]["revocation"] == 1
    assert done.stderr == ""
