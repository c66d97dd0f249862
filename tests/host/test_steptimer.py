"""The steps by which a tune is judged, and what is asked of the GPU's process for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kerngen.arch import Target, find_arch, find_device
from kerngen.errors import LaunchError
from kerngen.tuning.step_timer import timed_steps
from kerngen.tuning.worker import Observed
from kerngen.workload.steps import Ratio, sequence
from kerngen.workload.workload import find_model, find_workload

MODEL, ARCH = find_model("gemma-4-31b"), find_arch("sm90")


class FakeWorker:
    def __init__(self, answer: Any) -> None:
        self.answer, self.asked = answer, list[Any]()

    def target(self) -> Any:
        return Target.of(find_device("H200"))

    def compare(self, *asked: Any, pairs: int, within_s: float, fused: Any) -> Any:
        self.asked.append((*asked, pairs))
        return self.answer


def test_every_call_of_a_step_can_be_exchanged_and_weights_add_up() -> None:
    load = find_workload("gemma-4-31b", ARCH)
    steps = timed_steps(FakeWorker(None), MODEL, load)  # type: ignore[arg-type]
    assert sum(s.key.weight for s in steps) == pytest.approx(1)
    assert len({s.key.sequence for s in steps}) == len(steps)
    for timed in steps:
        model, step = timed.timer.model, timed.timer.step  # type: ignore[attr-defined]
        assert timed.key.layers == len(model.target.layers) <= timed.key.props["of_layers"] == 60
        launched = sequence(model, step, ARCH)
        points = timed.timer.points()
        assert sum(p.launches for p in points) == len(launched)
        assert [(p.kernel, p.problem) for p in points] == list(dict.fromkeys((x.kernel, x.problem) for x in launched))
        assert all(p.us > 0 for p in points)
        whole = sequence(MODEL, step, ARCH)
        assert sum(p.launches * p.times for p in points) == pytest.approx(len(whole)), "all of the model's launches"
        served = [load.serving(p.kernel, p.problem) for p in points]
        assert all(item is not None for item in served)


@pytest.mark.parametrize("answer", [Ratio(0.98, 0.001, 1600.0), Observed("launch_failed", "no room")])
def test_a_choice_becomes_what_the_process_is_asked(answer: Any) -> None:
    worker = FakeWorker(answer)
    load = find_workload("gemma-4-31b", ARCH)
    timer = timed_steps(worker, MODEL, load)[0].timer  # type: ignore[arg-type]
    first, second = timer.points()[:2]
    one, other = SimpleNamespace(a=1), SimpleNamespace(a=2)
    if isinstance(answer, Ratio):
        assert timer.compare({first: (one, b"1")}, {first: (other, b"2"), second: (one, b"3")}, pairs=7) is answer
    else:
        with pytest.raises(LaunchError, match=r"decode.*batch 1.*context 512.*room"):
            timer.compare({first: (one, b"1")}, {first: (other, b"2"), second: (one, b"3")}, pairs=7)
    ((_, _, base, exchanged, pairs),) = worker.asked
    assert pairs == 7
    assert [(e.kernel, e.problems, e.config, e.image) for e in base] == [(first.kernel, (first.problem,), one, b"1")]
    assert [e.image for e in exchanged] == [b"2", b"3"]
