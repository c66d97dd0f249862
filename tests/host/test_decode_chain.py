"""decode_chain without a GPU: shares and slots by brute force, refusals, what the model asks for, and who is alone."""

from __future__ import annotations

import gc
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kerngen.arch import Target, find_arch
from kerngen.errors import ProblemError
from kerngen.runtime.batch import Batch
from kerngen.runtime.cache import KVCache
from kerngen.runtime.executors.launch import Launch
from kerngen.runtime.executors.record import Record
from kerngen.runtime.executors.reference import Reference
from kerngen.runtime.launcher import shares_sms
from kerngen.runtime.model import Gemma4
from kerngen.runtime.ops import DenseLinear, LayerRest, W4Linear
from kerngen.runtime.ops.kernels import KernelOps
from kerngen.runtime.weights.synthetic import synthetic_model
from kerngen.templates import find_kernel
from kerngen.templates.decode_chain.op import decode_chain
from kerngen.templates.decode_chain.spec import Config, Problem, _most_that_meet
from kerngen.workload import find_model

KERNEL = find_kernel("decode_chain")
H200 = Target.of(find_arch("sm90"))
TINY = Path(__file__).parents[2] / "examples" / "tiny" / "gemma-4-tiny-w4a16"


def _begin(count: int, block: int, blocks: int) -> int:
    """kernel.cu.jinja's begin_of."""
    dealt = min(count, blocks)
    return count * min(block, dealt) // dealt


def _owner(unit: int, count: int, blocks: int) -> int:
    """kernel.cu.jinja's owner_of."""
    return ((unit + 1) * min(count, blocks) - 1) // count


@pytest.mark.parametrize("strips", [1, 3, 16, 48, 80, 168])
@pytest.mark.parametrize("parts", [1, 2, 3, 5, 11, 33])
@pytest.mark.parametrize("blocks", [1, 7, 48, 132, 148])
def test_every_unit_has_one_owner_and_parts_of_a_strip_their_slots(strips: int, parts: int, blocks: int) -> None:
    units = strips * parts
    runs = [(_begin(units, b, blocks), _begin(units, b + 1, blocks)) for b in range(blocks)]
    assert runs[0][0] == 0
    assert runs[-1][1] == units
    assert all(a[1] == b[0] for a, b in pairwise(runs))
    owners = {u: b for b, (first, end) in enumerate(runs) for u in range(first, end)}
    assert all(_owner(u, units, blocks) == b for u, b in owners.items())
    most = 0
    for strip in range(strips):
        first = owners[strip * parts]
        slots = sorted({owners[strip * parts + part] - first for part in range(parts)})
        assert slots == list(range(len(slots))), "no slot is left empty: whoever sums them would wait for ever"
        most = max(most, len(slots))
    assert most <= _most_that_meet(strips, parts, blocks)


def test_all_blocks_have_a_share_of_what_all_wait_for() -> None:
    """Whoever posts a share of `down` has read all that was posted before: that is why the rest may be cleared."""
    for case in (*KERNEL.cases.CASES, *KERNEL.bench.BENCH_CASES):
        config = KERNEL.default_config(case.problem, H200)
        (launch,) = KERNEL.launches(case.problem, config, H200)
        for units in (2 * case.problem.inner // 32, case.problem.hidden // 32 * config.down_parts):
            runs = [_begin(units, b, launch.grid[0]) for b in range(launch.grid[0] + 1)]
            assert all(a < b for a, b in pairwise(runs))
        assert launch.cooperative


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"stage_tiles": 40}, "no multiple of num_warps=12"),
        ({"in_flight": 5, "num_stages": 4}, "more than num_stages=4"),
        ({"slots": 1}, "2 blocks meet in a strip; slots=1"),
        ({"slots": 5, "num_warps": 8}, "120 words of partial sums a thread"),
        ({"num_stages": 12}, "of shared memory; sm90 allows"),
    ],
)
def test_refusals_have_numbers(changed: dict[str, int], why: str) -> None:
    config = replace(Config(12, 48, 4, 2, 3, 11, 11, 2), **changed)
    said = KERNEL.why_invalid(Problem(), config, H200)
    assert said is not None
    assert why in said


@pytest.mark.parametrize("arch", ["sm70", "sm80", "sm89", "sm120"])
def test_where_it_does_not_serve_it_says_what_does(arch: str) -> None:
    why = KERNEL.why_unsupported(Problem(dtype="fp16", residual_dtype="fp32"), Target.of(find_arch(arch)))
    assert why is not None
    assert "w4a16_gemm and add_norm serve it" in why


def test_an_op_takes_one_token_and_one_group_size() -> None:
    case = KERNEL.cases.CASES[0]
    op, given = KERNEL.cases.op_call(case, KERNEL.cases.inputs(case, "cpu"))
    assert op is decode_chain
    with pytest.raises(ProblemError, match="one token, not 2"):
        op(**given | {"residual": torch.zeros(2, 32, dtype=torch.bfloat16)})
    with pytest.raises(ProblemError, match="belong together"):
        op(**given | {"qkv_scales": None})
    wide = KERNEL.cases.inputs(KERNEL.cases.case_for(Problem(64, 64, 64, 64)), "cpu")
    coarse = KERNEL.cases.inputs(KERNEL.cases.case_for(Problem(64, 64, 64, 64, 64)), "cpu")
    mixed = wide | {name: coarse[name] for name in ("down_packed", "down_scales")}
    with pytest.raises(ProblemError, match="one group size, not"):
        decode_chain(**{name: mixed[name] for name in given})


def test_a_model_gives_the_same_with_it_and_without() -> None:
    """One decode step of a tiny dense model, by the kernels' references: the chain's layers, and launch by launch."""
    model = find_model(str(TINY))
    hidden: list[torch.Tensor] = []
    asked: list[set[str]] = []

    class Watched(Reference):
        def run(self, call: Any, where: str) -> Any:
            asked[-1].add(call.kernel)
            return super().run(call, where)

    for target in (None, H200):
        asked.append(set())
        ops = KernelOps(Watched(target=target), torch.bfloat16)
        gemma = Gemma4(model.target, synthetic_model(model.target, ops, 0), ops)
        cache = KVCache.whole(model.target, ops, batch=1, max_len=64)
        ids = torch.tensor([[7]])
        batch = Batch.decode(ids, torch.zeros(1, dtype=torch.int64), cache, 64, ops)
        hidden.append(gemma.forward(batch, cache))
    assert "decode_chain" not in asked[0]
    assert "decode_chain" in asked[1]
    assert "gelu_gate" not in asked[1]
    torch.testing.assert_close(hidden[1], hidden[0])


def test_the_first_executor_of_forwards_is_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only its grids need no cooperative launch: two half-resident ones would wait for each other for ever."""
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    launcher: Any = SimpleNamespace(index=77, target=H200)
    other: Any = SimpleNamespace(index=78, target=H200)
    first = Launch(launcher, in_forwards=True)
    assert first.alone
    assert not Launch(launcher, in_forwards=True).alone
    assert not Launch(launcher).alone, "calls of others run on streams of theirs"
    assert Launch(other, in_forwards=True).alone, "another GPU"
    del first
    gc.collect()
    assert Launch(launcher, in_forwards=True).alone

    (tmp_path / "control").touch()
    assert shares_sms()
    assert not Launch(launcher, in_forwards=True).alone, "other processes' grids may be half-resident too"


def test_who_is_not_alone_launches_cooperatively() -> None:
    pytest.importorskip("cuda.bindings")
    from kerngen.runtime.launcher import _attributes

    (launch,) = KERNEL.launches(Problem(), KERNEL.default_config(Problem(), H200), H200)
    assert [len(_attributes(launch, True, alone)) for alone in (False, True)] == [2, 1]


def _rest(**changed: Any) -> LayerRest:
    """The rest of a layer of 64 columns, as shapes."""

    def w4(n: int, k: int, group: int = 32) -> W4Linear:
        packed = torch.empty(n // 32, k // 32, 32, 4, dtype=torch.int32, device="meta")
        return W4Linear(packed, torch.empty(n // 32, k // group, 32, dtype=torch.bfloat16, device="meta"), n, k, group)

    norm, scalar = torch.empty(64, dtype=torch.bfloat16, device="meta"), torch.empty(1, device="meta")
    given = {"out": w4(64, 64), "gate_up": w4(256, 64), "down": w4(64, 128), "qkv": w4(96, 64)}
    coarse = {name: w4(m.out_features, m.in_features, 64) for name, m in given.items()}
    dense = DenseLinear(torch.empty(96, 64, dtype=torch.bfloat16, device="meta"))
    chosen = {name: {"coarse": coarse[name], "dense": dense, "none": None}[kind] for name, kind in changed.items()}
    m: dict[str, Any] = given | chosen
    return LayerRest(m["out"], norm, norm, m["gate_up"], m["down"], norm, scalar, norm, m["qkv"])


@pytest.mark.parametrize(
    ("rest", "rows", "arch", "serves"),
    [
        (_rest(), 1, "sm90", True),
        (_rest(qkv="none"), 1, "sm90", True),
        (_rest(), 2, "sm90", False),
        (_rest(), 1, "sm80", False),
        (_rest(), 1, "sm120", False),
        (_rest(), 1, None, False),
        (_rest(qkv="dense"), 1, "sm90", False),
        (_rest(down="dense"), 1, "sm90", False),
        (_rest(down="coarse"), 1, "sm90", False),
        (_rest(qkv="coarse"), 1, "sm90", False),
    ],
)
def test_what_it_does_not_take_goes_launch_by_launch(
    rest: LayerRest, rows: int, arch: str | None, serves: bool
) -> None:
    asked: list[str] = []
    target = None if arch is None else Target.of(find_arch(arch))
    ops = KernelOps(Record(lambda kernel, *_: asked.append(kernel), lambda _: None, target), torch.bfloat16)
    residual = torch.empty(rows, 64, dtype=torch.bfloat16, device="meta")
    done = ops.layer_rest(residual, torch.empty_like(residual), rest, 1e-6)
    assert (done is not None) == serves
    assert asked == ["decode_chain"] * serves


@pytest.mark.parametrize("hidden", [16384, 40960])
def test_rows_too_wide_are_refused_with_the_reason(hidden: int) -> None:
    why = KERNEL.why_unsupported(Problem(hidden, 4096, 4096, 0), H200)
    assert why is not None
    assert "w4a16_gemm and add_norm serve it" in why
