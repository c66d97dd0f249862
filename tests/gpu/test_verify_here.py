"""`kerngen db verify --run` on a GPU: a database that was measured here is as it says, and damage to it is found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kerngen.bundles.verify_gpu import LEVELS, on_gpu
from kerngen.compiler.cache import CachedCompiler
from kerngen.templates import find_kernel
from kerngen.timing.gpu import GpuLock
from kerngen.tuning.objective import Measured
from kerngen.tuning.tuner import Tuner
from kerngen.tuning.worker import GpuWorker
from kerngen.tuning_db import Store
from kerngen.workload.workload import Item


class Silent:
    def update(self, done: int, total: int, text: str) -> None:
        pass


@pytest.mark.whole_gpu
def test_what_was_measured_here_is_as_it_says(tmp_path: Path) -> None:
    kernel = find_kernel("rmsnorm")
    problem = kernel.problem_type()
    items = [Item("rmsnorm", replace(problem, num_tokens=t)) for t in (64, 512)]
    with GpuWorker() as worker, Store.open(tmp_path / "t.db") as store:
        lock = GpuLock(worker.uuid())
        try:
            with CachedCompiler(2) as compiler:
                Tuner(Measured(worker, lock), store, compiler, trials=4).run(items)
            how = {"tolerance": 0.3, "left": lambda: float("inf"), "bar": Silent()}  # a busy GPU is no fault of this
            verdicts = {v.level: v for v in on_gpu(store, LEVELS, worker, lock, **how)}  # type: ignore[arg-type]
            assert [v.ok for v in verdicts.values()] == [True, True, True], verdicts
            assert verdicts["fast"].figures["fast"] == len(items)
            assert 0.5 < verdicts["fast"].figures["median"] < 1.3

            build = store.kept_builds()[0]
            image = store.image(build)
            assert worker.load("whole", image.image, tuple(build.entries)) == ""
            # not half of one: the driver is told no length, and reads on
            assert "cannot load it on this GPU" in worker.load("none", b"no cubin", ())
            assert "cannot load it on this GPU" in worker.load("other", image.image, ("no_such_kernel",))

            (winner, *_) = store.winners("rmsnorm")
            config, problem = kernel.config_type(**winner.config), kernel.problem_type(**winner.problem.fields)
            own = store.image(store.build(winner.build_id))
            right = worker.check(kernel, problem, config, own.image)
            assert (right.outcome, right.p50_us) == ("ok", None)
            broken = worker.check(kernel, problem, config, b"no cubin")
            assert broken.outcome == "launch_failed"
        finally:
            lock.release()
