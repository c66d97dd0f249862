"""check_pages: the kernel's own source on the host, and engines that are told what is out of bounds."""

from __future__ import annotations

import ctypes
import random
import re
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import kernel_on_cpu
import numpy as np
import plan_replay
import pytest
import torch
from test_engine_batches import assert_nothing_is_held, kind_of
from test_step_plan import Recorded, played
from torch import Tensor

from kerngen.arch import Target, find_device
from kerngen.compiler.render import render
from kerngen.errors import PageError
from kerngen.runtime.batch import Batch, ragged_layout
from kerngen.runtime.cache import KVCache
from kerngen.runtime.config import read_model_config
from kerngen.runtime.engine import Engine, Request, page_check
from kerngen.runtime.engine.plan import PrefillChunk, RowUpdate, StepPlan
from kerngen.runtime.engine.runner import LENGTH as LENGTH_ROW
from kerngen.runtime.engine.runner import Agree, StepOutput
from kerngen.runtime.executors.reference import Reference
from kerngen.runtime.ops import Ops
from kerngen.runtime.ops.eager import TorchOps
from kerngen.runtime.ops.kernels import KernelOps
from kerngen.runtime.world import World
from kerngen.templates import Case, find_kernel
from kerngen.templates.check_pages.spec import LENGTH, NULL_PAGE, PAGE, SLOT, Config
from kerngen.timing.measure import compare, fresh

KERNEL = find_kernel("check_pages")
TARGET = Target.of(find_device("H200"))
ON_HOST = Config(32)  # each thread is one of the host


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if kernel_on_cpu.COMPILER is None:
        pytest.skip("neither g++ nor clang++ is on the PATH")
    first, *others = KERNEL.spec.BODIES[0].args
    source = render(KERNEL, KERNEL.problem_type(), ON_HOST, TARGET)
    return kernel_on_cpu.on_cpu(source, first, tmp_path_factory.mktemp("check_pages"), others)


def test_the_kernel_finds_what_the_reference_finds(library: ctypes.CDLL) -> None:
    """In all cases, one launch after the other, as on a GPU: the workspace is zero again behind each call, and what was
    found first stays.
    """
    workspace, entries = ctypes.c_uint64(0), KERNEL.spec.BODIES[0].args

    def run(case: Case, inputs: dict[str, Any]) -> None:
        given = inputs | {"workspace": ctypes.addressof(workspace)}
        for i, launch in enumerate(KERNEL.launches(case.problem, ON_HOST, TARGET)):
            values = kernel_on_cpu.arguments_of(entries[launch.entry], given)
            entry = getattr(library, f"run_{launch.entry}" if i else "run")
            entry(launch.grid[0], launch.block[0], 0, *values)
        assert workspace.value == 0

    for case in KERNEL.cases.CASES:
        inputs = fresh(KERNEL.cases.inputs(case, "cpu"))
        expected = KERNEL.reference.expected(case.problem, inputs)
        run(case, inputs)
        result = compare(KERNEL, case, inputs, expected)
        assert result.ok, result.message
        found = inputs["record"].clone()
        inputs["tables"][:] = -2
        run(case, inputs)
        assert bool(inputs["record"][0])
        assert torch.equal(inputs["record"], found) == bool(found[0]), case.name


@pytest.mark.parametrize(
    ("fault", "named"),
    {
        "too-long": (LENGTH, 7, 0, 0, 193, 192),
        "shorter-than-its-tokens": (LENGTH, 7, 0, 0, 16, 192),
        "negative-page": (PAGE, 7, 0, 1, -1, 38),
        "page-beyond-the-pool": (PAGE, 7, 1, 6, 45, 45),
        "stale-entry-behind-a-window": (PAGE, 7, 1, 0, 1 << 30, 45),
        "page-0-in-use": (NULL_PAGE, 7, 0, 0, 0, 38),
        "several": (PAGE, 5, 0, 2, -5, 38),
    }.items(),
)
def test_the_reference_names_the_first(fault: str, named: tuple[int, ...]) -> None:
    """What the kernel is held to, held to figures that do not depend on how it is computed."""
    (case,) = (c for c in KERNEL.cases.CASES if c.name.endswith(f"_{fault}"))
    record = KERNEL.reference.expected(case.problem, KERNEL.cases.inputs(case, "cpu"))["record"]
    assert tuple(record.long().tolist()) == named


def test_what_is_right_is_left_alone() -> None:
    sound = [c for c in KERNEL.cases.CASES if c.options["fault"] == "none"]
    assert len(sound) > 5
    for case in sound:
        assert not KERNEL.reference.expected(case.problem, KERNEL.cases.inputs(case, "cpu"))["record"].any(), case.name


# ---- engines


@pytest.fixture(scope="module")
def engine() -> Engine:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(page_check.VARIABLE, "1")
        return plan_replay.engine(num_draft_tokens=2)


@pytest.fixture(autouse=True)
def dumps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


REQUESTS = [Request([2, *range(300, 300 + n)], 40) for n in (30, 9, 17)]


def tokens_of(engine: Engine) -> list[list[int]]:
    return [g.tokens for g in engine.generate_many(REQUESTS)]


@pytest.fixture(scope="module")
def expected(engine: Engine) -> list[list[int]]:
    return tokens_of(plan_replay.engine(num_draft_tokens=2))


Break = Callable[[Engine], object]


def entry(row: int, kind: str, index: int, page: int) -> Break:
    """An entry of a block table that decoding sequences have on the device."""
    return lambda engine: engine.cache.groups[kind].block_table[row].index_fill_(0, torch.tensor([index]), page)


def length(row: int, tokens: int) -> Break:
    return lambda engine: engine.runner.ints[LENGTH_ROW, row].fill_(tokens)


def page_of_row_0(engine: Engine) -> None:
    """Row 1 goes on in the page that row 0 goes on in."""
    table = engine.cache.groups["full"].block_table
    pages = [int(n) // engine.cache.page_size for n in engine.runner.ints[LENGTH_ROW, :2]]
    table[1, pages[1]] = table[0, pages[0]]


def slot(engine: Engine) -> None:
    """The slot of row 0's first token is the next page's, in the next step alone."""
    ops = engine.model.ops
    right = ops.decode_inputs

    def wrong(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
        positions, kv_lens, slots = right(*given)
        slots[1, 0] += engine.cache.page_size
        del ops.decode_inputs  # type: ignore[misc]
        return positions, kv_lens, slots

    ops.decode_inputs = wrong  # type: ignore[method-assign]


NUM_FULL, NUM_SLIDING, LONGEST = 26, 40, 123
ENTRY = "of the block table is page"
FAULTS: dict[str, tuple[Break, str]] = {
    "page": (
        entry(1, "sliding", 1, 4096),
        rf"row 1 .*layer 0 \(sliding attention, and \d+ more\): entry 1 {ENTRY} 4,096; .* 0 to {NUM_SLIDING - 1}",
    ),
    "negative": (entry(0, "full", 0, -1), rf"row 0 .*full attention.*: entry 0 {ENTRY} -1; .* 0 to {NUM_FULL - 1}"),
    "nobody's": (entry(2, "full", 2, 0), rf"row 2 .*: entry 2 {ENTRY} 0, .* nobody, .* 1 to {NUM_FULL - 1}"),
    "long": (length(1, 1 << 30), rf"row 1 .*all layers: 1,073,741,82\d tokens .*, and {LONGEST} at most"),
    "negative length": (length(1, -5), r"row 1 .*all layers: -\d tokens"),
    "shared": (page_of_row_0, r"row 1 .*, which request \d+ \(row 0 of the decode step\) writes in this step"),
    "slot": (slot, r"row 0 .*sliding.*: position \d+ has slot \d+; allowed is \d+, in the page \d+ that entry \d+ of"),
}  # fmt: skip


def test_what_is_corrupt_on_the_device_is_named(engine: Engine, expected: list[list[int]]) -> None:
    """One fault after the other, in steps with drafts, whose drafter reads first. The file has the step, and the engine
    goes on to the tokens that it makes without them.
    """
    handles = [engine.submit(r) for r in REQUESTS]
    update = engine.runner.update
    for name, (corrupt, words) in FAULTS.items():
        while len(engine.scheduler.running) < 3:
            engine.step()

        def broken(of: RowUpdate, corrupt: Break = corrupt) -> None:
            update(of)
            corrupt(engine)

        engine.runner.update = broken  # type: ignore[method-assign]
        with pytest.raises(PageError, match=words) as caught:
            engine.step()
        del engine.runner.update  # type: ignore[misc]
        message, hint = caught.value.message, str(caught.value.hint)
        row = int(message.split("row ")[1][0])
        plan, held = written_down(hint, row, engine)
        request = plan.requests[row]
        assert message.startswith(f"request {request} (row {row} of the decode step), "), name
        assert sorted(plan.requests) == [h.order for h in handles]
        assert held, name
    while engine.has_work:
        engine.step()
    assert [h.tokens for h in handles] == expected


def written_down(hint: str, row: int, engine: Engine) -> tuple[StepPlan, bool]:
    """The plan in the file that `hint` names, and whether its tensors hold what its violation says of that row."""
    path = re.search(r"numpy.load\('(.*)'\)", hint)
    assert path, hint
    with np.load(path[1]) as step:
        kind, found_row, pool, index, value, _ = step["violation"].tolist()
        assert found_row == page_check.DECODE_ROW + row
        first, kv_len = step["decode_cu_seqlens"][row], step["decode_kv_lens"][row]
        if kind == LENGTH:
            held = kv_len
        elif kind == SLOT:
            held = step["decode_slots"][pool, first + index - (kv_len - 3)]
        else:
            held = step["decode_tables"][pool, row, index]
        return StepPlan.from_json(str(step["plan"]), engine.runner.limits), held == value


def test_a_page_of_a_prompt_is_named(engine: Engine, expected: list[list[int]], dumps: Path) -> None:
    """Of the second prompt in a prefill: the plan itself is wrong."""
    run = engine.runner._run

    def broken(plan: StepPlan, agree: Agree) -> StepOutput:
        first, second = plan.chunks
        full, sliding = second.pages
        return run(replace(plan, chunks=(first, replace(second, pages=(full, (*sliding[:-1], NUM_SLIDING))))), agree)

    engine.runner._run = broken  # type: ignore[method-assign]
    handles = [engine.submit(r) for r in REQUESTS[:2]]
    with pytest.raises(PageError, match=r"chunk 1 of the prefill\), layer 0 .*page 40; allowed are 0 to 39") as caught:
        engine.step()
    del engine.runner._run  # type: ignore[misc]
    assert caught.value.message.startswith(f"request {handles[1].order} ")
    (path,) = dumps.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600, "prompts are nobody else's"
    with np.load(path) as step:
        assert 40 in step["chunks_tables"]
        assert "decode_tables" not in step
    while engine.has_work:
        engine.step()
    assert [h.tokens for h in handles] == expected[:2]


def test_what_cannot_be_written_down_is_said(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    update = engine.runner.update

    def broken(of: RowUpdate) -> None:
        update(of)
        engine.runner.ints[LENGTH_ROW, 0] = -1

    handle = engine.submit(Request([2, 300], 4))
    engine.step()
    engine.runner.update = broken  # type: ignore[method-assign]
    with pytest.raises(PageError, match=r"could not be written: .*TMPDIR"):
        engine.step()
    del engine.runner.update  # type: ignore[misc]
    engine.cancel(handle)


def test_no_engine_trips_over_its_own_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under little memory: preemptions, prefixes, mixed batches, drafts, masks, cancellations, interrupted steps."""
    monkeypatch.setenv(page_check.VARIABLE, "1")
    engine = plan_replay.engine(num_pages={"full": 16, "sliding": 22})
    recorded = Recorded(engine)
    handles = played(engine, random.Random(5), 24)
    assert_nothing_is_held(engine)
    assert sum(h.num_preemptions for h in handles) > 2
    assert sum(h.num_found for h in handles) > 100
    assert {kind_of(p) for p in recorded.plans} == {"prefill", "decode", "mixed"}
    assert {p.decode.num_drafts for p in recorded.plans if p.decode} == {0, 1, 3}


def test_nothing_is_checked_that_was_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("", "0"):
        monkeypatch.setenv(page_check.VARIABLE, value)
        engine = plan_replay.engine()
        assert engine.cache.check is None
        engine.submit(REQUESTS[0])
        engine.step()


@pytest.mark.parametrize("backend", ["torch", "kernels"])
def test_a_rank_says_which_it_is_and_reads_nobodys_memory(backend: str) -> None:
    """Of a decode step and of a prefill: what is handed on names page 0 alone."""
    ops: Ops = TorchOps(torch.device("cpu"), torch.float32)
    if backend == "kernels":
        ops = KernelOps(Reference(), torch.float32)
    config = read_model_config(plan_replay.TINY / "gemma-4-tiny")
    cache = KVCache.whole(config, ops, batch=2, max_len=64, page_size=8)
    cache.check = check = page_check.PageCheck(ops, cache, config.divided(World(0, 2)), 1)
    chunk = PrefillChunk((0,), 0, ((1,), (1,)))
    right, plan = cache.tables.clone(), StepPlan(num_running=2, chunks=(chunk, chunk))

    def decoded() -> Batch:
        return Batch.decode(torch.zeros(2, 3, dtype=torch.int64), torch.tensor([20, 17]), cache, 64, ops)

    def prefilled() -> Batch:
        tokens, lengths = ragged_layout([0] * 9, [0, 6], [4, 5])
        given = torch.tensor(tokens), torch.tensor(lengths, dtype=torch.int32)
        return Batch.ragged(*given, cache, max_seqlen=5, max_kv_len=11)

    for made, at, words in (
        (decoded, (1, 1, 2), "row 1 of the decode step, layer 0"),
        (prefilled, (0, 0, 0), "chunk 0 of the prefill, layer 5"),
    ):  # fmt: skip
        cache.tables.copy_(right)
        check.begin()
        batch = made()
        check.raise_if_found(plan)
        assert all(bool((slots > 0).all()) for slots in batch.slots.values())
        assert torch.equal(cache.tables, right)

        cache.tables[at] = 999
        check.begin()
        batch = made()
        with pytest.raises(PageError, match=f"^rank 0 of 2: {words} .* page 999;"):
            check.raise_if_found(plan)
        assert not cache.tables.any()
        assert not any(slots.any() for slots in batch.slots.values())
