"""A fresh process with a bundle of the 31B: every kernel is bound, loaded and launched, and none is compiled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kerngen.arch import find_arch
from kerngen.templates.kernel import fields_of
from kerngen.timing.measure import target_here
from kerngen.workload.workload import find_model, workload

ALLOWED_S = 0.5  # beyond CUDA's own start

CHILD = """
import json, sys, time
import torch
torch.zeros(1, device="cuda")
torch.cuda.synchronize()
began = time.perf_counter()
from kerngen.bundles.bundle import sources_for
from kerngen.runtime.launcher import Launcher
from kerngen.templates import find_kernel

sources, cache, _ = sources_for(None, sys.argv[1])
launcher = Launcher(sources, cache)
opened = time.perf_counter()
loaded = {}
for name, fields in json.load(open(sys.argv[2])):
    kernel = find_kernel(name)
    problem = kernel.problem_type(**fields)
    function = launcher.function(kernel, problem)
    function.plan(problem)
    loaded.setdefault(function, (kernel, problem))
ready = time.perf_counter()
seconds = 0.0
for function, (kernel, problem) in loaded.items():
    case = kernel.cases.case_for(problem)
    inputs = kernel.cases.inputs(case, torch.device("cuda"))
    torch.cuda.synchronize()
    before = time.perf_counter()
    function(case.problem, **inputs)
    seconds += time.perf_counter() - before
    torch.cuda.synchronize()
heavy = [m for m in ("sqlalchemy", "jinja2", "optuna", "kerngen.compiler.render") if m in sys.modules]
print(json.dumps({"open_s": opened - began, "load_s": ready - opened, "launch_s": seconds,
                  "functions": len(loaded), "heavy": heavy}))
"""


@pytest.mark.whole_gpu(smoke=False)  # compiles all that the 31B needs
def test_a_bundle_of_the_31b_is_ready_in_half_a_second(tmp_path: Path) -> None:
    target = target_here()
    bundle = tmp_path / "31b.kgdb"
    command = [sys.executable, "-m", "kerngen", "compile", "--model", "gemma-4-31b", "--unsigned", "-o", str(bundle)]
    made = subprocess.run([*command, "--device", target.device.name], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    items = workload(find_model("gemma-4-31b"), find_arch(target.arch.name)).items
    (tmp_path / "problems.json").write_text(json.dumps([(i.kernel, fields_of(i.problem)) for i in items]))
    (tmp_path / "start.py").write_text(CHILD)
    environment = os.environ | {"KERNGEN_NO_COMPILE": "1", "KERNGEN_TRUST_UNSIGNED": "1"}
    environment["KERNGEN_CACHE_DIR"] = str(tmp_path / "empty")
    arguments = [str(tmp_path / "start.py"), str(bundle), str(tmp_path / "problems.json")]
    starts = []
    for _ in range(2):  # the second has the files in memory, and Python's own compiles
        done = subprocess.run(
            [sys.executable, *arguments], capture_output=True, text=True, env=environment, check=False
        )
        assert done.returncode == 0, done.stderr
        starts.append(json.loads(done.stdout.splitlines()[-1]))
    print(f"{len(items)} problems, {starts[1]}")
    assert not starts[1]["heavy"]
    assert starts[1]["functions"] > 50
    assert starts[1]["open_s"] + starts[1]["load_s"] + starts[1]["launch_s"] < ALLOWED_S
