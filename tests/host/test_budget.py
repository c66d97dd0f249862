"""Where a run's time goes: weights, portions, the reserve, and who is near whom. No kernel, no GPU."""

from __future__ import annotations

import pytest

from kerngen.arch import Target, find_arch
from kerngen.templates import find_kernel
from kerngen.tuning.budget import JUDGED, MOST_FOR_FINALS, Budget, Weights, portions
from kerngen.tuning.neighbours import OTHERWISE, Neighbours, distance, nearest
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
    assert Budget(None, lambda: now[0], 0.0, 0.5).left() == float("inf")
    assert Budget(None, lambda: now[0], 0.0, 0.5).reserve(100) == 0


def _attention(batch: int, kv_len: int, **more: int) -> ProblemKey:
    kernel = find_kernel("attn_decode")
    return problem_key(kernel, kernel.problem_type(batch=batch, kv_len=kv_len, **more))


def test_near_is_what_differs_by_little_as_a_ratio() -> None:
    one = _attention(8, 2048)
    assert distance(one, one) == 0
    assert distance(one, _attention(8, 4096)) == pytest.approx(1, abs=0.01)
    assert distance(one, _attention(2, 512)) == distance(_attention(2, 512), one)
    assert distance(one, _attention(2, 512)) > distance(one, _attention(4, 2048))
    odd = ProblemKey("k", {}, {"mode": "a", "flag": True}, None)
    assert distance(odd, ProblemKey("k", {}, {"mode": "b", "flag": False}, None)) == 2 * OTHERWISE


def test_neighbours_share_what_is_compiled_in() -> None:
    keys = [_attention(8, 2048), _attention(8, 4096), _attention(8, 2048, q_len=4), _attention(1, 64),
            _attention(16, 2048), _attention(32, 131072)]  # fmt: skip
    assert nearest(keys[0], [keys[0], keys[1]]) == [1]
    found = Neighbours(keys)
    same = [i for i, k in enumerate(keys) if k.static_key == keys[0].static_key]
    assert set(found.of(0)) <= set(same) - {0}
    assert found.of(0)[0] in (1, 4)
    assert len(found.of(0)) == min(3, len(same) - 1)
    if keys[2].static_key != keys[0].static_key:
        assert found.of(2) == []
