"""Kernels that replace several: what they replace, and who says whether a step asks them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from played_gpu import PlayedGpu
from sheets import PlayedCompiler
from test_decode_layers import MODELS as TINY_MODELS
from test_decode_layers import PROMPT
from torch import Tensor

from kerngen.arch import Target, find_arch, find_device
from kerngen.compiler.cache import CachedCompiler, CompileCache
from kerngen.compiler.render import render
from kerngen.errors import ProblemError
from kerngen.runtime.batch import Batch
from kerngen.runtime.cache import KVCache
from kerngen.runtime.config import Keeping
from kerngen.runtime.executors.launch import Launch
from kerngen.runtime.executors.record import Record
from kerngen.runtime.executors.reference import Reference
from kerngen.runtime.executors.trace import Trace
from kerngen.runtime.model import Gemma4
from kerngen.runtime.ops.kernels import KernelOps
from kerngen.runtime.selection import DEFAULT, Selector, default_selector
from kerngen.runtime.weights.synthetic import synthetic_model
from kerngen.templates import find_kernel, kernel_names
from kerngen.templates.call import Call
from kerngen.templates.kernel import Kernel, defaults_of, fields_of, static_fields, trimmed
from kerngen.tuning.ab import InStep, Trial, apart_for, places_of, unasked_places
from kerngen.tuning.ab_plan import Candidate
from kerngen.tuning.ab_rows import Rows
from kerngen.tuning.objective import Measured
from kerngen.tuning.space import candidates, on_grid
from kerngen.tuning.tuner import Tuner
from kerngen.tuning.worker import Observed
from kerngen.tuning_db import Measurement, Store, open_source, problem_key
from kerngen.workload.steps import Step, launch_counts, recorder
from kerngen.workload.workload import MODELS, Item, _on_grid, find_model, workload

SM90, H200 = find_arch("sm90"), Target.of(find_device("H200"))
FUSED = [k for k in map(find_kernel, kernel_names()) if k.is_fused]
STEPS = (
    Step.decode(1, 64), Step.decode(1, 8192), Step.decode(2, 512), Step.decode(8, 512), Step.verify(1, 4, 512),
    Step.verify(2, 4, 512), Step.draft(1, 512), Step.draft(1, 32768), Step.draft(2, 64), Step.prefill(1, 64),
    Step.prefill(64, 512),
)  # fmt: skip


def supported(kernel: Kernel, problem: Any) -> bool:
    return kernel.why_unsupported(problem, Target.of(SM90)) is None


def never(kernel: Kernel, problem: Any) -> bool:
    return False


@pytest.mark.parametrize("weights", ["stored", "int4"])
@pytest.mark.parametrize("name", MODELS)
def test_they_replace_the_very_launches_that_a_step_makes_without_them(name: str, weights: str) -> None:
    model, met = find_model(name, kept=Keeping(weights)), set[str]()
    for step in STEPS:
        apart = Counter[tuple[str, Any]]()
        for (kernel, problem), count in launch_counts(model, step, SM90, supported).items():
            replaced = find_kernel(kernel).replaces(problem)
            met |= {kernel} if replaced else set()
            for each in replaced or [(kernel, problem)]:
                apart[each] += count
        assert apart == launch_counts(model, step, SM90, never), step.name
    assert met == {k.name for k in FUSED}


@pytest.mark.parametrize("name", MODELS)
def test_a_workload_has_both_ways_and_counts_the_default_one(name: str) -> None:
    model = find_model(name)
    load = workload(model, SM90)
    known = {(item.kernel, item.problem) for item in load.items}
    for step in (Step.decode(1, 8192), Step.decode(2, 512), Step.verify(1, 4, 512), Step.draft(1, 512)):
        for fuses in (supported, never):
            asked = {(k, _on_grid(p)) for k, p in launch_counts(model, step, SM90, fuses)}
            assert asked <= known, step.name
        counted = Counter[tuple[str, Any]]()
        for item, count in load.step(step.phase, step.batch, step.context, step.q_len):
            counted[item.kernel, item.problem] += count
        usual = Counter[tuple[str, Any]]()
        for (kernel, problem), count in launch_counts(model, step, SM90).items():
            usual[kernel, _on_grid(problem)] += count
        assert counted == usual, step.name


@pytest.mark.parametrize("kernel", FUSED, ids=lambda k: k.name)
def test_the_field_changes_neither_source_nor_launches_nor_what_is_filed(kernel: Kernel) -> None:
    for case in kernel.cases.CASES[:4]:
        if kernel.why_unsupported(case.problem, H200) is not None:
            continue
        asked, not_asked = (replace(kernel.default_config(case.problem, H200), fused=f) for f in (True, False))
        assert kernel.why_invalid(case.problem, not_asked, H200) is None
        assert render(kernel, case.problem, asked, H200) == render(kernel, case.problem, not_asked, H200)
        assert kernel.launches(case.problem, asked, H200) == kernel.launches(case.problem, not_asked, H200)
        filed = trimmed(fields_of(asked), defaults_of(kernel.config_type))
        assert "fused" not in filed
        assert trimmed(fields_of(not_asked), defaults_of(kernel.config_type)) == filed | {"fused": False}


def test_the_default_says_what_the_cost_model_does() -> None:
    """A key costs decode_layers more than attn_decode: of the 31B's long contexts the kernels of layers are faster."""
    launched = launch_counts(find_model("gemma-4-31b"), Step.decode(1, 512), SM90)
    (problem,) = (p for k, p in launched if k == "decode_layers")
    kernel = find_kernel("decode_layers")

    def fused(kv_format: str) -> list[bool]:
        each = (replace(problem, kv_len=n, kv_format=kv_format) for n in (512, 32768, 131072, 262144, 1 << 20))
        return [kernel.default_config(p, H200).fused for p in each]

    assert fused("plain") == fused("shared_int8") == [True, True, True, False, False]
    assert fused("int8") == [True, True, False, False, False]


def test_what_no_configuration_serves_is_not_asked() -> None:
    kernel = find_kernel("w4a16_norm")
    problem = kernel.problem_type(num_tokens=4)
    assert default_selector(H200).fuses(kernel, problem)
    assert not default_selector(H200).fuses(kernel, replace(problem, num_tokens=9))
    assert not default_selector(Target.of(find_arch("sm80"))).fuses(kernel, problem)


# -- rows


def store_with(path: Path, kernel: Kernel, problem: Any, **changes: Any) -> Path:
    """A database whose winner for `problem` is its default with `changes`."""
    config = replace(kernel.default_config(problem, H200), **changes)
    source = render(kernel, problem, config, H200)
    made = PlayedCompiler().submit(source, H200.arch).result()
    key = problem_key(kernel, problem)
    with Store.open(path) as store:
        build = store.add_build(made, kernel.name, source, fields_of(config), static_fields(problem))
        store.add_measurement(Measurement(
            problem=key, arch=H200.arch.name, device=H200.device, config=fields_of(config), build_id=build,
            outcome="ok", provenance="measured", p50_us=10.0, p10_us=10.0, p90_us=10.0, samples=10, error_abs=0.0,
        ))  # fmt: skip
        winners = {w.problem.id: w for w in store.recompute_winners(kernel, key.static_key, H200)}
        assert winners[key.id].config == fields_of(config)
    return path


class Rowed(Reference):
    """The reference executor, asked as `selector` says, and what it ran."""

    def __init__(self, selector: Selector) -> None:
        super().__init__(target=H200)
        self.selector, self.asked = selector, list[tuple[str, Any]]()

    def fuses(self, call: Call[Any], where: str) -> bool:
        return self.selector.fuses(find_kernel(call.kernel), call.problem)

    def run(self, call: Any, where: str) -> Any:
        self.asked.append((call.kernel, call.problem))
        return super().run(call, where)


def stepped(selector: Selector, ids: Sequence[int]) -> tuple[Tensor, list[tuple[str, Any]]]:
    """What a step of these tokens gives behind a prompt, and what it asked."""
    config, executor = TINY_MODELS["both"], Rowed(selector)
    ops = KernelOps(executor, torch.bfloat16)
    model = Gemma4(config, synthetic_model(config, ops, 0), ops)
    cache = KVCache.whole(config, ops, batch=1, max_len=32, page_size=16)
    model.forward(Batch.prefill(PROMPT, 0, cache), cache, outputs="none")
    executor.asked.clear()
    lengths = torch.tensor([len(PROMPT)])
    return model.forward(Batch.decode(torch.tensor([ids]), lengths, cache, 32, ops), cache), executor.asked


@pytest.mark.parametrize(("name", "ids", "instead"), [
    ("decode_layers", [4], "attn_decode"), ("w4a16_norm", [4, 5, 6], "add_norm"),
])  # fmt: skip
def test_a_row_decides_what_a_step_asks_and_its_tokens_stay(
    name: str, ids: list[int], instead: str, tmp_path: Path
) -> None:
    kernel = find_kernel(name)
    rows, asked = stepped(default_selector(H200), ids)
    problems = dict.fromkeys(p for k, p in asked if k == name)
    assert problems
    assert instead not in {k for k, _ in asked}
    for i, problem in enumerate(problems):
        store_with(tmp_path / f"{i}.sqlite", kernel, problem, fused=False)
    with ExitStack() as stack:
        sources: list[Any] = [stack.enter_context(open_source(place)) for place in tmp_path.glob("*.sqlite")]
        selector = Selector(sources, H200)
        assert all(selector.choice(kernel, problem).source != DEFAULT for problem in problems)
        same, others = stepped(selector, ids)
    assert name not in {k for k, _ in others}
    assert instead in {k for k, _ in others}
    assert torch.equal(same, rows)


@pytest.mark.parametrize("fused", [True, False])
def test_a_space_has_what_steps_ask_now(fused: bool) -> None:
    kernel = find_kernel("w4a16_norm")
    problem = kernel.problem_type(k=21504, num_tokens=8)
    found = candidates(kernel, problem, H200, fused)
    assert {c.fused for c in found.askable} == {found.default.fused} == {fused}
    assert found.own(replace(found.default, fused=not fused)) == found.default
    assert on_grid(found.space, found.valid[0]) is not None
    assert {c.fused for c in candidates(kernel, problem, H200).askable} == {kernel.default_config(problem, H200).fused}


def test_a_tune_of_the_kernel_alone_leaves_what_steps_ask(tmp_path: Path) -> None:
    """Its winner outranks the row that says so, and keeps its word, whichever configuration is the fastest."""
    kernel = find_kernel("w4a16_norm")
    problem = kernel.problem_type(k=21504, num_tokens=4)
    place = store_with(tmp_path / "row.sqlite", kernel, problem, fused=False)
    assert kernel.default_config(problem, H200).fused
    gpu: Any = PlayedGpu(lambda _, config: 5.0 + config.num_stages)
    with Store.open(place) as store, CachedCompiler(1, CompileCache(tmp_path / "cache")) as compiler:
        report = Tuner(Measured(gpu), store, compiler, trials=3).run([Item(kernel.name, problem)])
    (result,) = report.results
    assert result.winner is not None
    assert {config.fused for _, config in gpu.measured} == {False}
    assert result.winner.config["fused"] is False


def test_the_choice_is_made_once_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = find_kernel("w4a16_norm")
    problem = kernel.problem_type(k=21504, num_tokens=4)
    with open_source(store_with(tmp_path / "row.sqlite", kernel, problem, fused=False)) as source:  # type: ignore[attr-defined]
        selector = Selector([source], H200)
        launcher: Any = SimpleNamespace(index=77, target=H200, fuses=selector.fuses)
        executor = Launch(launcher)
        call: Call[Any] = Call("w4a16_norm", problem, {}, None)
        assert not executor.fuses(call, "down")
        monkeypatch.setattr(selector, "choice", lambda *_: pytest.fail("it is known"))
        assert not executor.fuses(call, "down")
        assert not Trace(executor).fuses(call, "down")
        assert not executor.fuses(Call("w4a16_norm", None, {}, None), "nothing to compute")


def test_a_record_tells_the_way_that_a_step_does_not_go() -> None:
    model, step = find_model("gemma-4-31b"), Step.verify(1, 4, 512)
    found = {}
    for name, fuses in (("fused", supported), ("apart", never)):
        asked, other = set[Any](), set[Any]()
        recorder(model.target, model.drafter, SM90).record(
            step, lambda *c, to=asked: to.add(c[:2]), other=lambda *c, to=other: to.add(c[:2]), fuses=fuses
        )
        assert not asked & other
        found[name] = asked, other
    assert found["fused"][0] - found["apart"][0] == found["apart"][1]
    assert found["apart"][0] - found["fused"][0] == found["fused"][1]


def test_where_no_other_kernel_serves_it_there_is_no_other_way() -> None:
    kernel = find_kernel("decode_layers")
    problem = kernel.problem_type(num_q_heads=48, num_kv_heads=16, num_full_kv_heads=16)  # three to a KV head
    with pytest.raises(ProblemError, match="3 q heads per kv head"):
        kernel.replaces(problem)
    assert kernel.default_config(replace(problem, kv_len=1 << 20), H200).fused
    told: list[str] = []
    record = Record(lambda *_: None, told.append, H200, note_other=lambda name, *_: told.append(name))
    assert record.fuses(Call("decode_layers", problem, {}, None), "all layers")
    assert told == []


def test_an_ab_in_a_step_may_have_it_ask_what_it_does_not_by_default() -> None:
    model, step = find_model("gemma-4-31b"), Step.decode(1, 262144)
    (place,) = unasked_places(model, step, H200)
    assert (place.entry.kernel.name, place.launches) == ("decode_layers", 1)
    assert not unasked_places(model, Step.decode(1, 512), H200)


def test_an_ab_of_a_kernel_that_is_replaced_has_the_step_ask_it() -> None:
    model, step = find_model("gemma-4-31b"), Step.verify(1, 4, 512)
    usual = {p.called for p in places_of(model, step, H200)}
    norm = next(p for k, p in usual if k == "w4a16_norm" and p.k == 21504)
    wanted = [c for c in find_kernel("w4a16_norm").replaces(norm) if c[0] == "w4a16_gemm"]
    assert usual.isdisjoint(wanted)
    apart = apart_for(model, step, H200, wanted)
    assert apart == {("w4a16_norm", norm): False}
    launched = {p.called for p in places_of(model, step, H200, fused=apart)}
    assert launched == usual - {("w4a16_norm", norm)} | set(find_kernel("w4a16_norm").replaces(norm))
    assert not apart_for(model, step, H200, usual)


@pytest.mark.parametrize("ratio", [0.97, 1.03])
def test_an_ab_in_the_step_decides_whether_it_is_asked(ratio: float, tmp_path: Path) -> None:
    model, step = find_model("gemma-4-31b"), Step.verify(1, 4, 512)
    place = next(p for p in places_of(model, step, H200, ["w4a16_norm"]) if p.entry.problem.k == 21504)
    kernel, problem = place.entry.kernel, place.entry.problem
    default = kernel.default_config(problem, H200)
    gpu: Any = PlayedGpu(factors=lambda _, config, pairs: 1.0 if config.fused else ratio)
    with Store.open(tmp_path / "ab.sqlite") as store:
        rows = Rows(store, H200, gpu)
        for config in (default, replace(default, fused=False)):
            source = render(kernel, problem, config, H200)
            made = PlayedCompiler().submit(source, H200.arch).result()
            seen = Observed("ok", "", 5.0, 5.0, 5.0, 5.0, 8, 0.0, 0.0)
            place.trials.append(Trial(place.entry, Candidate(config), source, made, seen))
            rows.add(place.trials[-1], seen)
        looks = list(InStep(model, step, [place], gpu, rows, 0.001).round())
        assert [look.kept for look in looks] == ([False, True] if ratio < 1 else [False])
        rows.flush()
        found = [o.measurement for o in store.measurements()]
        assert sorted((m.stage, m.config["fused"]) for m in found) == sorted(
            [("trial", True), *[("step", f) for f in (True, False)] * len(looks)]
        )
        (winner,) = store.recompute_winners(kernel, problem_key(kernel, problem).static_key, H200)
    assert winner.config["fused"] == (ratio > 1)
