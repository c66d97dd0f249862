"""greedy_head without a GPU: what few bits of a head are and how far off they may be, and who is given them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from command import ROOT
from tiny_gemma import load_assistant, make_assistant, make_target
from torch import Tensor

from kerngen.arch import ARCHES, Target, find_arch, find_device
from kerngen.errors import ProblemError
from kerngen.runtime.config import read_model_config
from kerngen.runtime.engine import Engine
from kerngen.runtime.executors.reference import Reference
from kerngen.runtime.footprint import Footprint, footprint, screened
from kerngen.runtime.model import Gemma4
from kerngen.runtime.ops import HeadScreen, Linear, dense_weights, fitting, int4_weights
from kerngen.runtime.ops.eager import TorchOps
from kerngen.runtime.ops.kernels import SCREEN_ROOM, KernelOps, screen_of
from kerngen.runtime.weights.loader import load_model
from kerngen.templates import find_kernel
from kerngen.templates.common.screen.screen import head_screen
from kerngen.templates.common.screen.screen_spec import GROUP_TILES, screen_bytes
from kerngen.templates.greedy_head.op import greedy_head
from kerngen.templates.greedy_head.spec import (
    MAX_HIDDEN,
    MAX_TOKENS,
    Config,
    Problem,
    bits_for,
    most_tokens,
    rows_left,
)
from kerngen.workload.workload import MODELS, find_workload

TINY = ROOT / "examples" / "tiny"
KERNEL = find_kernel("greedy_head")
STEPS = 32512  # of a token's largest element


def _rows(codes: Tensor, bits: int = 8) -> Tensor:
    """What codes stand for as a matrix [rows, columns], element by element as common/screen/screen.cuh has them."""
    strips, groups = codes.shape[:2]
    tiles = GROUP_TILES[bits]
    flat = codes.view(torch.uint8).flatten().long()
    row, column = torch.meshgrid(torch.arange(16 * strips), torch.arange(64 * tiles * groups), indexing="ij")
    lane, half = row % 8 * 4 + column % 64 // 16, row % 16 // 8
    group, tile, word, byte = column // (64 * tiles), column // 64 % tiles, column % 16 // 4, column % 4

    def load(number: Tensor | int, of_word: Tensor) -> Tensor:
        """Of the lane's loads this one's byte of this word."""
        first = (row // 16 * groups + group) * codes.shape[2]
        return flat[((first + number) * 32 + lane) * 16 + of_word * 4 + byte]

    if bits == 8:
        return load(half, word).to(torch.uint8).view(torch.int8)
    code = load(tile, word) >> 4 * half & 15
    if bits >= 6:
        code += (load(tiles + tile // 2, tile % 2 * 2 + half) >> 2 * word & 3) * 16
    if bits == 7:
        code = 2 * code + (load(6, tile) >> 4 * half + word & 1)
    return code - 2 ** (bits - 1)


def _first_six(codes: Tensor) -> Tensor:
    """Of codes of seven bits what the first six stand for, in half steps: the middle of two codes."""
    return 2 * ((_rows(codes, 7) + 64) // 2 * 2) + 1 - 128


def _screened(codes: Tensor, bounds: Tensor, x: Tensor, bits: int = 8) -> Tensor:
    """What greedy_screen computes of x [K] in place of the logits [rows], in fp64."""
    most = float(x.abs().max())
    fixed = (x.double() * (STEPS / most)).round()
    k = len(x)
    return bounds[:, 0].double() * (_rows(codes, bits)[:, :k].double() @ fixed) * (most / STEPS)


def _heavy(x: Tensor) -> Tensor:
    return x.sign() * x.abs() ** 3


@pytest.mark.parametrize("bits", GROUP_TILES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("of_rows", [lambda w: w, _heavy, lambda w: w * torch.logspace(-6, 0, len(w))[:, None]])
@pytest.mark.parametrize("of_x", [lambda x: x, _heavy, lambda x: x.abs(), lambda x: 1e-3 * x])
def test_no_logit_is_further_off_than_its_bound(
    bits: int, dtype: torch.dtype, of_rows: Callable[[Tensor], Tensor], of_x: Callable[[Tensor], Tensor]
) -> None:
    torch.manual_seed(0)
    weight = of_rows(torch.randn(300, 200)).to(dtype)
    weight[7], weight[8, :-1], weight[9] = 0.0, 0.0, weight[9].abs().max()
    codes, bounds = head_screen(weight, (), bits)
    for _ in range(20):
        x = of_x(torch.randn(200)).to(dtype)
        off = (_screened(codes, bounds, x, bits)[:300] - weight.double() @ x.double()).abs()
        assert bool((off <= bounds[:300, 1].double() * x.double().norm()).all())
    # x along a row's own error is where the bound is reached
    error = weight.double() - bounds[:300, :1].double() * _rows(codes, bits)[:300, :200].double()
    row = int(error.norm(dim=-1).argmax())
    x = error[row] / error[row].abs().max()
    off = (_screened(codes, bounds, x, bits)[row] - weight[row].double() @ x).abs()
    assert 0.9 < float(off / (bounds[row, 1].double() * x.norm())) <= 1.0


@pytest.mark.parametrize("of_x", [lambda x: x, _heavy, lambda x: x.abs()])
def test_no_logit_is_further_off_than_the_bound_of_six_of_seven_bits(of_x: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(1)
    weight = torch.randn(300, 200).to(torch.bfloat16)
    weight[7], weight[8, :-1] = 0.0, 0.0
    codes, bounds = head_screen(weight, (), 7)
    first, scale, bound = _first_six(codes)[:300, :200].double(), bounds[:300, 2:3].double(), bounds[:300, 3].double()
    assert torch.equal(scale, bounds[:300, :1].double() / 2)
    for _ in range(20):
        x = of_x(torch.randn(200)).to(torch.bfloat16)
        fixed = (x.double() * (STEPS / float(x.abs().max()))).round() * (float(x.abs().max()) / STEPS)
        off = ((scale * first) @ fixed - weight.double() @ x.double()).abs()
        assert bool((off <= bound * x.double().norm()).all())
    error = weight.double() - scale * first
    row = int(error.norm(dim=-1).argmax())
    assert 0.9 < float(error[row].norm() / bound[row]) <= 1.0


def test_the_first_six_bits_have_sure_bounds_where_the_others_are_likely() -> None:
    """What they leave out of elements near zero is half a step of one sign: a token whose mean is not 0 finds it."""
    torch.manual_seed(0)
    weight = torch.randn(500, 1024) * 0.01
    weight[:, 0] = 5.0
    codes, bounds = head_screen(weight, (), 7, likely=True)
    x = (torch.randn(1024) + 1.0).to(torch.bfloat16).double()
    off = (bounds[:500, 2:3].double() * _first_six(codes)[:500, :1024].double() @ x - weight.double() @ x).abs()
    assert bool((off <= bounds[:500, 3].double() * x.norm()).all())
    assert float(off.max()) > float(bounds[:500, 1].max()) * float(x.norm())


@pytest.mark.parametrize("likely", [False, True])
def test_fewer_bits_have_wider_bounds(likely: bool) -> None:
    """By count for normal numbers, in standard deviations of a logit: what the choice of bits goes by."""
    torch.manual_seed(0)
    weight = torch.randn(64, 1536)
    widths = {bits: float(head_screen(weight, (), bits, likely)[1][:, 1].mean()) for bits in GROUP_TILES}
    known = {4: 0.45, 6: 0.14, 7: 0.08, 8: 0.05} if likely else {4: 4.31, 6: 1.25, 7: 0.66, 8: 0.34}
    assert widths == pytest.approx(known, rel=0.1, abs=0.01)


def test_likely_bounds_hold_the_right_row() -> None:
    torch.manual_seed(2)
    weight = torch.randn(4000, 1024).to(torch.bfloat16)
    codes, bounds = head_screen(weight, (), 4, likely=True)
    q, held, left = _rows(codes, 4).float(), 0, 0
    for _ in range(40):
        x = torch.randn(1024).to(torch.bfloat16).float()
        middle, off = bounds[:, 0] * (q @ x), bounds[:, 1] * x.norm()
        kept = middle + off >= (middle - off).max()
        held += int(kept[(weight.float() @ x).argmax()])
        left += int(kept.sum())
    assert held == 40
    assert left < 40 * 40


def test_bounds_of_small_rows_are_as_large_as_those_of_large_ones() -> None:
    weight = torch.randn(50, 320).to(torch.bfloat16)
    small = head_screen(weight * 2.0**-90)[1] * 2.0**90
    assert torch.equal(small.nan_to_num(), head_screen(weight)[1].nan_to_num())


@pytest.mark.parametrize("bits", GROUP_TILES)
def test_codes_are_the_rows_in_the_order_of_lanes(bits: int) -> None:
    weight = torch.randint(-(2 ** (bits - 1)) + 1, 2 ** (bits - 1), (21, 328)).float()
    # so that every row's scale is 1: 7.5 of four bits are a step between two codes
    weight[:, 0] = 127.0 if bits == 8 else 2 ** (bits - 1) - 0.5
    codes, bounds = head_screen(weight, (), bits)
    groups = -(-328 // (64 * GROUP_TILES[bits]))
    assert codes.shape == (2, groups, {4: 1, 6: 3, 7: 7, 8: 2}[bits], 32, 4)
    assert bounds.shape == (32, 4 if bits == 7 else 2)
    rows = _rows(codes, bits).float()
    assert torch.equal(rows[:21, 1:328], weight[:, 1:])
    assert bool((rows[:21, 0] == 2 ** (bits - 1) - 1).all())
    assert not rows[21:].any()
    assert not rows[:, 328:].any()
    assert torch.equal(bounds[:21, 0], torch.ones(21))
    assert bool(bounds[21:].isnan().all())
    assert codes.nbytes + bounds.nbytes == screen_bytes(21, 328, bits)


def test_a_row_takes_the_scale_that_errs_least() -> None:
    """One large element among many small ones is rounded itself where that leaves the others finer steps."""
    weight = torch.randn(8, 1024, generator=torch.Generator().manual_seed(0))
    scales = head_screen(weight, (), 4)[1][:8, 0] / weight.abs().amax(-1)
    assert bool((scales < 0.95 / 7.5).all())
    weight[:, 0], weight[:, 1:] = 1.0, 0.0
    assert torch.allclose(head_screen(weight, (), 4)[1][:8, 0], weight.abs().amax(-1) / 7.5)


def test_parts_of_a_table_are_as_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(133, 40)
    whole = head_screen(weight)
    monkeypatch.setattr("kerngen.templates.common.screen.screen._AT_ONCE", 1)
    assert all(torch.equal(a, b) for a, b in zip(whole, head_screen(weight), strict=True) if not a.is_floating_point())
    assert torch.equal(whole[1].nan_to_num(), head_screen(weight)[1].nan_to_num())


def test_excluded_rows_have_no_bounds() -> None:
    bounds = head_screen(torch.randn(40, 16), [3, 39])[1]
    assert bounds[[3, 39]].isnan().all()
    assert int(bounds[:40].isnan().any(-1).sum()) == 2


@pytest.mark.parametrize(("excluded", "row"), [([40], 40), ([3, -1], -1)])
def test_only_rows_that_there_are_can_be_excluded(excluded: list[int], row: int) -> None:
    with pytest.raises(ProblemError, match=rf"row {row} .*0\.\.39"):
        head_screen(torch.randn(40, 16), excluded)


@pytest.mark.parametrize("weight", [torch.zeros(5), torch.zeros(4, 8, dtype=torch.int32)], ids=["vector", "integers"])
def test_only_matrices_of_floats_have_a_screen(weight: Tensor) -> None:
    with pytest.raises(ProblemError, match="matrix of floats"):
        head_screen(weight)


@pytest.mark.parametrize(("bits", "most"), [(8, 20), (7, 20), (6, 100)])
def test_few_rows_of_a_random_head_are_left(bits: int, most: int) -> None:
    """Of a head without any likelier token, which is the worst there is; in fewer bits by the logit of a first row."""
    torch.manual_seed(1)
    weight, x = torch.randn(4000, 1536).to(torch.bfloat16), torch.randn(1536).to(torch.bfloat16)
    codes, bounds = head_screen(weight, (), bits)
    logits = weight.double() @ x.double()
    middle, off = _screened(codes, bounds, x, bits), bounds[:, 1].double() * x.double().norm()
    lower = (middle - off)[:4000].max() if bits == 8 else logits[(middle - off)[:4000].argmax()]
    left = middle + off >= lower - lower.abs() / 64
    assert bool(left[logits.argmax()])
    assert int(left.sum()) < most


@pytest.mark.parametrize("kind", ["normal", "ties", "excluded"])
def test_the_answer_is_that_of_the_whole_head(kind: str) -> None:
    case = next(c for c in KERNEL.cases.CASES if c.options["kind"] == kind and c.problem.vocab_size in (1000, 3000))
    inputs = KERNEL.cases.inputs(case, "cpu")
    ops = KernelOps(Reference(), inputs["x"].dtype)
    excluded = inputs["bounds"][: case.problem.vocab_size, 0].isnan().nonzero().flatten().tolist()
    head = dense_weights(inputs["weight"])
    screen = ops.screen(head, excluded)
    assert fitting(screen, inputs["x"]) is screen is not None
    logits = ops.logits(inputs["x"], head, 30.0)
    logits[:, excluded] = -math.inf
    assert torch.equal(ops.greedy(inputs["x"], head, 30.0, screen), logits.argmax(-1))


def test_suppressed_tokens_are_excluded_by_the_model(tmp_path: Path) -> None:
    make_target(tmp_path, "dense")
    config = read_model_config(tmp_path)
    ops = KernelOps(Reference(), torch.float32)
    weights = load_model(tmp_path, config, ops)
    hidden = torch.randn(3, config.hidden_size, generator=torch.Generator().manual_seed(0))
    chosen = [set(Gemma4(config, weights, ops).greedy(hidden).tolist())]
    for _ in range(3):
        model = Gemma4(config, weights, ops, suppressed_ids=sorted(set.union(*chosen)))
        assert model.screen is not None
        tokens = model.greedy(hidden)
        assert torch.equal(tokens, model.greedy(hidden, screened=False))
        chosen.append(set(tokens.tolist()))
    assert len(set.union(*chosen)) == sum(map(len, chosen)), "none comes again"


def test_what_is_reproducible_does_not_look_at_the_screen(tmp_path: Path) -> None:
    """Beside a row that is sampled a greedy one is chosen from all logits: so it is beside none."""

    class Screened(TorchOps):
        def screen(self, head: Linear, excluded: Sequence[int] = (), *, likely: bool = False) -> HeadScreen:
            return HeadScreen(torch.empty(0), torch.empty(0), MAX_TOKENS)

        def greedy(self, h: Tensor, head: Linear, logit_cap: float, screen: HeadScreen | None = None) -> Tensor:
            found = super().greedy(h, head, logit_cap)
            return found if screen is None else torch.full_like(found, 7)

    make_target(tmp_path, "dense")
    config = read_model_config(tmp_path)
    ops = Screened(torch.device("cpu"), torch.float32)
    model = Gemma4(config, load_model(tmp_path, config, ops), ops)

    def tokens(*, reproducible: bool) -> list[int]:
        engine = Engine(model, max_len=30, page_size=4, reproducible=reproducible)
        return engine.generate([3, 5, 9], max_new_tokens=6).tokens

    assert tokens(reproducible=False) == [7] * 6
    assert tokens(reproducible=True) != [7] * 6


def test_who_has_no_screen() -> None:
    ops = KernelOps(Reference(), torch.bfloat16)
    empty = torch.empty(0)
    assert ops.screen(int4_weights(empty, empty, 64, 64, 32)) is None
    assert ops.screen(dense_weights(torch.zeros(16, 12, dtype=torch.bfloat16))) is None
    assert screen_of(dense_weights(torch.empty(16, MAX_HIDDEN + 8, device="meta"))) == 0
    assert fitting(ops.screen(dense_weights(torch.zeros(16, 16))), torch.empty(9, 16)) is None
    assert [most_tokens(t) for t in (None, Target.of(find_arch("sm80")), Target.of(find_arch("sm90")))] == [8, 8, 32]
    assert fitting(None, torch.empty(1, 16)) is None


def _same(screen: HeadScreen | None, made: tuple[Tensor, Tensor]) -> bool:
    return torch.equal(screen.codes, made[0]) and torch.equal(screen.bounds.nan_to_num(), made[1].nan_to_num())


def test_a_targets_head_has_sure_bounds_and_a_drafters_likely_ones() -> None:
    config = read_model_config(TINY / "gemma-4-tiny")
    ops = KernelOps(Reference(), torch.bfloat16)
    target = Gemma4(config, load_model(TINY / "gemma-4-tiny", config, ops), ops, suppressed_ids=[3])
    drafter = load_assistant(TINY / "gemma-4-tiny-assistant", target)
    head, of_drafts = target.weights.head, drafter.weights.head
    assert head.is_dense
    assert _same(target.screen, head_screen(head.weight, [3], bits_for(config.hidden_size)))
    few = bits_for(of_drafts.in_features, likely=True)
    assert _same(drafter.screen, head_screen(of_drafts.weight, (), few, likely=True))
    assert target.screen is not None
    assert drafter.screen is not None
    made = [s.codes.nbytes + s.bounds.nbytes for s in (target.screen, drafter.screen)]
    assert footprint(config, drafter.config, torch.bfloat16, 1).screen_bytes == tuple(made)


def test_a_centroid_head_has_no_screen(tmp_path: Path) -> None:
    make_target(tmp_path / "target", "dense")
    make_assistant(tmp_path / "assistant", "dense", num_centroids=8)
    config = read_model_config(tmp_path / "target")
    ops = KernelOps(Reference(), torch.float32)
    drafter = load_assistant(tmp_path / "assistant", Gemma4(config, load_model(tmp_path / "target", config, ops), ops))
    assert drafter.screen is None
    assert footprint(config, drafter.config, torch.float32, 1).screen_bytes[1] == 0


def test_long_rows_take_more_bits_and_drafts_the_fewest() -> None:
    of_models = [bits_for(hidden) for hidden in (1024, 1536, 2560, 2816, 3840, 5376, MAX_HIDDEN)]
    assert of_models == sorted(of_models)
    assert set(of_models) <= {6, 7}, "sure bounds of four bits leave most rows"
    assert bits_for(1024, likely=True) == 4


@pytest.mark.parametrize("arch", ["sm70", "sm90"])
@pytest.mark.parametrize("name", MODELS)
def test_a_workload_has_heads_in_the_bits_that_run(name: str, arch: str) -> None:
    asked = [
        (i.problem, {u.phase for u in i.uses})
        for i in find_workload(name, find_arch(arch)).items
        if i.kernel == "greedy_head"
    ]
    assert {frozenset(phases) for _, phases in asked} <= {
        frozenset({"decode"}), frozenset({"verify"}), frozenset({"decode", "verify"}), frozenset({"draft"})
    }  # fmt: skip
    assert all(p.bits == bits_for(p.hidden, likely="draft" in phases) for p, phases in asked)
    assert all((p.hidden == 1024) == ("draft" in phases) for p, phases in asked)
    assert any("decode" in phases for _, phases in asked)


def test_a_screen_is_made_where_there_is_room() -> None:
    takes = Footprint(weight_bytes=1000, drafter_bytes=500, cache_bytes=0, context=1, screen_bytes=(100, 10))
    assert screened(takes, 1000 + 100 * SCREEN_ROOM + 500) == 110
    assert screened(takes, 1000 + 100 * SCREEN_ROOM - 1) == 10, "the drafter's is looked at by itself"
    assert screened(takes, 1500 + 10 * SCREEN_ROOM - 1) == 0


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"hidden": MAX_HIDDEN + 8}, f"hidden={MAX_HIDDEN + 8} is more than {MAX_HIDDEN}"),
        ({"hidden": 12}, "multiple of 8"),
        ({"vocab_size": 0}, "vocab_size=0"),
        ({"num_tokens": 0}, "num_tokens=0"),
        ({"bits": 5}, "bits=5 is not one of: 4, 6, 7, 8"),
    ],
)
def test_refused(changed: dict[str, object], why: str) -> None:
    with pytest.raises(ProblemError, match=why):
        Problem(**{"vocab_size": 64, "hidden": 64, **changed})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (Config(unroll=8), "unroll=8 in column_parts=1, and a row has 3 tiles"),
        (Config(num_warps=16, unroll=1, blocks_per_sm=4), "registers"),
        (Config(block_tokens=8, num_warps=16, unroll=3), None),
        (Config(unroll=2, column_parts=2), "unroll=2 in column_parts=2, and a row has 3 tiles"),
        (Config(unroll=1, column_parts=2), None),
        (Config(block_tokens=32, num_warps=16, unroll=3, blocks_per_sm=2), "registers"),
        (Config(block_tokens=32, num_warps=8, unroll=3, row_tiles=2), None),
        (Config(block_tokens=32, num_warps=16, unroll=3, row_tiles=2), "registers"),
        (Config(unroll=1, first_bits=6), "first_bits=6: of seven bits six may come first, not of 8"),
    ],
)
def test_configurations(config: Config, why: str | None) -> None:
    found = KERNEL.why_invalid(Problem(1000, 192), config, Target.of(find_arch("sm90")))
    assert found is None if why is None else found is not None and why in found


def test_more_tokens_than_share_a_read_read_again() -> None:
    target = Target.of(find_arch("sm90"))
    problem = Problem(262144, 1536, num_tokens=7)
    screen, choose = KERNEL.launches(problem, Config(block_tokens=4), target)
    assert screen.grid[1] == 2
    assert choose.grid == (264 // 7, 7, 1), "two blocks an SM, whatever tokens they are for"
    assert KERNEL.launches(replace(problem, num_tokens=1), Config(), target)[1].grid == (256, 1, 1)
    wide = KERNEL.launches(problem, Config(block_tokens=4, choose_warps=16), target)[1]
    assert wide.grid == (132 // 7, 7, 1), "one of twice as many warps, which is all that fits"


@pytest.mark.parametrize(("hidden", "bits", "least", "most"), [
    (1536, 6, 100, 300), (2816, 6, 600, 1300), (5376, 6, 3500, 7000), (3840, 7, 50, 200), (5376, 7, 100, 300),
    (1024, 4, 20, 80),
])  # fmt: skip
def test_as_many_rows_are_left_as_were_counted(hidden: int, bits: int, least: int, most: int) -> None:
    assert least < rows_left(Problem(hidden=hidden, bits=bits), bits) < most


@pytest.mark.parametrize("board", ["H100", "H200"])
@pytest.mark.parametrize("hidden", [2560, 2816, 3840, 5376])
def test_few_tokens_read_six_of_seven_bits(hidden: int, board: str) -> None:
    """The more tokens, the more rows whose last bit is wanted: many read it of all rows."""
    target, bits = Target.of(find_device(board)), bits_for(hidden)
    first = [KERNEL.default_config(Problem(hidden=hidden, num_tokens=n, bits=bits), target).first_bits for n in (1, 32)]
    assert first == ([6, 0] if bits == 7 else [0, 0])


def test_tiles_under_way_are_whole_groups() -> None:
    why = KERNEL.why_invalid(Problem(1000, 1536, bits=7), Config(unroll=6), Target.of(find_arch("sm90")))
    assert why == "unroll=6 are no whole groups of 4 tiles, as codes of 7 bits are"


@pytest.mark.parametrize("bits", GROUP_TILES)
def test_an_op_knows_bits_by_the_shape_of_codes(bits: int) -> None:
    weight, x = torch.randn(40, 264).to(torch.bfloat16), torch.zeros(3, 264, dtype=torch.bfloat16)
    codes, bounds = head_screen(weight, (), bits)
    assert greedy_head(x, weight, codes, bounds).problem == Problem(40, 264, "bf16", 3, bits)
    with pytest.raises(ProblemError, match="groups of columns"):
        greedy_head(x, weight, codes[:, :-1], bounds)
    with pytest.raises(ProblemError, match="5 loads a group"):
        greedy_head(x, weight, torch.zeros(3, 2, 5, 32, 4, dtype=torch.int32), bounds)


@pytest.mark.parametrize("bits", GROUP_TILES)
@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("num_tokens", [1, 8, 9, MAX_TOKENS])
@pytest.mark.parametrize("hidden", [8, 72, 1536, 5376, MAX_HIDDEN])
def test_a_default_serves_every_size_everywhere(arch: str, num_tokens: int, hidden: int, bits: int) -> None:
    target = Target.of(find_arch(arch))
    problem = Problem(1000, hidden, target.arch.dtype, num_tokens, bits)
    config = KERNEL.default_config(problem, target)
    KERNEL.require_valid(problem, config, target)
    tiles = -(-hidden // 64)
    parts = KERNEL.launches(problem, config, target)[0].smem_bytes // (128 * config.block_tokens)
    assert parts * config.column_parts >= tiles, "all columns have digits"


def test_more_than_a_row_of_tokens_is_refused() -> None:
    why = KERNEL.why_unsupported(Problem(64, 64, num_tokens=MAX_TOKENS + 1), Target.of(find_arch("sm90")))
    assert "num_tokens=33: at most 32" in why


def test_no_body_computes_in_fp32() -> None:
    why = KERNEL.why_unsupported(Problem(64, 64, "fp32"), Target.of(find_arch("sm90")))
    assert "fp32" in why
