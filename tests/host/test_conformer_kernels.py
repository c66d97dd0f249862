"""What sound is embedded by: the kernels' own sources on the host, and what they refuse."""

from __future__ import annotations

import ctypes
from itertools import product
from pathlib import Path
from typing import Any

import kernel_on_cpu
import pytest
import torch
from torch import Tensor

from kerngen.arch import Target, find_device
from kerngen.compiler.render import render
from kerngen.errors import ProblemError
from kerngen.templates import Case, Kernel, find_kernel
from kerngen.templates.attn_relative.op import attn_relative
from kerngen.templates.glu_conv.op import glu_conv
from kerngen.timing.measure import compare

TARGET = Target.of(find_device("H200"))
MOST_BLOCKS = 6  # each of a hundred threads of the host and more
KERNELS = [find_kernel(name) for name in ("attn_relative", "glu_conv", "mel_conv", "residual_norms", "silu")]


def is_small(kernel: Kernel, case: Case) -> bool:
    """Few blocks, and shared memory that the host's blocks have."""
    (launch,) = kernel.launches(case.problem, kernel.default_config(case.problem, TARGET), TARGET)
    smem = 4 * getattr(case.problem, "window", 0) * getattr(case.problem, "head_dim", 0)
    return launch.grid[0] * launch.grid[1] <= MOST_BLOCKS and smem <= 8192


SMALL = [(kernel, case) for kernel in KERNELS for case in kernel.cases.CASES if is_small(kernel, case)][::2]
_CTYPES = {"ptr": ctypes.c_void_p, "i32": ctypes.c_int, "f32": ctypes.c_float}
needs_compiler = pytest.mark.skipif(kernel_on_cpu.COMPILER is None, reason="neither g++ nor clang++ is on the PATH")


def run_on_cpu(kernel: Kernel, case: Case, inputs: dict[str, Any], folder: Path, turn: int = 0) -> None:
    """turn: which of the configurations that can run, 0 for the default."""
    config = kernel.default_config(case.problem, TARGET)
    if turn:
        points = [kernel.config_type(*values) for values in product(*kernel.spec.SPACE.values())]
        valid = [c for c in points if kernel.why_invalid(case.problem, c, TARGET) is None]
        config = valid[(7 * turn + case.seed) % len(valid)]
    library = kernel_on_cpu.on_cpu(render(kernel, case.problem, config, TARGET), kernel.name, folder)
    (launch,) = kernel.launches(case.problem, config, TARGET)
    (args,) = kernel.body(config, TARGET.arch).args.values()
    given = [inputs[a.name].data_ptr() if isinstance(inputs[a.name], Tensor) else inputs[a.name] for a in args]
    values = [_CTYPES[a.kind](value) for a, value in zip(args, given, strict=True)]
    library.set_grid(launch.grid[0], launch.grid[1], 4)
    library.run(launch.grid[0] * launch.grid[1], launch.block[0], 0, *values)


@needs_compiler
@pytest.mark.parametrize(("turn", "kernel", "case"), [(i % 3, *each) for i, each in enumerate(SMALL)],
                         ids=lambda value: getattr(value, "name", str(value)))  # fmt: skip
def test_sources_equal_references(turn: int, kernel: Kernel, case: Case, tmp_path: Path) -> None:
    inputs = kernel.cases.inputs(case, "cpu")
    expected = kernel.reference.expected(case.problem, inputs)
    run_on_cpu(kernel, case, inputs, tmp_path, turn)
    result = compare(kernel, case, inputs, expected)
    assert result.ok, result.message


@pytest.mark.parametrize("kernel", [k for k in KERNELS if k.name != "mel_conv"], ids=lambda kernel: kernel.name)
def test_every_bound_of_the_cases_bites(kernel: Kernel) -> None:
    """So that the test above would see one that is not applied."""
    cases = [c for c in kernel.cases.CASES if not c.options and c.problem.num_tokens >= 11]
    assert cases
    for case in cases:
        inputs = kernel.cases.inputs(case, "cpu")
        if getattr(case.problem, "window", 2) == 1:
            continue  # softmax of one score is 1, whatever that is
        expected = kernel.reference.expected(case.problem, inputs)
        for row in range(len(inputs["bounds"])):
            bounds = inputs["bounds"].clone()
            bounds[row] = torch.tensor([-torch.inf, torch.inf])
            free = kernel.reference.expected(case.problem, inputs | {"bounds": bounds})
            assert any(not torch.equal(expected[name], free[name]) for name in expected), (case, row)


@needs_compiler
@pytest.mark.parametrize("name", ["attn_relative", "glu_conv"])
def test_what_is_not_a_number_stays_in_its_sound_and_window(name: str, tmp_path: Path) -> None:
    kernel = find_kernel(name)
    case = next(c for c in kernel.cases.CASES if c.options.get("sounds") and (c.problem.num_tokens == 21 or
                c.problem.num_tokens == 18))  # fmt: skip
    inputs = kernel.cases.inputs(case, "cpu")
    seq_len = inputs["seq_len"]
    hit = seq_len + 1  # the second token of the second sound
    (inputs["qkv"] if name == "attn_relative" else inputs["x"])[hit, -1] = torch.nan
    run_on_cpu(kernel, case, inputs, tmp_path)
    reach = case.problem.window if name == "attn_relative" else case.problem.num_taps
    rows = inputs["out"].isnan().any(-1).nonzero().flatten().tolist()
    assert rows == list(range(hit, min(hit + reach, 2 * seq_len)))


def test_what_is_no_sound_is_refused() -> None:
    bounds = torch.zeros(4, 2)
    keys, scale = torch.zeros(2, 4, 16), torch.ones(16)
    for qkv, seq_len, why in (
        (torch.zeros(6, 90), 3, "90 columns, which are no q, k and v of 2 heads of 16"),
        (torch.zeros(6, 96), 4, "6 rows, which are no sounds of 4 tokens"),
        (torch.zeros(6, 96), 0, "6 rows, which are no sounds of 0 tokens"),
    ):
        with pytest.raises(ProblemError, match=why):
            attn_relative(qkv, scale, keys, bounds, 1.0, 50.0, seq_len)
    call = attn_relative(torch.zeros(6, 96), scale, keys, bounds, 1.0, 50.0, 3)
    assert call.problem == find_kernel("attn_relative").problem_type(2, 16, 3, "fp32", 6)
    assert attn_relative(torch.zeros(0, 96), scale, keys, bounds, 1.0, 50.0, 3).problem is None
    for x, seq_len, why in (
        (torch.zeros(6, 24), 3, "24 columns, and taps 16, which are not half"),
        (torch.zeros(6, 32), 4, "6 rows, which are no sounds of 4 tokens"),
    ):
        with pytest.raises(ProblemError, match=why):
            glu_conv(x, torch.zeros(5, 16), torch.ones(16), bounds[:3], seq_len, 1e-6)
