"""What will run: bound once, then bisected, with nothing on the way of a request that a length never seen could hit."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from sheets import measured_store
from test_fused import store_with

from kerngen.arch import Target, find_arch, find_device
from kerngen.cli.db.inspect import explain
from kerngen.compiler import render as rendering
from kerngen.compiler.builds import choices
from kerngen.runtime import selection as selection_module
from kerngen.runtime.selection import DEFAULT, Selector
from kerngen.templates import find_kernel
from kerngen.tuning_db import Source, Store, lookup, open_source
from kerngen.tuning_db.dist.fields_text import as_json
from kerngen.tuning_db.dist.results_folder import build
from kerngen.tuning_db.dist.results_parser import parse
from kerngen.tuning_db.read.canonical_fields import filed_device
from kerngen.tuning_db.read.freshness import Freshness
from kerngen.tuning_db.read.ids import bucketed, buckets_above
from kerngen.tuning_db.read.reader import Reader
from kerngen.workload.workload import Item, Workload

H200 = Target.of(find_device("H200"))
GEMM = find_kernel("w4a16_gemm")
DECODE = find_kernel("attn_decode")
NORM = find_kernel("add_norm")
DOWN = GEMM.problem_type(n=5376, k=21504)
BETWEEN = NORM.problem_type(has_scalar=True)  # layers of the 31B, whose winners are shipped
GLOBAL = DECODE.problem_type(head_dim=512, num_q_heads=32, num_kv_heads=4)
MOST_US = 100  # a query or rendering takes milliseconds; this takes 4 on an idle host, and 45 were seen on a busy one


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Source]]:
    """What an H200 measured, whatever the user's own holds."""
    source = open_source(measured_store(tmp_path_factory.mktemp("binding") / "h200.sqlite"))
    assert isinstance(source, Reader)
    with source:
        yield [source]


@pytest.mark.parametrize("tokens", [1, 3, 8, 9, 100, 256, 3000, 8192])
def test_a_bound_problem_gets_what_a_lookup_answers(stores: list[Source], tokens: int) -> None:
    problem = replace(BETWEEN, num_tokens=tokens)
    winner = lookup(stores, NORM, problem, H200)
    assert winner is not None
    choice = Selector(stores, H200).choice(NORM, problem)
    assert choice.config == NORM.config_type(**winner.config)
    assert choice.provenance == "measured"
    assert choice.cubin is not None
    assert choice.cubin.image == winner.cubin.image


def test_beyond_the_tuned_interval_the_default_serves(stores: list[Source]) -> None:
    selector = Selector(stores, H200)
    above, near = (selector.choice(NORM, replace(BETWEEN, num_tokens=t)) for t in (20000, 20001))
    assert above.source == DEFAULT
    assert above is near, "one default serves the lengths up to the next power of two"
    assert above.config == NORM.default_config(replace(BETWEEN, num_tokens=32768), H200)


def test_between_two_defaults_the_kernel_prefers_one_of_them() -> None:
    """Of 384 tokens tiles of 256 leave a third empty, of 192 none, and 81 need none of 128. Bundles have all:
    defaults of powers of two, and of those `between` them.
    """
    problem, selector = GEMM.problem_type(n=43008, k=5376), Selector([], H200)
    lengths = [length for i in range(14) for length in (1 << i, *selection_module.between(1 << i))]
    defaults = {m: GEMM.default_config(replace(problem, num_tokens=m), H200) for m in lengths}
    for m in (40, 80, 81, 97):
        assert m <= selector.choice(GEMM, replace(problem, num_tokens=m)).config.block_m < 1.4 * m
    chosen = selector.choice(GEMM, replace(problem, num_tokens=384))
    assert (chosen.config.block_m, defaults[512].block_m) == (192, 256)
    assert chosen is selector.choice(GEMM, replace(problem, num_tokens=380))
    known = set(defaults.values())
    assert all(selector.choice(GEMM, replace(problem, num_tokens=m)).config in known for m in range(9, 2000, 7))
    assert all(selector.choice(GEMM, replace(problem, num_tokens=1 << i)).config == defaults[1 << i] for i in range(14))


@pytest.mark.parametrize("problem", [
    GEMM.problem_type(n=5376, k=8192), DOWN, GEMM.problem_type(n=1056, k=352), BETWEEN,
], ids=["tuned", "tuned, long rows", "of no model", "rmsnorm"])  # fmt: skip
def test_telling_lengths_have_every_choice_up_to_the_most(stores: list[Source], problem: Any) -> None:
    kernel, most = (NORM if problem is BETWEEN else GEMM), 5000
    for sources in (stores, []):
        selector = Selector(sources, H200)
        lengths = selector.telling_lengths(kernel, problem, most)
        assert lengths == sorted(set(lengths))
        assert (lengths[0], lengths[-1]) == (1, most)
        assert len(lengths) < most / 5, "or one could ask for all of them"
        by_length = [selector.choice(kernel, replace(problem, num_tokens=t)) for t in range(1, most + 1)]
        told = {id(by_length[t - 1]) for t in lengths}
        assert [t for t, choice in enumerate(by_length, 1) if id(choice) not in told] == []
        assert selector.telling_lengths(kernel, problem, 3) == [1, 2, 3]


def test_a_default_does_not_depend_on_who_asked_first() -> None:
    """Batches of 19 and 20 share one, and 19's own would deal each sequence's keys out to more blocks."""
    few, many = (replace(GLOBAL, batch=batch, kv_len=8192) for batch in (19, 20))
    selector = Selector([], H200)
    assert selector.choice(DECODE, few) is selector.choice(DECODE, many)
    assert selector.choice(DECODE, few).config == DECODE.default_config(many, H200) != DECODE.default_config(few, H200)


def test_a_field_may_have_defaults_at_finer_steps() -> None:
    """The SMs are dealt to sequences: of seven each gets more than of eight."""
    problem = DECODE.problem_type(head_dim=512, num_q_heads=16, num_kv_heads=2, q_len=5, kv_len=8192)
    selector = Selector([], H200)
    sizes = [1, 2, 3, 4, 5, 7, 8, 13, 16, *range(18, 33, 2), *range(36, 65, 4)]
    assert sizes == sorted({*sizes} & {n for power in (1, 2, 4, 8, 16, 32, 64) for n in _steps_to(power)})
    for batch in sizes:
        own = DECODE.default_config(replace(problem, batch=batch), H200)
        assert selector.choice(DECODE, replace(problem, batch=batch)).config == own
    seven, eight = (selector.choice(DECODE, replace(problem, batch=batch)).config for batch in (7, 8))
    assert (seven.num_splits, eight.num_splits) == (9, 8)
    between = replace(problem, batch=33)
    assert selector.choice(DECODE, between) is selector.choice(DECODE, replace(problem, batch=36))
    assert bucketed(DECODE, between) == {"batch": 36}
    assert [b["batch"] for b in buckets_above(DECODE, between)] == [36, 40, 44, 48, 52, 56, 60, 64]
    assert list(buckets_above(NORM, BETWEEN)) == [bucketed(NORM, BETWEEN)], "other kernels have none"


def _steps_to(power: int) -> list[int]:
    return [*selection_module.finer_between(power), power]


def test_one_board_gets_no_other_boards_grid() -> None:
    """An L4 has 58 SMs, and the usual board of its arch 128."""
    problem = GEMM.problem_type(n=43008, k=5376)
    small, usual = Target.of(find_device("L4")), Target.of(find_arch("sm89"))
    config = replace(GEMM.default_config(problem, small), blocks_per_sm=2)
    (ours,), (theirs,) = GEMM.launches(problem, config, small), GEMM.launches(problem, config, usual)
    assert (ours.grid[0], theirs.grid[0]) == (2 * 58, 2 * 128)


def _no(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("a request must neither read a database nor render")


@pytest.mark.parametrize("with_stores", [True, False], ids=["tuned", "defaults"])
@pytest.mark.parametrize(
    ("kernel", "base"), [(NORM, BETWEEN), (DECODE, GLOBAL), (GEMM, DOWN)], ids=["add_norm", "attn_decode", "w4a16_gemm"]
)
def test_a_length_never_seen_costs_a_bisection(
    stores: list[Source], kernel: Any, base: Any, with_stores: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Microseconds a problem, the problem's own checks included; no SQL, no rendering; memory bounded."""
    selector = Selector(stores if with_stores else [], H200)
    lengths = [n for n in range(1, 8192) if n & (n - 1)]
    for n in (*(1 << i for i in range(14)), *range(1, 8192, 8)):  # bind, verify the points, and compare defaults
        selector.choice(kernel, replace(base, **{base.DYNAMIC: n}))
    for owner, name in ((Freshness, "is_current"), (rendering, "render"), (Reader, "_rows")):
        monkeypatch.setattr(owner, name, _no)
    times, chosen = [], set()
    for n in lengths[:3000]:
        began = time.thread_time()
        chosen.add(id(selector.choice(kernel, replace(base, **{base.DYNAMIC: n}))))
        times.append(1e6 * (time.thread_time() - began))
    assert len(chosen) <= 24, "choices are shared by the lengths between two points"
    quietest = min(statistics.median(times[i : i + 300]) for i in range(0, 3000, 300))  # of a machine that others share
    assert quietest < MOST_US, f"{quietest:.1f} us"


def test_what_was_asked_before_is_looked_up_once_and_not_for_ever(
    stores: list[Source], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection_module, "CHOICES_KEPT", 5)
    selector = Selector(stores, H200)
    problems = [replace(BETWEEN, num_tokens=t) for t in (1, 2, 4)] + [replace(GLOBAL, kv_len=512)]
    first = [selector.choice(NORM if isinstance(p, type(BETWEEN)) else DECODE, p) for p in problems]
    with monkeypatch.context() as patch:
        patch.setattr(selection_module.KernelSelector, "choice", _no)
        assert [selector.choice(c.kernel, p) for c, p in zip(first, problems, strict=True)] == first
    for tokens in range(8, 40):
        selector.choice(NORM, replace(BETWEEN, num_tokens=tokens))
        assert len(selector._known) <= 5
    assert [selector.choice(c.kernel, p) for c, p in zip(first, problems, strict=True)] == first


def test_where_the_buckets_default_cannot_run_a_length_its_own_default_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """And is one choice for all lengths that share it: memory stays bounded."""
    wide = GEMM.default_config(DOWN, H200)
    narrow = replace(wide, blocks_per_sm=wide.blocks_per_sm + 1)
    kernel_type = type(GEMM)

    def chosen(kernel: Any, problem: Any, target: Target) -> Any:
        return wide if problem.num_tokens == 32768 else narrow

    def refuses_wide(kernel: Any, problem: Any, config: Any, target: Target) -> str | None:
        return "too wide" if config == wide and problem.num_tokens != 32768 else None

    monkeypatch.setattr(kernel_type, "default_config", chosen)
    monkeypatch.setattr(kernel_type, "why_invalid", refuses_wide)
    selector = Selector([], H200)
    choices = [selector.choice(GEMM, replace(DOWN, num_tokens=t)) for t in (32768, 20000, 20001)]
    assert [c.config for c in choices] == [wide, narrow, narrow]
    assert choices[1] is choices[2]


def test_what_is_tuned_between_the_lengths_of_a_workload_is_built_too(tmp_path: Path) -> None:
    """A bundle has all points of a winner's line, and a run of 70 tokens asks for that of 80."""
    gate = find_kernel("gelu_gate")
    board = f"gelu_gate sm90 H200\nboard {as_json(filed_device(H200.device))}\n"
    text = (
        f'kerngen-results 2 {board}carried c1 "steps"\n\nproblem width=64\n a threads=256 @000000000000\n'
        " b threads=64 @111111111111\n c @222222222222\n | num_tokens 32=b 48=a 64=b 80=c 128=a 256=b\n"
    )
    problems = [gate.problem_type(width=64, num_tokens=n) for n in (64, 128)]
    with Store.open(tmp_path / "carried.db") as store:
        assert build([parse(text)], store, None).faults == []
        selector = Selector([store], H200)
        load = Workload("a model", "sm90", tuple(Item("gelu_gate", p, ()) for p in problems))
        found = {p.num_tokens: choice.config.threads for p, choice in choices(load, selector, Counter())}
        assert found == {64: 64, 80: 128, 128: 256}
        assert selector.choice(gate, replace(problems[0], num_tokens=70)).config.threads == 128


def test_a_row_of_many_more_tokens_gives_way_to_a_default_that_is_predicted_to_be_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tune knows 64 tokens and 128, and none between: of 80 a tile of 128 rows wastes a third."""
    at_128 = GEMM.problem_type(n=16384, k=5376, num_tokens=128)
    path = tmp_path / "short.db"
    for tokens in (64, 128):
        store_with(path, GEMM, replace(at_128, num_tokens=tokens))
    with Store.open(path) as store:
        chosen = {n: Selector([store], H200).choice(GEMM, replace(at_128, num_tokens=n)) for n in (128, 127, 72, 80)}
        assert [chosen[n].winner is not None for n in (128, 127, 72, 80)] == [True, True, False, False]
        assert chosen[128].config.block_m == 128
        assert (chosen[80].config.block_m, chosen[80].source) == (80, DEFAULT)
        monkeypatch.setenv("KERNGEN_NO_COMPILE", "1")
        kept = Selector([store], H200).choice(GEMM, replace(at_128, num_tokens=80))
        assert kept.config.block_m == 128, "its machine code is there, and the default's cannot be made"
    monkeypatch.delenv("KERNGEN_NO_COMPILE")
    asked = ["w4a16_gemm", "--problem", "n=16384,k=5376,num_tokens=80", "--device", "H200", "--db", str(path)]
    said = CliRunner().invoke(explain, asked)
    told = " ".join(said.output.split())
    assert "at num_tokens=80 the cost model prefers: default configuration" in told
    assert "block_m=80" in told
