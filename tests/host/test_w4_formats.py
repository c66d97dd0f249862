"""Weight formats of w4a16_gemm without a GPU: the repack, what is refused, and products by the kernels' own source.

Bodies gemv, mma and tma_mma run on the CPU (kernel_on_cpu.py), m8n8k4 too: how codes and scales lie in memory and
become operands is seen there. Of wgmma_ws the boxes of its bulk copies are compared with the packed tensors.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import kernel_on_cpu
import pytest
import torch
import w4_on_cpu
from torch import Tensor

from kerngen.arch import ARCHES, Arch, Target, find_arch, find_device
from kerngen.compiler.compile import compile_cubin
from kerngen.compiler.render import render
from kerngen.errors import ProblemError
from kerngen.runtime.executors.reference import Reference
from kerngen.runtime.ops.eager import TorchOps
from kerngen.runtime.ops.kernels import KernelOps
from kerngen.runtime.ops.values import grouped_weights
from kerngen.templates import find_kernel
from kerngen.templates.common.rows.torch_rows import TORCH_DTYPE, Draw
from kerngen.templates.common.w4 import limits
from kerngen.templates.common.w4.pack import dequantize, drawn, interleave, pack, rounded_scales, separate, unpack
from kerngen.templates.common.w4.tiling import WEIGHTS, packing_of
from kerngen.templates.w4a16_gemm import cases, reference, spec
from kerngen.templates.w4a16_gemm.op import w4a16_gemm
from kerngen.templates.w4a16_gemm.spec import Config, Problem

KERNEL = find_kernel("w4a16_gemm")
NO_COMPILER = pytest.mark.skipif(kernel_on_cpu.COMPILER is None, reason="neither g++ nor clang++ is on the PATH")


def _pieces(weights: str, n: int = 64, k: int = 192, group: int = 32) -> tuple[Tensor, Tensor]:
    return drawn(Draw(n + k, "cpu"), n, k, group, "fp16", weights)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("group", [32, 64])
def test_unpack_is_the_exact_inverse_of_pack(weights: str, group: int) -> None:
    given = _pieces(weights, group=group)
    w_packed, scales = pack(*given)
    packing = packing_of(weights, group)
    assert w_packed.is_contiguous()
    assert scales.is_contiguous()
    sizes = [t.numel() * t.element_size() for t in (w_packed, scales)]
    assert sizes == [2 * 6 * packing.tile_bytes, 2 * (192 // group) * packing.group_bytes]
    assert sum(sizes) == packing.bytes_of(64, 192)
    assert all(torch.equal(a, b) for a, b in zip(unpack(w_packed, scales), given, strict=True))
    meta = pack(*(t.to("meta") for t in given))
    assert [t.shape for t in meta] == [w_packed.shape, scales.shape]


def test_packed_bytes_hold_the_fragments_that_the_kernel_reads() -> None:
    """Half s, lane 4 g + t, word 2 j + i: bytes 0 and 2 are row 4 g + 2 s, bytes 1 and 3 the next."""
    codes, scale = _pieces("int8", 64, 96)
    w_packed, _ = pack(codes, scale)
    places = ((0, 0, 0, 0, 0, 0), (1, 2, 1, 31, 3, 3), (0, 1, 1, 13, 2, 1), (1, 0, 0, 22, 1, 2))
    for strip, tile, s, lane, word, byte in places:
        value = (int(w_packed[strip, tile, s * 32 + lane, word]) >> (8 * byte)) & 255
        g, t, j, i = lane // 4, lane % 4, word // 2, word % 2
        row, column = strip * 32 + 4 * g + 2 * s + byte % 2, tile * 32 + 16 * j + 2 * t + 8 * i + byte // 2
        assert value - 128 == codes[row, column]


def test_minima_lie_behind_the_scales_of_two_rows() -> None:
    codes, scale = _pieces("int4_min")
    _, scales = pack(codes, scale)
    rows = torch.arange(32).view(16, 2)
    for pair in (0, 7, 15):
        here = scales[1, 3, 4 * pair : 4 * pair + 4]
        assert torch.equal(here[:2], scale[32 + rows[pair], 3, 0])
        assert torch.equal(here[2:], scale[32 + rows[pair], 3, 1])


def test_what_codes_mean() -> None:
    words = torch.tensor([[0x76543210, 0xFEDCBA98 - (1 << 32)] * 2], dtype=torch.int32)
    scale, both = torch.tensor([[0.5]]), torch.tensor([[[0.5, -3.0]]])
    assert dequantize(words, both)[0, :16].tolist() == [0.5 * i - 3 for i in range(16)]
    assert dequantize(words, scale)[0, :16].tolist() == [0.5 * (i - 8) for i in range(16)]
    codes = torch.tensor([[-128, 0, 127, 5] * 8], dtype=torch.int8)
    assert dequantize(codes, scale)[0, :4].tolist() == [-64.0, 0.0, 63.5, 2.5]
    assert dequantize(codes, both)[0, :4].tolist() == [-67.0, -3.0, 60.5, -0.5]


def test_gate_and_up_are_interleaved_with_their_minima() -> None:
    given = _pieces("int8_min")
    assert all(torch.equal(separate(m), t) for m, t in zip(interleave(*given), given, strict=True))


def test_scales_that_are_rounded_are_counted() -> None:
    """Q6_K's d * scale has up to 19 bits: of 1025 / 1024 * 3 fp16 loses one."""
    exact = torch.tensor([0.5, 3 * 1025 / 1024, 1.0, 1 + 2.0**-9])
    made, lost = rounded_scales(exact, torch.float16)
    assert made.dtype == torch.float16
    assert lost == 1
    assert rounded_scales(exact, torch.bfloat16)[1] == 2
    assert rounded_scales(exact, torch.float32)[1] == 0


def test_pack_refuses_scales_that_do_not_fit() -> None:
    codes, scale = _pieces("int8")
    for wrong in (scale[:32], scale[:, :5], scale[..., None], torch.stack((scale,) * 3, -1)):
        with pytest.raises(ProblemError, match="do not fit a W of 64 x 192"):
            pack(codes, wrong)


@pytest.mark.parametrize(("fields", "says"), [
    ({"weights": "int3"}, "weights=int3 is not one of int4, int4_min, int8, int8_min"),
    ({"group_size": 16}, "group_size=16 is not one of (32, 64, 128)"),
    ({"weights": "int4_min", "group_size": 16}, "group_size=16"),
    ({"weights": "int8", "group_size": 48}, "group_size=48 is not one of (16, 32, 64, 128, 384)"),
    ({"dtype": "fp16", "fp16_scales": True}, "fp16_scales=True: with dtype=fp16 they are so"),
    ({"weights": "int8", "k": 400, "group_size": 16}, "k=400 is not a multiple of 32"),
])  # fmt: skip
def test_what_no_format_has_is_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ProblemError) as caught:
        Problem(**({"n": 256, "k": 384} | fields))
    assert says in str(caught.value)


@pytest.mark.parametrize("arch", [a for a in ARCHES.values() if a.has_tma], ids=str)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_streams_of_any_format_compile_and_keep_in_registers(arch: Arch, weights: str) -> None:
    """Nothing chooses body=tma_mma yet."""
    problem, target = Problem(1024, 5376, 32, "bf16", 3, weights=weights), Target.of(arch)
    configs = list(spec.mma_stream_configs(problem, target))
    assert configs
    for config in (configs[0], configs[-1]):
        assert spec.why_invalid(problem, config, target) is None
        cubin = compile_cubin(render(KERNEL, problem, config, target), arch)
        (resources,) = cubin.entries.values()
        assert max(resources.spill_store_bytes, resources.stack_bytes) == 0, config
        need, given = limits.registers(config, problem.k, problem.packing, arch)
        assert need <= given
        assert resources.registers <= given, config


@pytest.mark.parametrize("fields", [{"weights": "int8"}, {"weights": "int4_min"}, {"fp16_scales": True}])
def test_limbs_multiply_symmetric_int4_alone(fields: dict[str, Any]) -> None:
    problem, target = Problem(4096, 1536, 32, "bf16", 1), Target.of(find_arch("sm90"))
    stream = next(c for c in KERNEL.candidates(problem, target) if c.stream)
    other = replace(problem, **fields)
    assert "body=tma_mma serves" in str(spec.why_invalid(other, stream, target))
    assert {c.body for c in KERNEL.candidates(other, target) if c.stream} == {"tma_mma"}


@pytest.mark.parametrize("board", ["V100", "T4", "A100", "RTX3090", "RTX4090", "H100", "H200", "B200", "RTX5090"])
@pytest.mark.parametrize(
    ("weights", "group"), [("int4_min", 32), ("int8", 16), ("int8", 32), ("int8_min", 32), ("int8", 0)]
)
def test_every_arch_and_number_of_tokens_has_a_default(board: str, weights: str, group: int) -> None:
    """It is valid, and for few tokens it reads W once and has enough on its way."""
    target = Target.of(find_device(board))
    matrices = (43008, 5376), (5376, 21504), (2048, 2816), (96, 96)
    for (n, k), tokens in itertools.product(matrices, (1, 2, 8, 9, 64, 2048)):
        problem = Problem(n, k, group or k, target.arch.dtype, tokens, weights=weights)
        config = KERNEL.default_config(problem, target)
        assert spec.why_invalid(problem, config, target) is None
        assert config.block_m >= min(tokens, 8)
        if tokens <= 8 and n * k > 10**8:
            under_way = _bytes_under_way(problem, config, target)
            assert under_way >= 0.6e3 * target.device.mem_gbps / target.device.num_sms, (problem, config)


def _bytes_under_way(problem: Problem, config: Config, target: Target) -> int:
    """Of W in flight an SM: of gemv what as many blocks as registers allow hold, else of stages."""
    (launch,), arch, turn = spec.launches(problem, config, target), target.arch, config.weight_bytes(problem.packing)
    if config.body != "gemv":
        return turn * (config.num_stages - 1) * max(1, config.blocks_per_sm)
    registers = -(-spec.expected_registers(problem, config, target) // 8) * 8
    return turn * min(arch.regs_per_sm // (registers * launch.block[0]), arch.max_warps_per_sm * 32 // launch.block[0])


def test_the_op_reads_the_format_from_its_tensors() -> None:
    x = torch.zeros(3, 192, dtype=torch.bfloat16)
    for weights in WEIGHTS:
        packed, scales = pack(*_pieces(weights))
        problem = w4a16_gemm(x, packed, scales.to(x.dtype)).problem
        assert (problem.weights, problem.group_size, problem.fp16_scales) == (weights, 32, False)
        assert w4a16_gemm(x, packed, scales).problem.fp16_scales
    with pytest.raises(ProblemError, match="are no format"):
        w4a16_gemm(x, packed, scales[:, :, :48])
    with pytest.raises(ProblemError, match="it takes x's torch"):
        w4a16_gemm(x, packed, scales.float())


def _box(tensor: Tensor, made: Any, at: tuple[int, ...]) -> Tensor:
    """What a bulk copy brings: the box at these coordinates, innermost first, as 16-bit elements."""
    flat = tensor.contiguous().view(torch.int16).flatten()
    strides = [1, *(s // 2 for s in made.strides)]
    whole = flat.as_strided(made.dims[::-1], strides[::-1])
    place = [slice(a, a + b) for a, b in zip(at, made.box, strict=True)]
    return whole[tuple(place[::-1])].flatten()


@pytest.mark.parametrize(
    ("weights", "group"), [("int4", 32), ("int4_min", 128), ("int8", 16), ("int8_min", 64), ("int8", 384)]
)
def test_bulk_copies_bring_a_stage(weights: str, group: int) -> None:
    """wgmma_ws: strips of tiles, then their scales, as the stage has them (BOXED_TILES of its template)."""
    problem = Problem(256, 384, group, "fp16", 64, weights=weights)
    config = Config(64, 128, 128, 16, 1, 1, 3, 0, "wgmma_ws")
    assert spec.why_invalid(problem, config, Target.of(find_arch("sm90"))) is None
    w_packed, scales = pack(*drawn(Draw(1, "cpu"), 256, 384, group, "fp16", weights))
    unit, strip, tiles = 2, 4, 4
    w_map, scales_map = (
        spec.tensor_map(problem, config, name, tuple(t.shape))
        for name, t in (("w_packed", w_packed), ("scales", scales))
    )
    assert max(w_map.box + scales_map.box) <= 256
    boxed, first, groups = tiles * problem.packing.tile_bytes // 512, unit * 128 // group, max(1, 128 // group)
    for tensor, made, at, part in (
        (w_packed, w_map, unit * boxed, slice(unit * tiles, (unit + 1) * tiles)),
        (scales, scales_map, first, slice(first, first + groups)),
    ):
        wanted = tensor[strip : strip + 4, part].contiguous().view(torch.int16).flatten()
        assert torch.equal(_box(tensor, made, (0, at, strip, 0)), wanted)


GEMV = Config(8, 32, 128, 32, 1, 2, 1, 0, "gemv")
MMA = Config(16, 64, 64, 32, 1, 1, 2, 0)
SCALED_PRODUCTS = replace(MMA, block_m=8, block_k=64, warps_k=2)
STREAM = Config(8, 32, 128, 32, 1, 4, 2, 1, "tma_mma")  # fewer tiles than a stage holds at a part's end
VOLTA = Config(16, 64, 64, 64, 1, 1, 2, 0)
# (arch, configuration, tokens, fields)
RUNS: tuple[tuple[str, Config, int, dict[str, Any]], ...] = (
    ("sm80", GEMV, 3, {"weights": "int4"}),  # that what stands for the GPU is right
    ("sm80", GEMV, 3, {"weights": "int8"}),
    ("sm80", GEMV, 1, {"weights": "int8", "dtype": "fp16", "group_size": 16}),
    ("sm80", GEMV, 8, {"weights": "int8", "group_size": 16, "gated": True}),
    ("sm80", GEMV, 2, {"weights": "int8_min", "group_size": 16, "fp16_scales": True}),
    ("sm80", GEMV, 5, {"weights": "int4_min", "group_size": 64}),
    ("sm75", GEMV, 4, {"weights": "int4_min", "dtype": "fp16", "group_size": 192}),
    ("sm80", replace(GEMV, block_n=64, warp_n=64), 2, {"fp16_scales": True, "n": 96}),
    ("sm80", SCALED_PRODUCTS, 7, {"weights": "int8", "group_size": 16}),
    ("sm80", SCALED_PRODUCTS, 7, {"weights": "int4_min"}),
    ("sm80", MMA, 40, {"weights": "int4"}),
    ("sm80", MMA, 40, {"weights": "int8"}),
    ("sm80", MMA, 17, {"weights": "int8", "group_size": 16, "fp16_scales": True}),
    ("sm80", MMA, 17, {"weights": "int8_min", "group_size": 192, "n": 96}),
    ("sm80", MMA, 20, {"weights": "int8_min", "group_size": 16, "dtype": "fp16"}),
    ("sm80", MMA, 20, {"weights": "int4_min", "gated": True}),
    ("sm80", MMA, 20, {"weights": "int4_min", "fp16_scales": True}),
    ("sm80", MMA, 16, {"fp16_scales": True}),
    ("sm75", MMA, 16, {"weights": "int8", "dtype": "fp16"}),
    ("sm90", STREAM, 3, {"weights": "int4"}),
    ("sm90", STREAM, 8, {"weights": "int8", "group_size": 16}),
    ("sm90", STREAM, 1, {"weights": "int8_min", "dtype": "fp16", "gated": True}),
    ("sm90", replace(STREAM, block_k=256), 5, {"weights": "int4_min", "group_size": 64, "fp16_scales": True, "k": 640}),
    ("sm90", replace(STREAM, block_k=512), 2, {"weights": "int8", "group_size": 128, "k": 1280}),
    ("sm70", VOLTA, 20, {"weights": "int4", "dtype": "fp16"}),
    ("sm70", VOLTA, 20, {"weights": "int8", "dtype": "fp16", "group_size": 16}),
    ("sm70", VOLTA, 9, {"weights": "int4_min", "dtype": "fp16", "group_size": 64}),
    ("sm70", VOLTA, 9, {"weights": "int8_min", "dtype": "fp16", "gated": True}),
)


@NO_COMPILER
@pytest.mark.parametrize(("arch", "config", "tokens", "fields"), RUNS, ids=lambda x: x if isinstance(x, str) else "")
def test_products_are_the_references(
    arch: str, config: Config, tokens: int, fields: dict[str, Any], tmp_path: Path
) -> None:
    target = Target.of(ARCHES[arch])
    problem = Problem(**({"n": 128, "k": 192, "num_tokens": tokens} | fields))
    assert spec.why_invalid(problem, config, target) is None
    inputs = cases.inputs(cases.case_for(problem), "cpu")
    w4_on_cpu.run(KERNEL, problem, config, target, inputs, tmp_path)
    want, tolerance = reference.expected(problem, inputs)["out"].float(), reference.tolerance(problem)
    torch.testing.assert_close(inputs["out"].float(), want, atol=tolerance.atol, rtol=tolerance.rtol)


@pytest.mark.parametrize("weights", [w for w in WEIGHTS if w != "int4"])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_backends_multiply_it(weights: str, gated: bool, dtype: torch.dtype) -> None:
    """Scales in fp16 whatever the activations are; in fp32 both give the same but for the order of sums."""
    packed, scales = _pieces(weights, 96 if not gated else 128, 192)
    parts = (scales,) if scales.ndim == 2 else scales.unbind(-1)
    view = grouped_weights(packed, *parts, name="gate_up", gated=gated)
    assert (view.format.name, view.format.group_size) == (weights, 32)
    assert (view.out_features, view.in_features) == (len(packed), 192)
    x = Draw(1, "cpu").normal(5, 192, dtype="fp32").to(dtype)
    executor = Reference()
    kernels, oracle = KernelOps(executor, dtype), TorchOps(torch.device("cpu"), dtype)
    got, want = ((ops.gated if gated else ops.linear)(x, ops.prepare(view)) for ops in (kernels, oracle))
    assert got.dtype == want.dtype == dtype
    tolerance = 1e-4 if dtype == torch.float32 else 2.0**-5
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)
    if dtype == torch.float32 and not gated:
        torch.testing.assert_close(want, x @ dequantize(packed, scales).T, atol=1e-5, rtol=1e-5)


def test_a_scale_in_fp16_is_not_rounded_to_bf16() -> None:
    """Of the reference: a weight of 1 + 1 / 512 in fp16 is 1 in bf16."""
    codes, scale = torch.full((32, 32), 1, dtype=torch.int8), torch.full((32, 1), 1 + 2.0**-9, dtype=torch.float16)
    packed, scales = pack(codes, scale)
    x = torch.zeros(1, 32, dtype=TORCH_DTYPE["bf16"])
    x[0, 0] = 1
    given = {"x": x, "w_packed": packed, "scales": scales}
    out = reference.expected(Problem(32, 32, 32, "bf16", 1, weights="int8", fp16_scales=True), given)["out"]
    assert float(out[0, 0]) == 1 + 2.0**-9
