"""What stands around a decode step's forward: `decode_inputs` and `decode_advance`, against torch's own operations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_gemma import CPU
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kerngen.arch import Target, find_arch
from kerngen.errors import ProblemError
from kerngen.runtime.cache import KVCache
from kerngen.runtime.config import NO_DRAFTS
from kerngen.runtime.engine.plan import SamplingMode
from kerngen.runtime.engine.runner import Runner, _read
from kerngen.runtime.executors.record import Record
from kerngen.runtime.executors.reference import Reference
from kerngen.runtime.model import Gemma4
from kerngen.runtime.ops import Ops
from kerngen.runtime.ops.eager import TorchOps
from kerngen.runtime.ops.kernels import KernelOps
from kerngen.runtime.weights.synthetic import synthetic_model
from kerngen.templates.decode_advance.op import decode_advance
from kerngen.templates.decode_inputs.op import decode_inputs
from kerngen.workload.workload import find_model

TINY = Path(__file__).parents[2] / "examples" / "tiny" / "gemma-4-tiny-w4a16"
BACKENDS = pytest.mark.parametrize(
    "ops", [TorchOps(CPU, torch.float32), KernelOps(Reference(), torch.float32)], ids=lambda ops: ops.name
)


def equal(ours: Tensor, theirs: Tensor) -> None:
    """Bit for bit, NaN for NaN, and of one dtype."""
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


# -- the beginning


@BACKENDS
@pytest.mark.parametrize("page_size", [1, 4, 16, 48, 64])
@pytest.mark.parametrize("q_len", [1, 2, 5, 8])
def test_inputs_are_what_each_token_has(ops: Ops, page_size: int, q_len: int) -> None:
    """In Python's integers, of the first rows of larger tables: rows lie together, the two tables apart. Pages are so
    many that int32 could not hold their slots.
    """
    generator = torch.Generator().manual_seed(page_size * 10 + q_len)
    for batch in (1, 2, 7, 33):
        tables = torch.randint(0, 2**30, (2, batch + 3, 40), generator=generator).int()
        lengths = torch.randint(0, 40 * page_size - q_len + 1, (batch,), generator=generator)
        lengths[0] = 0 if batch > 1 else 40 * page_size - q_len  # the first and the last place there is
        positions, kv_lens, slots = ops.decode_inputs(lengths, tables[:, :batch], q_len, page_size)

        at = lengths[:, None] + torch.arange(q_len)
        equal(positions, at.flatten())
        equal(kv_lens, (lengths + q_len).int())
        for table, slot in zip(tables, slots, strict=True):
            own = [[int(table[b, p // page_size]) * page_size + p % page_size for p in row]
                   for b, row in enumerate(at.tolist())]  # fmt: skip
            equal(slot, torch.tensor(own).flatten())


@BACKENDS
def test_rows_that_stand_for_nobody_write_to_page_0(ops: Ops) -> None:
    lengths, tables = torch.zeros(3, dtype=torch.int64), torch.zeros(2, 3, 2, dtype=torch.int32)
    _, kv_lens, slots = ops.decode_inputs(lengths, tables, 4, 16)
    equal(kv_lens, torch.full((3,), 4, dtype=torch.int32))
    equal(slots, torch.arange(4).repeat(2, 3))


def test_tables_and_lengths_that_do_not_fit_are_refused() -> None:
    lengths, tables = torch.zeros(2, dtype=torch.int64), torch.zeros(2, 2, 8, dtype=torch.int32)
    with pytest.raises(ProblemError, match=r"q_len=0 .*positive"):
        decode_inputs(lengths, tables, 0, 16)
    with pytest.raises(ProblemError, match=r"page_size=0 .*positive"):
        decode_inputs(lengths, tables, 1, 0)
    with pytest.raises(ProblemError, match=r"table's row.* 2 apart"):
        decode_inputs(lengths, tables[:, :, ::2], 1, 16)


# -- the end


def advanced(
    tokens: Tensor, drafts: Tensor | None, states: Tensor, lengths: Tensor, limits: Tensor
) -> tuple[list[list[int]], Tensor, Tensor, Tensor]:
    """(result, token, lengths, hidden) by the sentences of `Ops.decode_advance`, a row at a time."""
    results, token, after, hidden = [], [], [], []
    for b, row in enumerate(tokens.tolist()):
        guesses = [] if drafts is None else drafts[b].tolist()
        count = 1
        while count <= len(guesses) and guesses[count - 1] == row[count - 1]:
            count += 1
        state = states[b * len(row) + count - 1]
        results.append([count, *row, int(all(x.isfinite() for x in state))])
        token.append(max(row[count - 1], 0))
        after.append(min(int(lengths[b]) + count, int(limits[b])))
        hidden.append(state)
    return results, torch.tensor(token), torch.tensor(after), torch.stack(hidden)


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("q_len", [1, 2, 4, 8])
def test_a_step_ends_as_it_is_said(ops: Ops, dtype: torch.dtype, q_len: int) -> None:
    """Every number of drafts is accepted; tokens are missing, states broken, limits met, rows nobody's."""
    generator = torch.Generator().manual_seed(q_len)
    draw = lambda low, high, *shape: torch.randint(low, high, shape, generator=generator)  # noqa: E731
    seen = set()
    for batch in (1, 3, 40):
        tokens = torch.where(draw(0, 5, batch, q_len) == 0, -1, draw(0, 262144, batch, q_len))
        drafts = None
        if q_len > 1:
            drafts = torch.where(draw(0, 6, batch, q_len - 1) == 0, 7, tokens[:, :-1])
        states = torch.randn(batch * q_len, 16, generator=generator).to(dtype)
        for value in (float("nan"), float("inf"), -float("inf")):
            states[draw(0, len(states), len(states) // 4), draw(0, 16, len(states) // 4)] = value
        lengths = draw(0, 1000, batch)
        limits = lengths + draw(0, q_len + 2, batch)
        wanted = advanced(tokens, drafts, states, lengths, limits)
        rows = torch.full((3, batch + 2), -5)  # of which the first ones are the batch's, as the engine keeps them
        rows[1, :batch], rows[2, :batch] = lengths, limits
        hidden = torch.full((batch + 2, 16), 3.0, dtype=dtype)
        token, lengths, limits = rows[:, :batch]
        result = ops.decode_advance(tokens, drafts, states, token, lengths, limits, hidden[:batch])
        equal(result, torch.tensor(wanted[0]))
        for ours, theirs in zip((token, lengths, hidden[:batch]), wanted[1:], strict=True):
            equal(ours, theirs)
        assert bool((rows[:, batch:] == -5).all() and (hidden[batch:] == 3).all()), "other rows are left alone"
        made = _read(result, q_len, 0.5)
        assert made.tokens == [row[1 : 1 + row[0]] for row in wanted[0]]
        assert made.is_finite == [bool(row[-1]) for row in wanted[0]]
        seen |= {(row[0], row[-1]) for row in wanted[0]}
    assert {count for count, _ in seen} == set(range(1, q_len + 1))
    assert {finite for _, finite in seen} == {0, 1}


def test_several_tokens_without_drafts_are_refused() -> None:
    ints, states = torch.zeros(2, dtype=torch.int64), torch.zeros(6, 8)
    with pytest.raises(ProblemError, match=r"drafts.* 3 tokens.* 2"):
        decode_advance(torch.zeros(2, 3, dtype=torch.int64), None, states, ints, ints, ints, states[:2])


# -- all of it


class Kernels(TorchDispatchMode):
    """Names what torch would launch: all but views and empty tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.launched: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and not func.__name__.startswith(("empty", "_unsafe_view", "_reshape_alias")):
            self.launched.append(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("batch", [1, 5, 32])
def test_torch_launches_nothing_in_a_greedy_step(batch: int) -> None:
    if not TINY.is_dir():
        pytest.skip("examples/tiny holds no checkpoint")
    asked: list[str] = []
    record = Record(lambda kernel, problem, where: asked.append(kernel), asked.append, Target.of(find_arch("sm90")))
    config, ops = find_model(str(TINY)).target, KernelOps(record, torch.bfloat16)
    model = Gemma4(config, synthetic_model(config, ops, 0), ops)
    cache = KVCache.whole(config, ops, batch=32, max_len=256)
    runner = Runner(model, None, cache, max_batch=32, max_kv_len=256, buckets=None)
    with torch.inference_mode(), Kernels() as kernels:
        result = runner.step(batch, NO_DRAFTS, SamplingMode(), 256)
    assert kernels.launched == []
    assert result.shape == (batch, 3), "what the host reads is one small tensor"
    assert asked[:2] == ["decode_inputs", "embed"], "what is read ahead is complete before embed lets others start"
    assert asked[-2:] == ["greedy_head", "decode_advance"]
    assert asked.count("decode_inputs") == asked.count("decode_advance") == 1
