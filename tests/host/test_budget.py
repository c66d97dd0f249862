"""Where a run's time goes: weights, portions, the reserve, and who is near whom. No kernel, no GPU."""

from __future__ import annotations

import pytest

from kerngen.arch import Target, find_arch
from kerngen.runtime.neighbours import Shape
from kerngen.templates import find_kernel
from kerngen.tuning.budget import CONCLUDED_S, JUDGED, MOST_FOR_FINALS, MOST_WHERE_SHORT, Budget, Weights, portions
from kerngen.tuning.neighbours import Neighbours
from kerngen.tuning.plan import lower_bound_us
from kerngen.tuning_db.read.ids import ProblemKey, problem_key
from kerngen.workload.steps import STEPS
from kerngen.workload.workload import Item, Use, find_workload


def _item(name: str, *uses: Use) -> Item:
    return Item(name, name, uses)


def test_a_problem_weighs_what_it_takes_of_the_steps() -> None:
    (first, weight), *_ = STEPS
    judged = Use("a", first.phase, first.batch, first.q_len, 10, first.context)
    same = Use("b", first.phase, first.batch, first.q_len, 30, 0)  # whatever the context
    other = Use("c", "decode", 3, 1, 1, 512)
    items = [_item("a", judged), _item("b", same), _item("c", other), _item("d")]
    found = Weights(items).of([1.0, 1.0, 5.0, 1.0])
    assert sum(found) == pytest.approx(1)
    assert found[0] / found[1] == pytest.approx(10 / 30)
    assert found[0] + found[1] == pytest.approx(JUDGED)
    assert found[2] == found[3] == pytest.approx((1 - JUDGED) / 2), "a step each; who has none counts as one"
    slower = Weights(items).of([9.0, 1.0, 5.0, 1.0])
    assert slower[0] / slower[1] == pytest.approx(90 / 30)
    assert weight > 0


def test_what_a_step_launches_beside_weighs_nothing() -> None:
    use = Use("a", "decode", 1, 1, 1, 512)
    beside = Use("b", "decode", 1, 1, 0, 512)
    found = Weights([_item("a", use), _item("b", beside, use)]).of([1.0, 1.0])
    assert found == [0.5, 0.5]
    assert Weights([]).of([]) == []
    lone = Weights([_item("a", use), _item("b", beside)]).of([1.0, 1.0])
    assert lone[1] > 0, "it is asked for all the same"


def test_the_layers_of_a_31b_weigh_most_of_a_step() -> None:
    v100 = Target.of(find_arch("sm70"))
    items = find_workload("gemma-4-31b", v100.arch).items
    kernels = [find_kernel(i.kernel) for i in items]
    defaults = [k.default_config(i.problem, v100) for k, i in zip(kernels, items, strict=True)]
    us = [lower_bound_us(k, i.problem, c, v100) for k, i, c in zip(kernels, items, defaults, strict=True)]
    found = Weights(items).of(us)
    assert sum(found) == pytest.approx(1)
    assert min(found) >= 0
    assert sum(w > 0 for w in found) > 0.95 * len(items)
    assert items[found.index(max(found))].kernel == "w4a16_gemm"


def test_portions_go_to_the_most_valuable_and_ties_to_the_first() -> None:
    values = {"a": 1.0, "b": 3.0, "c": 3.0, "d": 0.0}
    assert portions(values, 3) == ["b", "c", "a"]
    assert portions({}, 3) == []


def test_the_reserve_is_what_finals_need_and_no_more_than_a_quarter() -> None:
    now = [10.0]
    budget = Budget(100.0, lambda: now[0], began=5.0, final_s=0.5)
    assert budget.left() == 95
    assert budget.left(waited_s=20) == 115, "waiting for others is not on it"
    assert budget.reserve(10) == 5
    assert budget.reserve(10_000) == 100 * MOST_FOR_FINALS
    short = Budget(60.0, lambda: now[0], 0.0, final_s=1.0, finals_s=40.0)
    assert [short.reserve(n) for n in (5, 1000)] == [5, 60 * MOST_WHERE_SHORT]
    assert Budget(1000.0, lambda: now[0], 0.0, final_s=1.0, finals_s=40.0).reserve(1000) == 250
    whole = Budget(100.0, lambda: now[0], began=5.0, final_s=0.5, num_problems=600)
    assert whole.whole_left() == 95
    assert whole.left() == pytest.approx(95 - 600 * CONCLUDED_S), "what the conclusion takes is kept free"
    assert Budget(None, lambda: now[0], 0.0, 0.5).left() == float("inf")
    assert Budget(None, lambda: now[0], 0.0, 0.5).reserve(100) == 0


def _attention(batch: int, kv_len: int, **more: int) -> ProblemKey:
    kernel = find_kernel("attn_decode")
    return problem_key(kernel, kernel.problem_type(batch=batch, kv_len=kv_len, **more))


def test_near_is_what_differs_by_little_as_a_ratio() -> None:
    def apart(one: ProblemKey, other: ProblemKey) -> float:
        shapes = [Shape.of(key.flat) for key in (one, other)]
        assert shapes[0].kind == shapes[1].kind
        return sum(shapes[0].octaves(shapes[1]))

    one = _attention(8, 2048)
    assert apart(one, one) == 0
    assert apart(one, _attention(8, 4096)) == 1
    assert apart(one, _attention(2, 512)) == apart(_attention(2, 512), one) == 4
    assert apart(one, _attention(8, 2048, num_q_heads=8, num_kv_heads=2)) > 0
    kinds = {Shape.of(_attention(8, 2048, **more).flat).kind
             for more in ({}, {"window": 1024}, {"window": 512}, {"head_dim": 512})}  # fmt: skip
    assert len(kinds) == 3, "with a window and without, and by head_dim"


def test_neighbours_are_of_one_kind_and_near_in_shape() -> None:
    keys = [_attention(8, 2048), _attention(8, 4096), _attention(8, 2048, q_len=4), _attention(1, 64),
            _attention(16, 2048), _attention(32, 131072), _attention(8, 2048, head_dim=512)]  # fmt: skip
    found = Neighbours(keys)
    assert set(found.of(0)) == {1, 4, 2}
    assert found.of(0)[-1] == 2, "four tokens a sequence are two octaves away"
    assert found.of(2)[0] == 0
    assert found.of(6) == [], "another head_dim is another kind"
