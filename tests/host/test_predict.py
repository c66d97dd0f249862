"""The cost model: exact where it can be, monotone where it must be."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kerngen.arch import ARCHES, DEVICES, Target, default_device, find_arch
from kerngen.compiler.compile import Resources
from kerngen.cost.predict import CONSTANTS, MODEL, launch_us, occupancy, predict
from kerngen.templates import find_kernel
from kerngen.templates.kernel import Launch, Traffic
from kerngen.templates.moe_w4a16.traffic import expected
from kerngen.tuning.plan import lower_bound_us

EMBED = find_kernel("embed")
GEMM = find_kernel("w4a16_gemm")


@pytest.mark.parametrize(("arch", "threads", "registers", "smem_bytes", "blocks", "limit"), [
    # By hand from the tables of the CUDA programming guide; 256 registers a warp, 4 sub-partitions.
    ("sm70", 256, 32, 0, 8, "warps"),
    ("sm70", 256, 33, 0, 6, "registers"),  # 33 are given as 40: 16384 / 1280 = 12 warps a sub-partition
    ("sm70", 128, 255, 0, 2, "registers"),
    ("sm70", 32, 16, 0, 32, "blocks"),
    ("sm70", 128, 32, 48 * 1024, 2, "shared memory"),
    ("sm75", 1024, 64, 0, 1, "warps"),
    ("sm80", 128, 32, 82 * 1024, 1, "shared memory"),  # 82 KB + 1 KB of the system's, twice, is over 164
    ("sm90", 384, 168, 0, 1, "registers"),
    ("sm90", 96, 128, 0, 5, "registers"),  # 16 warps, 3 a block
    ("sm90", 32, 128, 0, 16, "registers"),  # blocks of one warp are not rounded up to four
])  # fmt: skip
def test_occupancy(arch: str, threads: int, registers: int, smem_bytes: int, blocks: int, limit: str) -> None:
    found = occupancy(find_arch(arch), threads, registers, smem_bytes)
    assert (found.blocks_per_sm, found.limit) == (blocks, limit)


def test_a_block_that_does_not_fit_has_no_occupancy() -> None:
    assert occupancy(find_arch("sm70"), 1024, 128, 0).blocks_per_sm == 0


def _embed(num_tokens: int, threads: int = 128, vecs: int = 2) -> tuple[object, object]:
    problem = EMBED.problem_type(dtype="fp16", residual_dtype="fp32", num_tokens=num_tokens)
    return problem, EMBED.config_type(threads, vecs)


def _resources(registers: int = 32, spill: int = 0) -> dict[str, Resources]:
    return {"embed": Resources(registers, spill, spill, 0, 0)}


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(1, 8192), threads=st.sampled_from([64, 128, 256, 512]), vecs=st.sampled_from([1, 2, 4]),
    registers=st.integers(16, 128), arch=st.sampled_from(list(ARCHES)),
)  # fmt: skip
def test_worse_means_are_never_faster(tokens: int, threads: int, vecs: int, registers: int, arch: str) -> None:
    a = find_arch(arch)
    device = default_device(a)
    problem, config = _embed(tokens, threads, vecs)

    def us(registers: int = registers, spill: int = 0, device: object = device) -> float:
        return predict(EMBED, problem, config, Target.of(device), _resources(registers, spill)).latency_us  # type: ignore[arg-type]

    assert us(registers=min(registers + 32, 255)) >= us()
    assert us(spill=64) > us()
    assert us(device=replace(device, mem_gbps=device.mem_gbps / 2)) >= us()
    assert us(device=replace(device, clock_mhz=device.clock_mhz // 2)) >= us()
    assert us() >= lower_bound_us(EMBED, problem, config, Target.of(device))


def test_more_work_takes_longer_and_memory_is_the_limit() -> None:
    a = find_arch("sm70")
    times = [predict(EMBED, *_embed(t), Target.of(a), _resources()).latency_us for t in (1, 64, 512, 4096, 32768)]
    assert times == sorted(times)
    large = predict(EMBED, *_embed(32768), Target.of(a), _resources())
    assert large.bound == "memory"
    assert 0.8 * 900 < large.gbps < 900, "a long copy should come close to the V100's 900 GB/s"


def test_large_gemm_is_bound_by_the_tensor_cores() -> None:
    a = find_arch("sm80")
    problem = GEMM.problem_type(n=16384, k=5376, num_tokens=4096)
    config = GEMM.default_config(problem, Target.of(a))
    found = predict(GEMM, problem, config, Target.of(a))
    assert found.bound == "tensor"
    assert 150 < found.tflops < 312, "an A100 has 312 TFLOP/s"


@pytest.mark.parametrize("device", list(DEVICES))
def test_every_profile_predicts_and_repeats(device: str) -> None:
    d = DEVICES[device]
    problem, config = _embed(64)
    first, second = (predict(EMBED, problem, config, Target.of(d), _resources()) for _ in range(2))
    assert first == second
    assert first.model == MODEL
    assert 1.0 < first.latency_us < 20.0
    assert first.bound in first.explain()


H200 = Target.of(find_arch("sm90"))
GRID = Launch("made", (264, 1, 1), (128, 1, 1), 0, pdl=True)
MADE = Traffic(10_000_000, 1_000_000_000, smem_bytes=10_000_000, cuda_ops=10_000_000, bytes_in_flight=8192)


def _made_us(t: Traffic, launch: Launch = GRID, given: Resources | None = None, *, follows: bool = False) -> float:
    return launch_us(launch, t, H200, given, 64, follows, CONSTANTS)[0]


@pytest.mark.parametrize("more", [
    {"dram_bytes": 20_000_000}, {"flops": 50_000_000_000}, {"l2_bytes": 200_000_000}, {"smem_bytes": 500_000_000},
    {"cuda_ops": 10**9}, {"bytes_in_flight": 1024}, {"clocks": 20_000}, {"joins": 4}, {"waits": 5},
    {"units": 264 * 3},
], ids=lambda m: next(iter(m)))  # fmt: skip
def test_whatever_there_is_more_of_costs(more: dict[str, int]) -> None:
    more = more | {"cuda_ops": MADE.cuda_ops * 3} if "units" in more else more
    assert _made_us(replace(MADE, **more)) > _made_us(MADE)  # type: ignore[arg-type]


def test_copies_go_on_while_warps_compute() -> None:
    """Loads to registers come in order; asynchronous copies overlap with what is made of the ones before."""
    slow = replace(MADE, cuda_ops=3 * 10**7, bytes_in_flight=1024)
    assert _made_us(replace(slow, copies=True)) < 0.95 * _made_us(slow)


def test_wgmma_is_faster_where_products_bind() -> None:
    many = replace(MADE, flops=10**12)
    assert 1.1 < _made_us(many) / _made_us(replace(many, tensor="wgmma")) < 1 / H200.arch.mma_sync_share


def test_a_block_for_each_piece_or_blocks_that_go_through_them() -> None:
    """336 pieces for 264 blocks are two rounds for some: as long as 528 pieces take. The rest waits."""
    some, all_of_them = (
        replace(MADE, units=n, clocks=50_000, dram_bytes=n, bytes_in_flight=1, copies=True) for n in (336, 528)
    )
    assert _made_us(some) == pytest.approx(_made_us(all_of_them), rel=0.02)
    assert _made_us(replace(some, units=264)) < 0.6 * _made_us(some)


def test_blocks_that_follow_each_other_pay_for_it_where_nobody_is_beside_them() -> None:
    heavy = Resources(250, 0, 0, 0, 0)
    one_by_one = Launch("made", (264, 1, 1), (256, 1, 1), 0, pdl=True)
    waiting = replace(MADE, waits=20)
    alone = _made_us(waiting, one_by_one, given=heavy) - _made_us(MADE, one_by_one, given=heavy)
    beside = _made_us(waiting, one_by_one) - _made_us(MADE, one_by_one)
    assert alone > 1.5 * beside


def test_a_small_spill_is_a_small_loss() -> None:
    """A thread that spills a register is not twice as slow for it; one that spills all of them nearly is."""

    def spilling(num_bytes: int) -> float:
        return _made_us(MADE, given=Resources(128, num_bytes // 2, num_bytes // 2, 0, 0))

    none, little, much = (spilling(n) for n in (0, 16, 512))
    assert none < little < 1.05 * none
    assert 1.3 * none < much < 2 * none
    assert spilling(4096) == much


def test_one_small_block_is_no_grid() -> None:
    """A launch of a block takes less than one that all SMs take part in, and no launch takes nothing."""
    one = Launch("made", (1, 1, 1), (128, 1, 1), 0, pdl=True)
    little = Traffic(1000, 0, bytes_in_flight=1000)
    assert 1.0 < _made_us(little, one) < _made_us(replace(little, units=264)) - 0.5
    gap = CONSTANTS.gap_clocks / H200.device.clock_mhz
    assert _made_us(little, replace(one, pdl=False)) == pytest.approx(_made_us(little, one) + gap)


def test_a_launch_that_reads_what_was_just_made_begins_with_nothing() -> None:
    assert _made_us(MADE, follows=True) == pytest.approx(
        _made_us(MADE) + CONSTANTS.after_clocks / H200.device.clock_mhz
    )


def test_how_many_experts_tokens_choose() -> None:
    experts, tiles = expected(1, 8, 128, 8)
    assert (experts, tiles) == (pytest.approx(8), pytest.approx(8))
    experts, tiles = expected(8, 8, 128, 8)
    assert experts == pytest.approx(128 * (1 - (15 / 16) ** 8))
    assert tiles == pytest.approx(experts), "no expert has more than eight tokens"
    experts, tiles = expected(2048, 8, 128, 64)
    assert experts == pytest.approx(128)
    assert 2048 * 8 / 64 < tiles < 2048 * 8 / 64 + 128
    assert expected(10, 4, 4, 8) == (4, 8), "every token chooses all"


MOE = find_kernel("moe_w4a16")


def test_the_experts_weights_are_what_the_products_read() -> None:
    """Not what the plan does, whose one block would take milliseconds for them."""
    problem = MOE.problem_type(num_experts=128, top_k=8, hidden=2816, inner=704, num_tokens=8)
    found = predict(MOE, problem, MOE.default_config(problem, H200), H200, registers=96)
    plan, gate_up, down = found.launches
    assert plan.latency_us < 5
    assert 20 < down.latency_us < gate_up.latency_us < 60


def test_what_blocks_share_costs() -> None:
    """Of one cut of the same product: a tile to each block, and equal shares that meet in the workspace."""
    problem = GEMM.problem_type(n=16384, k=5376, num_tokens=32)
    config = replace(GEMM.default_config(problem, H200), block_n=128, blocks_per_sm=1)
    (shared,) = GEMM.traffic(problem, config, H200) or ()
    (alone,) = GEMM.traffic(problem, replace(config, blocks_per_sm=0), H200) or ()
    assert shared.waits > alone.waits
    assert (shared.l2_bytes or 0) > (alone.l2_bytes or 0)
    (split,) = GEMM.traffic(problem, replace(config, body="mma", warps_k=2), H200) or ()
    (whole,) = GEMM.traffic(problem, replace(config, body="mma"), H200) or ()
    assert split.joins > whole.joins == 0
    assert split.join_bytes > whole.join_bytes == 0
