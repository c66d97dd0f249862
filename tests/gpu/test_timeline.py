"""`python -m tools.timeline` on a GPU: every block tells, in the order in which things happen."""

from __future__ import annotations

import pytest

from kerngen.workload.steps import Step
from kerngen.workload.workload import find_model
from tools.timeline import timeline


@pytest.mark.whole_gpu(smoke=False)
@pytest.mark.parametrize("step", [Step.verify(1, 4, 512), Step.decode(8, 512)], ids=lambda s: s.name)
def test_what_the_blocks_of_a_step_say(step: Step) -> None:
    rows, cost, without = timeline(find_model("gemma-4-e2b"), step)
    assert not without
    assert 0.95 < cost.median < 1.25
    assert sum(r.count for r in rows) > 35 * 5
    assert all(r.on_us is not None and r.ready_us is not None for r in rows)
    for row in rows:
        assert row.begun_us <= row.last_begun_us
        assert row.begun_us < row.ended_us <= row.last_ended_us
        most = 200 if row.kernel == "greedy_head" else 100  # the E2B's head takes 104 us on an H100
        assert 0 < row.last_ended_us < most, "none ends before the one that it waits for"
        if row.on_us is not None and row.ready_us is not None:
            assert -1 < row.on_us < row.ended_us
