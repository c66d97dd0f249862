"""Steps whose pages are checked on the GPU, most of them CUDA graphs: what is right changes no token, and what is
corrupt is named and read by nobody. The kernel's own cases are test_kernels.py's.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kerngen.errors import PageError, RankFailed
from kerngen.runtime.engine import Engine, Handle, Request, page_check
from kerngen.runtime.engine.plan import StepPlan
from kerngen.runtime.engine.runner import LENGTH, Agree, Runner, StepOutput
from kerngen.runtime.ops.kernels import KernelOps
from kerngen.runtime.session import Session, load

TINY = Path(__file__).parents[2] / "examples" / "tiny"
TEXT = (TINY / "prompt.txt").read_text()
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def engine_of(session: Session, drafts: int) -> Engine:
    """With few pages, so that requests wait or are preempted, and steps captured."""
    pages = {"full": 20, "sliding": 30}
    engine = Engine(session.model, session.drafter, max_len=200, max_batch=3, num_draft_tokens=drafts, page_size=16,
                    num_pages=pages)  # fmt: skip
    engine.make_ready()
    return engine


@pytest.fixture(scope="module")
def session() -> Session:
    return load(TINY / "gemma-4-tiny-w4a16", draft=TINY / "gemma-4-tiny-assistant")


@pytest.fixture(scope="module")
def requests(session: Session) -> list[Request]:
    """Of a text that the model was trained for: where two tokens are all but equal, rounding would choose."""
    return [Request(session.encode(text, chat=False)[:120], 40) for text in (TEXT[:90], "Once upon a time", TEXT)]


@pytest.fixture(scope="module", params=[0, 3], ids=["plain", "drafts"])
def engines(request: pytest.FixtureRequest, session: Session) -> tuple[Engine, Engine]:
    """One that checks nothing, and one that does."""
    unchecked = engine_of(session, request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(page_check.VARIABLE, "1")
        return unchecked, engine_of(session, request.param)


@pytest.fixture(autouse=True)
def dumps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def launched(session: Session) -> set[str]:
    assert isinstance(session.ops, KernelOps)
    return {name for name, _, _ in session.ops.executor.launcher.functions}  # type: ignore[attr-defined]


def test_what_is_right_is_let_through(
    session: Session, engines: tuple[Engine, Engine], requests: list[Request]
) -> None:
    """The same requests twice, in the same order of steps: graphs of both kinds, prefixes, and pages that run out."""
    unchecked, checked = engines
    assert unchecked.cache.check is None
    assert unchecked.load.num_graphs > 0
    assert checked.load.num_graphs > 0
    assert "check_pages" in launched(session)
    for _ in range(2):
        made = [engine.generate_many([*requests, *requests]) for engine in engines]
        for one, other in zip(*made, strict=True):
            assert other.tokens[:8] == one.tokens[:8]


def running(engine: Engine, requests: list[Request]) -> list[Handle]:
    handles = [engine.submit(r) for r in requests[:2]]
    while len(engine.scheduler.running) < 2:
        engine.step()
    for _ in range(3):  # graphs are there
        engine.step()
    return handles


def corrupt_entry(runner: Runner) -> None:
    runner.cache.groups["full"].block_table[1, 0] = 1 << 30


def corrupt_window(runner: Runner) -> None:
    runner.cache.groups["sliding"].block_table[1, 0] = 0


def corrupt_length(runner: Runner) -> None:
    runner.ints[LENGTH, 1] = 1 << 40


def corrupt_owner(runner: Runner) -> None:
    table = runner.cache.groups["full"].block_table
    size = runner.cache.page_size
    first, second = (int(n) // size for n in runner.ints[LENGTH, :2])
    table[1, second] = table[0, first]


FAULTS: dict[str, tuple[Callable[[Runner], None], str]] = {
    "entry": (corrupt_entry, r"layer \d+ \(full .*entry 0 .* page 1,073,741,824; allowed are 0 to 19"),
    "page 0": (corrupt_window, r"layer \d+ \(sliding .*entry 0 .* page 0, which belongs to nobody"),
    "length": (corrupt_length, r"all layers: 1,099,511,627,\d+ tokens"),
    "owner": (corrupt_owner, r"layer \d+ \(full .*, which request \d+ \(row 0 of the decode step\) writes"),
}


@pytest.fixture
def broken(engines: tuple[Engine, Engine]) -> Iterator[Callable[[Callable[[Runner], None]], Engine]]:
    """The engine that checks, whose next step finds its rows changed so."""
    engine = engines[1]

    def breaking(corrupt: Callable[[Runner], None]) -> Engine:
        decode = engine.runner._decode

        def broken_decode(*given: object) -> object:
            corrupt(engine.runner)
            return decode(*given)  # type: ignore[arg-type]

        engine.runner._decode = broken_decode  # type: ignore[method-assign, assignment]
        return engine

    yield breaking
    vars(engine.runner).pop("_decode", None)


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_corrupt_in_a_graph_is_named(
    engines: tuple[Engine, Engine],
    requests: list[Request],
    broken: Callable[[Callable[[Runner], None]], Engine],
    name: str,
) -> None:
    """The file has the rows as the replay saw them; the context lives, and the engine goes on."""
    corrupt, words = FAULTS[name]
    handles = running(engines[1], requests)
    graphs = engines[1].load.num_graphs
    engine = broken(corrupt)
    with pytest.raises(PageError, match=words) as caught:
        engine.step()
    assert engine.load.num_graphs == graphs, "the step was no replay"
    vars(engine.runner).pop("_decode")
    assert caught.value.message.startswith(f"request {handles[1].order} (row 1 of the decode step), ")
    path = re.search(r"numpy.load\('(.*)'\)", str(caught.value.hint))
    assert path, caught.value.hint
    with np.load(path[1]) as step:
        kind, row, pool, entry, value, _ = step["violation"].tolist()
        assert row == page_check.DECODE_ROW + 1
        held = step["decode_kv_lens"][1] if kind == 1 else step["decode_tables"][pool, 1, entry]
        assert held == value
        assert StepPlan.from_json(str(step["plan"]), engine.runner.limits).requests == (
            handles[0].order,
            handles[1].order,
        )
    torch.cuda.synchronize()
    while engine.has_work:
        engine.step()
    assert all(h.error is None and len(h.tokens) == 40 for h in handles)


def other_page(plan: StepPlan) -> StepPlan:
    """With a page for its first chunk that the pool does not have."""
    first, *others = plan.chunks
    full, sliding = first.pages
    return replace(plan, chunks=(replace(first, pages=((*full[:-1], 1 << 20), sliding)), *others))


def test_a_page_of_a_short_prefill_in_a_graph_is_named(engines: tuple[Engine, Engine], requests: list[Request]) -> None:
    engine = engines[1]
    run, in_graphs = engine.runner._run, list[int]()
    engine.runner.prefill_graphs.padded = None  # whatever took less: all are padded

    def broken_run(plan: StepPlan, agree: Agree) -> StepOutput:
        in_graphs.append(plan.num_tokens)
        return run(other_page(plan), agree)

    handle = engine.submit(requests[1])
    engine.runner._run = broken_run  # type: ignore[method-assign]
    with pytest.raises(PageError, match=r"chunk 0 of the prefill\), layer \d+ \(full .*page 1,048,576; allowed"):
        engine.step()
    del engine.runner._run  # type: ignore[misc]
    assert in_graphs == [64]
    while engine.has_work:
        engine.step()
    assert len(handle.tokens) == 40


@needs_two
def test_each_rank_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is right makes tokens; a plan that names a page that no rank has ends the group, and a rank is named."""
    monkeypatch.setenv(page_check.VARIABLE, "1")
    session = load(TINY / "gemma-4-tiny-w4a16", draft=False, max_len=256, tensor_parallel=2)
    assert session.ranks is not None
    try:
        made = session.generate("Once upon a time", chat=False, max_new_tokens=8)
        assert made.tokens
        engine, run = session.reserve(256), session.ranks.run
        monkeypatch.setattr(session.ranks, "run", lambda runner, plan: run(runner, other_page(plan)))
        engine.submit(Request([2, *range(300, 309)], 8))
        with pytest.raises((PageError, RankFailed), match=r"rank [01].*chunk 0 of the prefill.*page 1,048,576"):
            engine.step()
    finally:
        session.ranks.close()
