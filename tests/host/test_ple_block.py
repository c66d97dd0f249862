"""ple_block's reference against the model's own steps, and the memory and grids of its two launches.

What holds for every kernel is in test_kernel_folders.py.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from kerngen.arch import Target, find_arch
from kerngen.compiler.compile import compile_ptx
from kerngen.compiler.render import render
from kerngen.errors import ConfigRefused, ProblemError
from kerngen.templates import find_kernel

KERNEL = find_kernel("ple_block")
SM90 = find_arch("sm90")
H200 = Target.of(SM90)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_reference_is_the_models_layer(dtype: str) -> None:
    """Bit for bit up to the dense products: those of the model are summed in another order."""
    gemma4 = pytest.importorskip("transformers.models.gemma4.modeling_gemma4")
    from transformers.activations import ACT2FN

    def norm(weight: Tensor, x: Tensor) -> Tensor:
        module = gemma4.Gemma4RMSNorm(x.shape[-1], eps=1e-6)
        module.weight.data = weight
        return module(x).detach()

    case = KERNEL.cases.case_for(KERNEL.problem_type(1536, 256, dtype, dtype, num_tokens=5))
    given = KERNEL.cases.inputs(case, "cpu")
    expected = KERNEL.reference.expected(case.problem, given)
    stream = given["residual"] + norm(given["ffn_weight"], given["h"])
    gated = ACT2FN["gelu_pytorch_tanh"](linear(stream, given["gate"])) * given["ple"][:, :256]
    stream = stream + norm(given["post_weight"], linear(gated, given["projection"]))
    stream *= given["layer_scalar"]
    tolerance = KERNEL.reference.tolerance(case.problem)
    close = {"atol": max(tolerance.atol, 1e-5), "rtol": max(tolerance.rtol, 1e-5)}
    torch.testing.assert_close(expected["residual_out"], stream.float(), **close)
    torch.testing.assert_close(expected["out"], norm(given["next_weight"], stream).float(), **close)


def test_a_tokens_part_of_the_workspace_stays_where_it_is() -> None:
    """Counts must be zero between launches: a larger batch must not leave rows where a smaller one counts."""
    p = KERNEL.problem_type(264, 40, "fp16", "fp32")
    size = KERNEL.constants(p, KERNEL.config_type(), SM90)["TOKEN_BYTES"]
    assert size == 16 + 4 * 264 + 2 * 40 + 2 * 264
    assert size % 16 == 0
    for tokens in (1, 2, 7, 64):
        asked = dataclasses.replace(p, num_tokens=tokens)
        assert KERNEL.workspace_bytes(asked, KERNEL.default_config(asked, H200), H200) == tokens * size


def test_weights_are_on_their_way_before_the_wait_and_nothing_else_is() -> None:
    p = KERNEL.problem_type()
    ptx = compile_ptx(render(KERNEL, p, KERNEL.config_type(), H200), SM90).image.decode()
    for entry, weights in (("ple_gate", 6 + 2), ("ple_project", 2 + 1 + 1 + 1)):
        (body,) = re.findall(rf"\.entry {entry}\b(.*?)(?=\.entry |\Z)", ptx, flags=re.DOTALL)
        before, after = body.split("griddepcontrol.wait", 1)
        assert "griddepcontrol.launch_dependents" in before
        assert len(re.findall(r"ld\.global", before)) == weights
        assert not re.search(r"(st|atom|red)\.\S*global", before)
        assert re.search(r"ld\.global", after)


def test_each_tile_of_tokens_reads_the_weights_once() -> None:
    for tokens, block_m, tiles in ((1, 1, 1), (2, 1, 2), (8, 1, 8), (16, 2, 8), (17, 8, 3), (64, 8, 8)):
        p, config = KERNEL.problem_type(num_tokens=tokens), KERNEL.config_type(block_m, 8, 8, 2)
        gate, project = KERNEL.launches(p, config, H200)
        assert gate.grid[0] == tiles * 256 // config.gate_warps
        assert project.grid[0] == tiles * 1536 // (config.num_warps * config.rows_per_warp)


def test_many_tokens_share_what_a_block_reads() -> None:
    chosen = [KERNEL.default_config(KERNEL.problem_type(num_tokens=n), H200).block_m for n in (1, 8, 24, 64)]
    assert chosen == sorted(chosen)
    assert chosen[0] == 1 < chosen[-1]


@pytest.mark.parametrize(("fields", "config", "message"), [
    ({"num_tokens": 65}, {}, "num_tokens=65: at most 64; dense products and add_norm serve more"),
    ({"num_tokens": 8}, {"block_m": 8}, "gate_warps=4 for block_m=8 rows; a row takes a warp at least"),
    ({"hidden": 2816, "num_tokens": 8}, {"block_m": 8, "gate_warps": 8}, "gate_warps=8 hold 11 vectors of a row"),
    ({"num_tokens": 4}, {"block_m": 8, "gate_warps": 8}, "block_m=8 for 4 tokens; 4 do"),
])  # fmt: skip
def test_configurations_that_cannot_run_are_refused(
    fields: dict[str, Any], config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigRefused, match=re.escape(message)):
        KERNEL.require_valid(KERNEL.problem_type(**fields), KERNEL.config_type(**config), H200)


def test_rows_of_ple_must_not_have_gaps() -> None:
    given = KERNEL.cases.inputs(KERNEL.cases.CASES[0], "cpu")
    op, arguments = KERNEL.op_call(KERNEL.cases.CASES[1], KERNEL.cases.inputs(KERNEL.cases.CASES[1], "cpu"))
    assert op.of_flat(arguments).arguments["ple_stride"] == 3 * given["gate"].shape[0]
    arguments["ple"] = torch.zeros(*arguments["ple"].shape, 2, dtype=torch.bfloat16)[..., 0]
    with pytest.raises(ProblemError, match=r"ple's rows.* 2 apart.* 1"):
        op.of_flat(arguments)
