"""Adding a kernel touches its folder and its call in the model; deleting it, the same two."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TINY = ROOT / "examples" / "tiny" / "gemma-4-tiny-w4a16"
# The one line that a model's author writes, in a subclass here so that the checkout stays as it is.
USE = """
import json, sys, torch
from kerngen.arch import find_arch
from kerngen.runtime.executors.reference import Reference
from kerngen.runtime.ops import kernels
from kerngen.templates import kernel_names

use = sys.argv[1] == "use"
answer = {"kernels": kernel_names()}
if use:
    from kerngen.templates.my_scale.op import my_scale
    gated = kernels.KernelOps.gated

    def scaled(self, x, gate_up):
        h = gated(self, x, gate_up)
        return self.run(my_scale(h, torch.ones(h.shape[1], dtype=h.dtype, device=h.device)), "scale")

    kernels.KernelOps.gated = scaled
    x, w = torch.randn(3, 16).bfloat16(), torch.randn(16).bfloat16()
    answer["right"] = torch.equal(Reference().run(my_scale(x, w), "here"), x * w)

from kerngen.workload.workload import find_model, workload
load = workload(find_model(sys.argv[2]), find_arch("sm70"))
answer["asked"] = sorted({i.kernel for i in load.items})
answer["places"] = [u.where for i in load.items if i.kernel == "my_scale" for u in i.uses][:1]
print(json.dumps(answer))
"""


def _python(*args: str, templates: Path) -> str:
    env = os.environ | {"KERNGEN_TEMPLATES": str(templates), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *args], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_folder_and_a_call_are_all_that_a_kernel_takes(tmp_path: Path) -> None:
    kernels = tmp_path / "kernels"
    kernels.mkdir()
    before = json.loads(_python("-c", USE, "leave", str(TINY), templates=kernels))
    _python("-m", "kerngen", "kernel", "new", "my_scale", "--templates", str(kernels), templates=kernels)

    made = json.loads(_python("-c", USE, "use", str(TINY), templates=kernels))
    assert made["right"], "the reference executor answers the op"
    assert set(made["kernels"]) - set(before["kernels"]) == {"my_scale"}
    assert set(made["asked"]) - set(before["asked"]) == {"my_scale"}, "the record of the forward has it, and no list"
    assert made["places"] == ["scale (sliding)"]

    shutil.rmtree(kernels / "my_scale")
    assert json.loads(_python("-c", USE, "leave", str(TINY), templates=kernels)) == before
