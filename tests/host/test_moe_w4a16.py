"""moe_w4a16's weight formats without a GPU: what is refused, what the op reads, products by the kernels' own source."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import kernel_on_cpu
import pytest
import torch
import w4_on_cpu

from kerngen.arch import ARCHES, Target, find_device
from kerngen.errors import ProblemError
from kerngen.runtime.executors.reference import Reference
from kerngen.runtime.ops import WeightView, dense_weights, grouped_weights
from kerngen.runtime.ops.eager import TorchOps
from kerngen.runtime.ops.kernels import KernelOps
from kerngen.templates import find_kernel
from kerngen.templates.common.rows.torch_rows import Draw
from kerngen.templates.common.w4.pack import drawn, format_of, pack, pack_experts
from kerngen.templates.common.w4.tiling import WEIGHTS
from kerngen.templates.moe_w4a16 import cases, reference, spec
from kerngen.templates.moe_w4a16.op import moe_w4a16
from kerngen.templates.moe_w4a16.spec import Config, Problem

KERNEL = find_kernel("moe_w4a16")
SIZES = {"num_experts": 128, "top_k": 8, "hidden": 2816, "inner": 704}
Q4_K_M = {"up_weights": "int4_min", "down_weights": "int8_min", "fp16_scales": True}
Q8_0 = {"up_weights": "int8", "down_weights": "int8", "fp16_scales": True}
Q6_K_Q8_0 = Q8_0 | {"group_size": 16, "down_group_size": 32}


@pytest.mark.parametrize(("fields", "says"), [
    ({"up_weights": "int3"}, "weights=int3 is not one of int4, int4_min, int8, int8_min"),
    ({"group_size": 16}, "group_size=16 is not one of (32, 64, 128)"),
    ({"down_weights": "int8", "down_group_size": 48}, "group_size=48 is not one of (16, 32, 64, 128, 704)"),
    ({"group_size": 128}, "k=704 is not a positive multiple of group_size=128"),
    ({"down_group_size": 32}, "down_group_size=32 is group_size: 0 says that"),
    ({"dtype": "fp16", "fp16_scales": True}, "fp16_scales=True: with dtype=fp16 they are so"),
])  # fmt: skip
def test_what_no_pair_of_formats_has_is_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ProblemError) as caught:
        Problem(**(SIZES | fields))
    assert says in str(caught.value)


@pytest.mark.parametrize("board", ["V100", "T4", "A100", "RTX3090", "RTX4090", "H100", "B200", "RTX5090"])
@pytest.mark.parametrize("formats", [Q4_K_M, Q8_0, Q6_K_Q8_0], ids=str)
def test_every_arch_and_number_of_tokens_has_a_default(board: str, formats: dict[str, Any]) -> None:
    """It is valid, and what is asked for of memory is what the format takes."""
    target = Target.of(find_device(board))
    formats = formats | {"fp16_scales": target.arch.has_bf16}
    for tokens in (1, 4, 5, 16, 128, 2048):
        problem = Problem(**SIZES, dtype=target.arch.dtype, num_tokens=tokens, **formats)
        config = KERNEL.default_config(problem, target)
        assert spec.why_invalid(problem, config, target) is None
        if tokens <= spec.ALONE_TOKENS:
            each = sum(problem.packing(phase).bytes_of(*spec.shape(problem, phase)) for phase in spec.PHASES)
            assert 8 * tokens * each < KERNEL.cost(problem).bytes < 8 * tokens * each * 1.01
            groups = tokens > 1 and target.arch.has_cp_async
            up, down = (Config.tiling(config, phase) for phase in spec.PHASES)
            body = "gemv" if target.arch.has_ldmatrix and not groups else "mma"
            assert (up.body, down.body, config.groups_routes) == (body, body, groups)


def test_the_op_reads_both_formats_from_its_tensors() -> None:
    x, ids = torch.zeros(3, 192, dtype=torch.bfloat16), torch.zeros(3, 2, dtype=torch.int32)

    def experts(n: int, k: int, weights: str, group: int, dtype: str, *, gated: bool = False) -> Any:
        codes, scales = zip(*(drawn(Draw(e, "cpu"), n, k, group, dtype, weights) for e in range(4)), strict=True)
        made = pack_experts(torch.stack(codes), torch.stack(scales), gated=gated)
        assert format_of(*made) == weights
        if not gated:
            for e in range(4):
                assert all(torch.equal(t[e], one) for t, one in zip(made, pack(codes[e], scales[e]), strict=True))
        return made

    for up in WEIGHTS:
        for down, group, of in (("int4", 32, "bf16"), ("int8_min", 64, "fp16"), ("int8", 128, "fp16")):
            gate_up = experts(256, 192, up, 64, of, gated=True)
            problem = moe_w4a16(x, ids, *gate_up, *experts(192, 128, down, group, of)).problem
            own = 0 if group == 64 else group
            assert problem == Problem(4, 2, 192, 128, 64, "bf16", 3, up, down, own, of == "fp16")
    with pytest.raises(ProblemError, match="both take x"):
        moe_w4a16(x, ids, *gate_up, *experts(192, 128, "int4", 32, "bf16"))


@pytest.mark.parametrize(("up", "down"), [("int4_min", "int8_min"), ("int8", "int4"), ("int8", "dense")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_backends_multiply_them(up: str, down: str, dtype: torch.dtype) -> None:
    """Scales in fp16 whatever activations are; where one of both is dense all is."""
    draw = Draw(7, "cpu")

    def experts(n: int, k: int, weights: str) -> WeightView:
        if weights == "dense":
            return dense_weights((draw.normal(4, n, k, dtype="fp32") * k**-0.5).to(dtype))
        codes, scales = zip(*(drawn(draw, n, k, 32, "fp16", weights) for _ in range(4)), strict=True)
        parts = torch.stack(scales).unbind(-1) if "min" in weights else (torch.stack(scales),)
        view = grouped_weights(torch.stack(codes), *parts)
        assert (view.format.name, view.out_features, view.in_features) == (weights, n, k)
        return view

    loaded = experts(128, 96, up), experts(96, 64, down)
    x, ids = draw.normal(5, 96, dtype="fp32").to(dtype), torch.stack([draw.permutation(4)[:2] for _ in range(5)]).int()
    kernels, oracle = KernelOps(Reference(), dtype), TorchOps(torch.device("cpu"), dtype)
    made = kernels.prepare_experts(*loaded)
    assert [view.format.name for view in made] == (["dense"] * 2 if down == "dense" else [up, down])
    assert {view.tensors[-1].dtype for view in made} == {dtype if down == "dense" else torch.float16}
    got, want = kernels.experts(x, *made, ids), oracle.experts(x, *oracle.prepare_experts(*loaded), ids)
    assert got.dtype == want.dtype == dtype
    tolerance = 1e-4 if dtype == torch.float32 else 2.0**-5
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)


GEMV = Config(8, 32, 1, "gemv", 32, 128, 2, 1, 0, 32, 64, 2, 1, 0)
FEW = Config(8, 32, 1, "mma", 64, 64, 2, 2, 0, 64, 32, 1, 2, 0)
MMA = Config(16, 32, 1, "mma", 64, 64, 1, 2, 0, 64, 64, 1, 2, 0)
VOLTA = replace(MMA, warp_n=64)
# (arch, configuration, tokens, fields): alone, grouped, and planned
RUNS: tuple[tuple[str, Config, int, dict[str, Any]], ...] = (
    ("sm80", MMA, 9, {}),  # that what stands for the GPU is right
    ("sm80", GEMV, 3, Q4_K_M),
    ("sm80", replace(GEMV, groups_routes=True), 3, {"num_experts": 32}),
    ("sm80", replace(FEW, groups_routes=True), 4, Q8_0),
    ("sm70", replace(VOLTA, groups_routes=True), 2, {"num_experts": 2, "dtype": "fp16"}),
    ("sm80", FEW, 7, Q8_0 | {"group_size": 16, "down_group_size": 96}),
    ("sm80", MMA, 9, Q8_0 | {"up_weights": "int8_min", "group_size": 192, "down_group_size": 16}),
    ("sm70", VOLTA, 6, {"down_weights": "int8_min", "group_size": 64, "down_group_size": 32, "dtype": "fp16"}),
)


@pytest.mark.skipif(kernel_on_cpu.COMPILER is None, reason="neither g++ nor clang++ is on the PATH")
@pytest.mark.parametrize(("arch", "config", "tokens", "fields"), RUNS, ids=lambda x: x if isinstance(x, str) else "")
def test_products_are_the_references(
    arch: str, config: Config, tokens: int, fields: dict[str, Any], tmp_path: Path
) -> None:
    target = Target.of(ARCHES[arch])
    problem = Problem(**({"num_experts": 4, "top_k": 2, "hidden": 192, "inner": 96, "num_tokens": tokens} | fields))
    assert spec.why_invalid(problem, config, target) is None
    inputs = cases.inputs(cases.case_for(problem), "cpu")
    w4_on_cpu.run(KERNEL, problem, config, target, inputs, tmp_path)
    want, tolerance = reference.expected(problem, inputs)["y"].float(), reference.tolerance(problem)
    torch.testing.assert_close(inputs["y"].float(), want, atol=tolerance.atol, rtol=tolerance.rtol)
