"""dense_gemv without a GPU: how lanes share a product, refusals, defaults, and what the bits of a result depend on."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from kerngen.arch import ARCHES, Arch, Target, find_arch
from kerngen.compiler.compile import compile_ptx
from kerngen.compiler.render import render
from kerngen.templates import find_kernel
from kerngen.templates.dense_gemv import cases, reference, spec
from kerngen.templates.dense_gemv.spec import Config, Problem

KERNEL = find_kernel("dense_gemv")
EACH_ARCH = pytest.mark.parametrize("arch", ARCHES.values(), ids=str)
# Head, router, per-layer matrices of the E sizes, drafters' projections, and the smallest there is.
SHAPES = (
    (262144, 5376), (262144, 1536), (128, 2816), (256, 1536), (256, 2560), (1536, 256), (8960, 1536), (10752, 2560),
    (512, 512), (21504, 512), (1024, 10752), (64, 21504), (8, 8),
)  # fmt: skip


def _mma_row(lane: int) -> int:
    return lane % 4 + lane // 16 * 4


def _lanes(volta: bool) -> list[tuple[list[int], list[int], int, int, int]]:
    """DenseLane restated: rows and chunks of the two loads, token, out_row, out_token."""
    found = []
    for lane in range(32):
        m = _mma_row(lane)
        if volta:
            rows = [lane // 4 % 2 * 8 + (m & 4) + (m & 1) * 2 + (m >> 1 & 1)] * 2
            chunks = [lane // 8 % 2, lane // 8 % 2 + 2]
            out = lane // 4 % 2 * 8 + lane // 16 * 4 + (lane & 1) * 2, (lane & 2) + lane // 8 % 2 * 4
            found.append((rows, chunks, m, *out))
        else:
            out = lane // 4 * 2, lane % 4 * 2
            found.append(([lane // 4 * 2, lane // 4 * 2 + 1], [lane % 4] * 2, lane // 4, *out))
    return found


def _turing_and_newer(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Two m16n8k16 of what the lanes loaded, by PTX's fragment layout. w [16, 32], x [8, 32] -> [lane, 4]."""
    lanes = _lanes(volta=False)
    acc = torch.zeros(16, 8)
    for half in range(2):
        a, b = torch.zeros(16, 16), torch.zeros(16, 8)
        for lane, (rows, chunks, token, *_) in enumerate(lanes):
            g, t = lane // 4, lane % 4
            words = [w[rows[j], chunks[j] * 8 :][half * 4 : half * 4 + 4].view(2, 2) for j in range(2)]
            tokens = x[token, chunks[0] * 8 :][half * 4 : half * 4 + 4].view(2, 2)
            for part in range(2):
                columns = slice(2 * t + 8 * part, 2 * t + 8 * part + 2)
                a[g, columns], a[g + 8, columns], b[columns, g] = words[0][part], words[1][part], tokens[part]
        acc += a @ b
    return torch.stack([
        torch.stack([acc[g, 2 * t], acc[g, 2 * t + 1], acc[g + 8, 2 * t], acc[g + 8, 2 * t + 1]])
        for g, t in itertools.product(range(8), range(4))
    ])  # fmt: skip


def _volta(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Four m8n8k4 of each quad-pair, then the exchange of DenseLane.finish."""
    lanes = _lanes(volta=True)
    acc = torch.zeros(4, 8, 8)
    for j, part in itertools.product(range(2), range(2)):
        a, b = torch.zeros(4, 8, 4), torch.zeros(4, 4, 8)
        for lane, (rows, chunks, token, *_) in enumerate(lanes):
            quad, m = lane // 4 % 4, _mma_row(lane)
            columns = slice(chunks[j] * 8 + part * 4, chunks[j] * 8 + part * 4 + 4)
            a[quad, m], b[quad, :, m] = w[rows[j], columns], x[token, columns]
        acc += a @ b
    held = torch.stack([
        torch.stack([
            acc[lane // 4 % 4, (lane & 1) + (i & 2) + lane // 16 * 4, (lane & 2) + (i & 1) + (i & 4)] for i in range(8)
        ])
        for lane in range(32)
    ])  # fmt: skip
    upper = torch.tensor([bool(lane & 8) for lane in range(32)])[:, None]
    keep, send = torch.where(upper, held[:, 4:], held[:, :4]), torch.where(upper, held[:, :4], held[:, 4:])
    return keep + send[torch.arange(32) ^ 8]


@pytest.mark.parametrize("volta", [False, True])
def test_lanes_load_every_element_once_and_end_with_their_outputs(volta: bool) -> None:
    draw = torch.Generator().manual_seed(1)
    w, x = torch.randn(16, 32, generator=draw), torch.randn(8, 32, generator=draw)
    lanes = _lanes(volta)
    loaded = {(rows[j], chunks[j]) for rows, chunks, *_ in lanes for j in range(2)}
    assert len(loaded) == 16 * 4
    got = _volta(w, x) if volta else _turing_and_newer(w, x)
    want = w @ x.T
    for lane, (_, _, _, row, token) in enumerate(lanes):
        right = torch.stack([want[row, token], want[row, token + 1], want[row + 1, token], want[row + 1, token + 1]])
        torch.testing.assert_close(got[lane], right)


def test_reference_is_the_dense_product() -> None:
    case = cases.case_for(Problem(72, 136, "bf16", 5))
    inputs = cases.inputs(case, "cpu")
    want = inputs["x"].double() @ inputs["w"].double().T
    assert torch.allclose(reference.expected(case.problem, inputs)["out"].double(), want, atol=1e-5)
    assert 0.3 < float(want.std()) < 3, "the tolerance assumes outputs near 1"


@EACH_ARCH
def test_more_tokens_are_torchs(arch: Arch) -> None:
    why = spec.why_unsupported(Problem(64, 128, "fp16", 17), Target.of(arch))
    assert why == "num_tokens=17: at most 16; torch's dense product serves more"
    assert spec.why_unsupported(Problem(64, 128, "fp16", 16), Target.of(arch)) is None


@pytest.mark.parametrize(
    ("config", "needles"),
    [
        (Config(block_m=8), ("block_m=8", "num_tokens=9")),
        (Config(16, warps_n=8, warps_k=8), ("2048 threads", "1024")),
        (Config(16, warps_k=16, split_k=8, unroll=8), ("k=2816", "11 groups", "split_k=8")),
        (Config(16, split_k=2, persistent=True), ("split_k=2",)),
        (Config(16, row_tiles=2, unroll=8, blocks_per_sm=4), ("4 blocks an SM of 256 threads", "leave 64")),
        (Config(16, 1, 8, 2, 1, blocks_per_sm=8), ("about", "leave 16")),
        (Config(16, 2, 4, 4, 1, blocks_per_sm=1, persistent=True), ("65,536 B", "49,152")),
    ],
)
def test_refusals_hold_the_numbers(config: Config, needles: tuple[str, ...]) -> None:
    why = spec.why_invalid(Problem(1024, 2816, "bf16", 9), config, Target.of(find_arch("sm90")))
    assert why is not None
    for needle in needles:
        assert needle in why


@EACH_ARCH
def test_default_gives_the_same_bits_for_every_number_of_tokens(arch: Arch) -> None:
    """block_m alone may differ: the order of a row's sums must not."""
    target = Target.of(arch)
    for n, k in SHAPES:
        configs = {KERNEL.default_config(Problem(n, k, "fp16", m), target) for m in range(1, 17)}
        assert {c.block_m for c in configs} == {8, 16}
        assert len({dataclasses.replace(c, block_m=16) for c in configs}) == 1
        for m in (1, 16):
            problem = Problem(n, k, "fp16", m)
            config = KERNEL.default_config(problem, target)
            assert spec.why_invalid(problem, config, target) is None
            assert spec.launches(problem, config, target)[0].grid[0] >= 1


def test_workspace_does_not_depend_on_the_tokens() -> None:
    """One Function's workspace sees all M in turn: counters must lie where they were, and sums behind them."""
    target, config = Target.of(find_arch("sm90")), Config(16, split_k=4)
    sizes = {spec.workspace_bytes(Problem(136, 4104, "bf16", m), config, target) for m in range(1, 17)}
    assert sizes == {48 + 9 * 4 * 2 * 512}
    assert spec.constants(Problem(136, 4104), config, target.arch) == {"COUNTER_BYTES": 48}


def test_w_is_fetched_before_the_wait_and_x_after_it() -> None:
    target = Target.of(find_arch("sm90"))
    problem = Problem(256, 1536)
    ptx = compile_ptx(render(KERNEL, problem, KERNEL.default_config(problem, target), target), target.arch)
    before, wait, after = ptx.image.decode().partition("griddepcontrol.wait")
    assert wait
    assert "ld.global.nc.L1::no_allocate" in before
    assert "ld.global.v4.u32" not in before
    assert "st.global" not in before
    assert "ld.global.v4.u32" in after


def test_cases_meet_every_edge() -> None:
    tokens = {c.problem.num_tokens for c in cases.CASES}
    assert tokens == set(range(1, 17))
    target = Target.of(find_arch("sm90"))
    configs = [KERNEL.default_config(c.problem, target) for c in cases.CASES]
    assert any(c.split_k > 1 for c in configs)
    assert any(c.warps_k == 1 for c in configs)
