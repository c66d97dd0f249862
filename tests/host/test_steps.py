"""Steps as sequences of launches: against the workload's counts, and shortened ones against whole ones."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest

from kerngen.arch import find_arch
from kerngen.errors import UsageError
from kerngen.workload.steps import STEPS, Step, sequence, shares, shortened, steps_for
from kerngen.workload.workload import MODELS, Item, Model, find_model, find_workload, workload

SM90 = find_arch("sm90")


@pytest.mark.parametrize(("arch", "model"), [("sm70", "gemma-4-31b"), *(("sm90", model) for model in MODELS)])
def test_a_step_launches_what_the_workload_counts(model: str, arch: str) -> None:
    a = find_arch(arch)
    load, found = find_workload(model, a), find_model(model)
    served: dict[tuple[str, object], Item | None] = {}
    weighed = [w.step for w in steps_for(load)]
    assert weighed == [step for step, _ in STEPS]
    for step in {*weighed, *load.steps[::7]}:
        counted = Counter[Item | None]()
        for launched in sequence(found, step, a):
            key = launched.kernel, launched.problem
            served.setdefault(key, load.serving(*key))
            counted[served[key]] += 1
        expected = dict(load.step(step.phase, step.batch, step.context, step.q_len, chunk=step.chunk))
        assert counted == expected, step.name


def test_launches_are_in_the_order_of_the_model() -> None:
    first, last = ["decode_inputs", "embed", "rmsnorm"], ["greedy_head", "decode_advance"]
    attention, by_two = ["w4a16_gemm", "attn_decode"], ["w4a16_gemm", "add_norm"]
    launches = sequence(find_model("gemma-4-31b"), Step.decode(16, 512), SM90)
    layer = [*attention, *by_two, "w4a16_gemm", *by_two]
    assert [x.kernel for x in launches] == [*first, *layer * 60, *last]
    # of eight tokens norms take the rows of long products as they are posted: of the MLPs at least
    launches = sequence(find_model("gemma-4-31b"), Step.decode(8, 512), SM90)
    apart = [kernel for x in launches for kernel in (by_two if x.kernel == "w4a16_norm" else [x.kernel])]
    assert apart == [*first, *layer * 60, *last]
    assert sum(x.kernel == "w4a16_norm" and x.problem.k == 21504 for x in launches) == 60
    places = [x.where for x in launches if x.kernel == "attn_decode"]
    assert [p.endswith("(full)") for p in places] == ([False] * 5 + [True]) * 10


def _total(model: Model, step: Step) -> Counter[tuple[str, object]]:
    return Counter((x.kernel, x.problem) for x in sequence(model, step, SM90))


@pytest.mark.parametrize(
    ("name", "kept"), [("gemma-4-31b", 12), ("gemma-4-12b", 12), ("gemma-4-26b-a4b", 12), ("gemma-4-e4b", 42)]
)
def test_two_periods_of_layers_stand_for_all(name: str, kept: int) -> None:
    """But where a table is as wide as the model has layers."""
    model = find_model(name)
    for step in (Step.decode(8, 512), Step.verify(1, 5, 512), Step.prefill(2048, 2048)):
        short, repeat = shortened(model, step, SM90)
        assert len(repeat.layers) == len(short.target.layers) == kept
        assert repeat.is_whole == (kept == len(model.target.layers))
        whole, few = _total(model, step), _total(short, step)
        assert {key: n * repeat.times(*key) for key, n in few.items()} == whole
    attention = {key: repeat.times(*key) for key in few if key[0] == "attn_prefill"}
    assert set(attention.values()) == {len(model.target.layers) / kept}


def test_a_step_of_one_kernel_for_all_layers_stays_whole() -> None:
    model = find_model("gemma-4-31b")
    short, repeat = shortened(model, Step.decode(1, 512), SM90)
    assert short is model
    assert repeat.is_whole
    assert {repeat.times(*key) for key in repeat.counts} == {1.0}
    assert not shortened(model, Step.decode(1, 262144), SM90)[1].is_whole


def test_layers_that_differ_are_all_kept() -> None:
    """One odd layer cuts the others in two runs, of which those that share K and V repeat by themselves."""
    model = find_model("gemma-4-31b")
    layers = list(model.target.layers)
    layers[32] = replace(layers[32], window=512)
    for i in range(36, 60):
        layers[i] = replace(layers[i], kv_source=34 if layers[i].is_sliding else 35)
    odd = Model("odd", replace(model.target, layers=tuple(layers)), None)
    for step in (Step.decode(8, 2048), Step.prefill(512, 512)):
        short, repeat = shortened(odd, step, SM90)
        assert repeat.layers == (*range(12), *range(30, 48))
        whole, few = _total(odd, step), _total(short, step)
        assert whole.keys() == few.keys()
        assert {key: n * repeat.times(*key) for key, n in few.items()} == pytest.approx(dict(whole))
        assert {x.kv_source for x in short.target.layers if not x.owns_kv} == {16, 17}


def test_shares_are_what_the_mean_gains() -> None:
    load = find_workload("gemma-4-26b-a4b", SM90)
    steps = steps_for(load)
    times = {item: 1.0 + i % 7 for i, item in enumerate(load.items)}
    parts = shares(steps, times.__getitem__)
    assert sum(parts.values()) == pytest.approx(1.0)
    assert sum(w.weight for w in steps) == pytest.approx(1.0)

    def mean() -> float:
        return sum(w.weight * math.log(sum(n * times[i] for i, n in w.launches)) for w in steps)

    before = mean()
    for item in sorted(parts, key=lambda i: -parts[i])[:5]:
        times[item] *= 0.999
        assert (mean() - before) / math.log(0.999) == pytest.approx(parts[item], rel=2e-3)
        times[item] /= 0.999


def test_a_step_that_the_model_cannot_take_is_refused() -> None:
    model = find_model("gemma-4-e2b")
    with pytest.raises(UsageError, match=r"batch 1, context 262144.*gemma-4-e2b.* 131072 "):
        sequence(model, Step.decode(1, 262144), SM90)
    with pytest.raises(UsageError, match=r"draft, batch 1, context 64.*no drafter"):
        sequence(replace(model, drafter=None), Step.draft(1, 64), SM90)
    with pytest.raises(UsageError, match=r"prefill 65 tokens of 64\b"):
        sequence(model, Step.prefill(65, 64), SM90)
    with pytest.raises(UsageError, match=r"verify 9 tokens.*takes 1 to 8"):
        sequence(model, Step.verify(1, 9, 64), SM90)
    alone = workload(replace(model, drafter=None), SM90)
    assert "draft" not in {w.step.phase for w in steps_for(alone)}
