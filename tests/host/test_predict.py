"""The cost model: exact where it can be, monotone where it must be."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kerngen.arch import ARCHES, DEVICES, Target, default_device, find_arch
from kerngen.compile import Resources
from kerngen.predict import MODEL, occupancy, predict
from kerngen.templates import find_kernel
from kerngen.tuning.plan import lower_bound_us

EMBED = find_kernel("embed")
GEMM = find_kernel("w4a16_gemm")


@pytest.mark.parametrize(
    ("arch", "threads", "registers", "smem_bytes", "blocks", "limit"),
    [
        # By hand from the tables of the CUDA programming guide; 256 registers a warp, 4 sub-partitions.
        ("sm70", 256, 32, 0, 8, "warps"),
        ("sm70", 256, 33, 0, 6, "registers"),  # 33 are given as 40: 16384 / 1280 = 12 warps a sub-partition
        ("sm70", 128, 255, 0, 2, "registers"),
        ("sm70", 32, 16, 0, 32, "blocks"),
        ("sm70", 128, 32, 48 * 1024, 2, "shared memory"),
        ("sm75", 1024, 64, 0, 1, "warps"),
        ("sm80", 128, 32, 82 * 1024, 1, "shared memory"),  # 82 KB + 1 KB of the system's, twice, is over 164
        ("sm90", 384, 168, 0, 1, "registers"),
        ("sm90", 96, 128, 0, 4, "registers"),  # 3 warps take the room of 4
    ],
)
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
