"""w4a16_gemm without a GPU: the repack against compressed-tensors' definition, refusals, and the cutting of work."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch

from kerngen.arch import ARCHES, Arch, Target, find_arch, find_device
from kerngen.compiler.compile import compile_cubin
from kerngen.compiler.render import render
from kerngen.errors import ProblemError
from kerngen.templates import find_kernel
from kerngen.templates.common.w4 import limits, measured, tiling
from kerngen.templates.common.w4.pack import dequantize, interleave, pack, separate, unpack
from kerngen.templates.w4a16_gemm import cases, reference, spec
from kerngen.templates.w4a16_gemm.spec import Config, Problem

KERNEL = find_kernel("w4a16_gemm")


def _random(n: int, k: int, group: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    words = torch.randint(-(2**31), 2**31, (n, k // 8), generator=g).to(torch.int32)
    return words, torch.rand(n, k // group, generator=g).to(torch.bfloat16)


def test_dequantize_reads_compressed_tensors_nibbles() -> None:
    # The worked example of the format: nibbles of columns 0..7 are 8 9 7 15 0 8 8 8.
    words = torch.tensor([[0x8880F798 - (1 << 32)] * 4], dtype=torch.int32)
    got = dequantize(words, torch.tensor([[0.5]], dtype=torch.bfloat16))
    assert got[0, :8].tolist() == [0.0, 0.5, -0.5, 3.5, -4.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(("n", "k", "group"), [(32, 32, 32), (96, 704, 64), (64, 2112, 32), (128, 384, 128)])
def test_unpack_is_the_exact_inverse_of_pack(n: int, k: int, group: int) -> None:
    words, scale = _random(n, k, group)
    w_packed, scales = pack(words, scale)
    assert w_packed.shape == (n // 32, k // 32, 32, 4)
    assert scales.shape == (n // 32, k // group, 32)
    again, scale_again = unpack(w_packed, scales)
    assert torch.equal(again, words)
    assert torch.equal(scale_again, scale)


def test_packed_words_hold_the_fragments_that_the_kernel_reads() -> None:
    """Lane 4 g + t, word 2 s + j, nibble i (low half) and i + 4 (high half) of the pair that is fragment i."""
    n, k = 64, 96
    words, scale = _random(n, k, 32, seed=3)
    q = dequantize(words, torch.ones_like(scale))  # exact integers
    w_packed, _ = pack(words, scale)
    for strip, tile, lane, word, nibble in [(0, 0, 0, 0, 0), (1, 2, 31, 3, 7), (0, 1, 13, 2, 5), (1, 0, 22, 1, 3)]:
        value = (int(w_packed[strip, tile, lane, word]) >> (4 * nibble)) & 15
        g, t, s, j, i, high = lane // 4, lane % 4, word // 2, word % 2, nibble % 4, nibble // 4
        row, column = strip * 32 + 4 * g + 2 * s + i % 2, tile * 32 + 16 * j + 2 * t + 8 * (i // 2) + high
        assert value - 8 == q[row, column]


def test_interleaved_rows_are_pairs_of_gate_and_up() -> None:
    words, scale = _random(64, 64, 32, seed=5)
    mixed, mixed_scale = interleave(words, scale)
    rows = [r for pair in range(16) for r in (2 * pair, 2 * pair + 1, 32 + 2 * pair, 33 + 2 * pair)]
    assert torch.equal(mixed, words[rows])
    assert torch.equal(separate(mixed_scale), scale)
    with pytest.raises(ProblemError, match="multiple of 32"):
        interleave(words[:48], scale[:48])


def test_strips_pack_independently() -> None:
    words, scale = _random(96, 64, 32)
    whole = pack(words, scale)[0]
    strips = [pack(words[i : i + 32], scale[i : i + 32])[0] for i in (0, 32, 64)]
    assert torch.equal(whole, torch.cat(strips))


def test_pack_refuses_what_it_cannot_tile() -> None:
    words, scale = _random(40, 64, 32)
    with pytest.raises(ProblemError, match="40 x 64"):
        pack(words, scale)


def test_reference_is_the_dense_product() -> None:
    case = cases.case_for(Problem(64, 128, 64, "bf16", 3))
    inputs = cases.inputs(case, "cpu")
    words, scale = unpack(inputs["w_packed"], inputs["scales"])
    want = inputs["x"].double() @ dequantize(words, scale).double().T
    got = reference.expected(case.problem, inputs)["out"]
    assert torch.allclose(got.double(), want, atol=1e-4)
    assert inputs["out"].isnan().all()
    assert 0.3 < float(want.std()) < 3, "the tolerance assumes outputs near 1"


@pytest.mark.parametrize(("arch", "config", "needles"), [
    ("sm86", Config(128, 256, 128, 64, 2, 1, 4, 0), ("101,376",)),
    ("sm90", Config(64, 256, 256, 32, 1, 1, 6, 1), ("232,448",)),
    ("sm90", Config(256, 64, 64, 64, 1, 1, 2, 0), ("568 registers", "255")),
    ("sm70", Config(8, 64, 64, 32, 1, 1, 2, 1), ("warp_n=32", "64")),
    ("sm75", Config(8, 64, 64, 32, 1, 1, 4, 1), ("num_stages=4", "2")),
    ("sm80", Config(8, 64, 32, 32, 1, 2, 2, 1), ("block_k=32", "warps_k=2")),
    ("sm90", Config(64, 256, 64, 32, 2, 1, 2, 2), ("16 warps x 2", "registers")),
])  # fmt: skip
def test_refusals_hold_the_numbers(arch: str, config: Config, needles: tuple[str, ...]) -> None:
    why = spec.why_invalid(Problem(5376, 21504, 32, "fp16", 64), config, Target.of(find_arch(arch)))
    assert why is not None
    for needle in needles:
        assert needle in why


@pytest.mark.parametrize(
    ("change", "says"),
    [({"l2_prefetch_stages": 4}, "l2_prefetch_stages=4: body=mma takes 0"),
     ({"l2_prefetch_stages": -1, "body": "wgmma_ws"}, "l2_prefetch_stages=-1"),
     ({"blocks_per_sm": 2, "cluster": 2, "body": "wgmma_ws"}, "no cluster"),
     ({"blocks_per_sm": 2, "block_n": 256, "body": "wgmma_ws"}, "128 rows")],
)  # fmt: skip
def test_what_warpgroups_cannot_do_is_named(change: dict[str, Any], says: str) -> None:
    target = Target.of(find_arch("sm90"))
    config = dataclasses.replace(Config(32, 128, 128, 16 if "body" in change else 32, 1, 1, 4, 1), **change)
    assert says in str(spec.why_invalid(Problem(256, 512, 32, "bf16", 32), config, target))


def test_what_is_row_invariant_shares_no_tile_where_tokens_fill_several() -> None:
    target = Target.of(find_arch("sm90"))
    shared = Config(128, 256, 128, 32, 1, 1, 4, 1, body="wgmma")
    free = Problem(5376, 8192, 32, "bf16", 512)
    bound = dataclasses.replace(free, row_invariant=True)
    assert spec.why_invalid(free, shared, target) is None
    why = spec.why_invalid(bound, shared, target)
    assert "512 tokens" in why
    assert "block_m=128" in why
    assert spec.why_invalid(dataclasses.replace(bound, num_tokens=128), shared, target) is None
    assert spec.why_invalid(bound, dataclasses.replace(shared, blocks_per_sm=0), target) is None
    assert any(c.blocks_per_sm for c in KERNEL.candidates(free, target)), "else the next line says nothing"
    assert not any(c.blocks_per_sm for c in KERNEL.candidates(bound, target))


@pytest.mark.parametrize("block_m", [8, 16, 128])
def test_wgmma_scales_weights_and_takes_no_tile_that_scales_products(block_m: int) -> None:
    """Tiles of 8 tokens scale the products of mma.sync; with wgmma an H200 gave unscaled sums."""
    config = Config(block_m, 128, 64, 32, 1, 1, 4, 0, body="wgmma")
    why = spec.why_invalid(Problem(5376, 8192, 32, "bf16", 8), config, Target.of(find_arch("sm90")))
    assert (why is not None and "block_m=8" in why) if block_m == 8 else why is None


@pytest.mark.parametrize(("units", "blocks"), [(1, 1), (7, 3), (132, 132), (28224, 264), (1000, 999)])
def test_pieces_cover_the_units_once_and_every_unit_knows_its_block(units: int, blocks: int) -> None:
    """The kernel's Pieces, restated; W4Stream's runs begin as these do."""
    each, longer = divmod(units, blocks)
    begin = [b * each + min(b, longer) for b in range(blocks + 1)]
    head = longer * (each + 1)
    assert begin[0] == 0
    assert begin[-1] == units
    sizes = [e - b for b, e in itertools.pairwise(begin)]
    assert max(sizes) - min(sizes) <= 1
    for b in range(blocks):
        for unit in range(begin[b], begin[b + 1]):
            assert (unit // (each + 1) if unit < head else longer + (unit - head) // each) == b


def test_tiles_that_blocks_share_have_a_counter_each_and_sums_of_their_own() -> None:
    target = Target.of(find_arch("sm90"))
    problem = Problem(1536, 12288, 32, "bf16", 5)
    config = next(c for c in KERNEL.candidates(problem, target) if c.body == "gemv" and c.split_k > 1)
    tiles = 1536 // config.block_n
    (launch,) = spec.launches(problem, config, target)
    assert launch.grid == (tiles * config.split_k, 1, 1)
    sums = tiles * config.split_k * 8 * config.block_n * 4
    assert 4 * tiles <= spec.workspace_bytes(problem, config, target) - sums < 4 * tiles + 16
    assert spec.workspace_bytes(problem, dataclasses.replace(config, split_k=1), target) == 0


@pytest.mark.parametrize("arch", ["sm70", "sm80", "sm90"])
def test_blocks_that_share_tiles_are_started_together_and_post_a_tile_each(arch: str) -> None:
    """Who adds a tile up waits for the others, so that all must be resident."""
    target = Target.of(find_arch(arch))
    few = Problem(256, 384, 32, "fp16", 1)
    config = Config(block_m=8, blocks_per_sm=2, warp_n=64, num_stages=2)
    assert spec.why_invalid(few, config, target) is None
    for problem in (few, dataclasses.replace(few, num_tokens=200)):
        blocks = spec.num_blocks(problem, config, target)
        assert blocks <= 2 * target.device.num_sms
        assert spec.workspace_bytes(problem, config, target) == blocks * config.block_m * config.block_n * 4
        (launch,) = spec.launches(problem, config, target)
        assert launch.cooperative
        alone = dataclasses.replace(config, blocks_per_sm=0)
        assert not spec.launches(problem, alone, target)[0].cooperative
        assert spec.workspace_bytes(problem, alone, target) == 0


@pytest.mark.parametrize(("config", "says"), [
    (Config(8, 128, 384, 32, 1, 2, 3, 2), "block_k=384: body=mma takes 32 or 64 or 128 or 256 or 512"),
    (Config(8, 96, 256, 32, 1, 2, 4, 3), "block_n=96: body=mma takes 32 or 64 or 128 or 256"),
    (Config(8, 32, 256, 64, 1, 1, 3, 2), "block_n=32 block_k=256 is not made of warps of warp_n=64 rows"),
    (Config(8, 128, 256, 32, 1, 1, 3, 2, prefetch_stages=2), None),
    (Config(8, 128, 256, 32, 1, 1, 3, 2, prefetch_stages=3), "fewer than num_stages=3"),
    (Config(8, 64, 512, 64, 1, 2, 1, 0, body="gemv", prefetch_stages=1), "prefetch_stages=1: fewer than num_stages=1"),
    (Config(16, 128, 256, 16, 1, 1, 3, 2, body="wgmma_ws", prefetch_stages=2), None),
    (
        Config(16, 128, 256, 16, 1, 1, 3, 2, body="wgmma_ws", prefetch_stages=3),
        "prefetch_stages=3: fewer than num_stages=3",
    ),
    (Config(4, 32, 1024, 32, 1, 8, 3, 1, split_k=8, body="tma_warp", prefetch_stages=3), "fewer than num_stages=3"),
    (Config(4, 32, 1024, 32, 1, 8, 3, 1, split_k=8, body="tma_warp", prefetch_stages=2), None),
])  # fmt: skip
def test_what_a_body_does_not_take_is_refused(config: Config, says: str | None) -> None:
    why = spec.why_invalid(Problem(5376, 21504, 32, "bf16", 4), config, Target.of(find_arch("sm90")))
    assert why is None if says is None else says in str(why)


@pytest.mark.parametrize("body", ["mma", "wgmma", "wgmma_ws"])
def test_a_stage_has_whole_groups_or_lies_in_one(body: str) -> None:
    """And where threads copy it, each the chunks at its own place of each row, they copy whole rows or shares of one:
    of 384 chunks by 256 threads one would find others. No tiling is refused for that, since the spaces have none.
    """
    space = tiling.SPACES[body]
    for block_k, group_size in itertools.product(space["block_k"], tiling.GROUP_SIZES):
        assert block_k % group_size == 0 or group_size % block_k == 0
    if body != "wgmma_ws":
        shares = ("block_m", "block_n", "block_k", "warp_n", "warps_m", "warps_k")
        assert all(value.bit_count() == 1 for name in shares for value in space[name])


# The quantised matrices of the models, from the shortest rows to the longest and from few strips to many.
MATRICES = (
    (1536, 2048), (1536, 6144), (1536, 12288), (2048, 1536), (2048, 2560), (2560, 2048), (2560, 4096), (2560, 10240),
    (2816, 2112), (2816, 4096), (2816, 8192), (3072, 2560), (3840, 4096), (3840, 15360), (4096, 2560), (4224, 2816),
    (5376, 8192), (5376, 16384), (5376, 21504), (8192, 2816), (8192, 3840), (10752, 2560), (12288, 1536),
    (16384, 5376), (20480, 2560), (24576, 1536), (30720, 3840), (43008, 5376),
)  # fmt: skip


def _body(config: Config, target: Target) -> str:
    return KERNEL.body(config, target.arch).template


@pytest.mark.parametrize("board", ["V100", "A100", "H100", "H200", "RTX5090"])
def test_a_default_reads_w_once_for_few_tokens_and_keeps_memory_busy(board: str) -> None:
    target = Target.of(find_device(board))
    sms, arch = target.device.num_sms, target.arch
    need = 0.8 * target.device.mem_gbps * 1e3 / sms  # bytes an SM, of 0.8 us at its share of the memory's rate
    for (n, k), group, tokens in itertools.product(MATRICES, (32, 128), (1, 2, 4, 5, 8, 9, 16, 32, 64, 512, 2048)):
        if k % group:
            continue
        problem = Problem(n, k, group, arch.dtype, tokens)
        config = KERNEL.default_config(problem, target)
        assert spec.why_invalid(problem, config, target) is None
        (launch,) = spec.launches(problem, config, target)
        blocks = math.prod(launch.grid)
        assert config.block_m >= min(tokens, 8), (problem, config)
        assert 2 * blocks >= min(sms, n // 32), (problem, config)
        if tokens <= 8 and _body(config, target) != "gemv.cu.jinja":  # which loads into registers
            stages = config.prefetch_stages or config.num_stages - (_body(config, target) == "kernel.cu.jinja")
            under_way = stages * config.weight_bytes(problem.packing) * max(1, config.blocks_per_sm)
            assert under_way >= 0.8 * need, (problem, config)
        if launch.cooperative:  # its blocks wait for each other
            smem = KERNEL.smem_bytes(problem, config, target) + arch.reserved_smem_bytes
            assert blocks <= min(arch.smem_per_sm // smem, 2048 // math.prod(launch.block)) * sms, (problem, config)


@pytest.mark.parametrize("board", ["V100", "A100", "H100", "H200", "B200", "RTX5090"])
def test_candidates_are_few_valid_and_of_several_kinds(board: str) -> None:
    """Matrices of models, and the halves and quarters of their rows that ranks of a model have."""
    target = Target.of(find_device(board))
    for (n, k), ranks, tokens in itertools.product(MATRICES, (1, 2, 4), (1, 2, 4, 6, 8, 16, 48, 100, 500, 4000)):
        if n % (32 * ranks):
            continue
        problem = Problem(n // ranks, k, 32, target.arch.dtype, tokens)
        found = spec.candidates(problem, target)
        assert 1 <= len(found) <= 12, problem
        assert all(spec.why_invalid(problem, c, target) is None for c in found), problem
        if target.arch.has_wgmma:
            assert len(set(found)) >= 3, problem
            kinds = {c.body for c in found} if tokens <= 8 else {(c.block_m, c.block_n, c.blocks_per_sm) for c in found}
            assert len(kinds) >= 2, problem


def _streams(problem: Problem, target: Target) -> list[Config]:
    """Configurations of the body with bulk copies: one round a unit and several, whole shares and ragged ones."""
    tokens = 1 if problem.num_tokens == 1 else 4
    ways = [(1, 8, 3, 1, 0), (2, 4, 2, 3, 1), (3, 4, 4, 2, 2)]
    made = [
        Config(tokens, 32, problem.group_size * slot * warps, 32, 1, warps, stages, 1, "tma_warp", split_k=split,
               prefetch_stages=prefetch_stages)
        for slot, warps, stages, split, prefetch_stages in ways
    ]  # fmt: skip
    shared = [(1, 8, 3, 1, 0), (1, 8, 4, 3, 1), (2, 8, 4, 1, 2)]
    made += [
        Config(tokens, 32, problem.group_size * slot * warps, 32, 1, warps, stages, 1, body="tma_block", split_k=split,
               prefetch_stages=prefetch_stages, cap_inflight=prefetch_stages == 1)
        for slot, warps, stages, split, prefetch_stages in shared
    ]  # fmt: skip
    return [c for c in made if spec.why_invalid(problem, c, target) is None]


@pytest.mark.parametrize("arch", [a for a in ARCHES.values() if a.has_tma], ids=str)
def test_the_body_with_bulk_copies_compiles_and_keeps_in_registers(arch: Arch) -> None:
    """No test case is large enough to get it by default. Its shared memory is counted in the source, too."""
    target = Target.of(arch)
    few, long = Problem(256, 704, 64, "fp16", 2), Problem(64, 8192, 32, "bf16", 4, True)
    for problem in (Problem(256, 1536, 64, "bf16", 1, True), few, long):
        configs = _streams(problem, target)
        if problem is long:  # whose digits fill the registers
            one = Config(4, 32, 8 * 32 * 4, 32, 1, 8, 2, 1, split_k=2, body="tma_warp")
            configs = [one, dataclasses.replace(one, body="tma_block")]
        assert {c.body for c in configs} == {"tma_warp", "tma_block"} or problem.num_tokens == 1
        for config in configs:
            cubin = compile_cubin(render(KERNEL, problem, config, target), arch)
            (resources,) = cubin.entries.values()
            assert resources.spill_store_bytes <= spec.MAX_SPILL_BYTES, config


@pytest.mark.parametrize(("n", "k"), [(8192, 21504), (8192, 16384), (28672, 12288), (8192, 8192), (43008, 5376)])
@pytest.mark.parametrize("group_size", [32, 128])
def test_whole_strips_by_a_shared_ring_keep_in_registers(n: int, k: int, group_size: int) -> None:
    """Where a warp has too many tiles of a row, strips are cut as they are where no ring is shared; and what is on its
    way is counted in bytes, whatever a slot takes.
    """
    problem = Problem(n, k, group_size, "bf16", 4)
    configs = KERNEL.candidates(problem, Target.of(find_device("H200")))
    pipelines = [c for c in configs if c.body == "tma_block"]
    assert bool(pipelines) == (k < 8192)
    for config in pipelines:
        assert limits.stream_tiles(config, k, group_size) <= limits.MOST_QUADS
        on_their_way = config.prefetch_stages * config.weight_bytes(problem.packing)
        assert 0.75 * measured.CTA_PREFETCH_BYTES[1] < on_their_way < 1.25 * measured.CTA_PREFETCH_BYTES[1]


@pytest.mark.parametrize(("change", "needle"), [
    ({"block_m": 8}, "block_m=8"), ({"num_stages": 1}, "num_stages=1"), ({"block_k": 96}, "block_k=96"),
    ({"blocks_per_sm": 4}, "blocks_per_sm=4: body=tma_warp takes 1"), ({"block_k": 8 * 32 * 9}, "a stage takes 9"),
    ({"num_stages": 9, "block_k": 8 * 32 * 6}, "shared memory"),
    ({"cap_inflight": True, "prefetch_stages": 1}, "cap_inflight=True: body=tma_warp takes False"),
    ({"body": "tma_block", "cap_inflight": True}, "with prefetch_stages=0"),
    ({"body": "tma_block", "blocks_per_sm": 2}, "blocks_per_sm=2: body=tma_block takes 1"),
    ({"body": "tma_block", "block_m": 1}, "block_m=1"),
    ({"body": "tma_block", "warps_k": 16, "block_k": 16 * 32}, "warps_k=16: body=tma_block takes 8"),
])  # fmt: skip
def test_streams_that_cannot_be_are_refused(change: dict[str, Any], needle: str) -> None:
    problem, target = Problem(4096, 1536, 32, "bf16", 1), Target.of(find_arch("sm90"))
    good = Config(4, 32, 8 * 32 * 2, 32, 1, 8, 3, 1, body="tma_warp")
    assert spec.why_invalid(problem, good, target) is None
    why = spec.why_invalid(problem, dataclasses.replace(good, **change), target)
    assert needle in why
    assert spec.why_invalid(dataclasses.replace(problem, num_tokens=5), good, target) is not None
    assert "has no tma" in str(spec.why_invalid(problem, good, Target.of(find_arch("sm80"))))
