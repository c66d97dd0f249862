"""What goes beside other work in a step: who runs there, and that it is waited for in any case."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch

from kerngen.arch import ARCHES, Target, find_arch
from kerngen.runtime.batch import Batch
from kerngen.runtime.cache import KVCache
from kerngen.runtime.executors.record import Record
from kerngen.runtime.model import Gemma4
from kerngen.runtime.ops.kernels import KernelOps
from kerngen.runtime.weights.synthetic import synthetic_model
from kerngen.templates import find_kernel
from kerngen.workload.workload import find_model

R = TypeVar("R")


class Branching(Record):
    """A record that knows which calls were made in a branch, and which beside one. fails: the kernel it ends at."""

    def __init__(self, arch: str, fails: str = "") -> None:
        super().__init__(self._noted, lambda _: None, Target.of(find_arch(arch)))
        self.fails, self.where, self.joined = fails, "alone", 0
        self.asked: dict[str, list[tuple[str, Any]]] = {"alone": [], "branch": [], "beside": []}

    def _noted(self, kernel: str, problem: Any, _: str) -> None:
        if kernel == self.fails:
            raise LookupError(kernel)
        self.asked[self.where].append((kernel, problem))

    def overlap(self, work: Callable[[], R]) -> Callable[[], R]:
        assert self.where == "alone", "one branch at a time"
        self.where = "branch"
        result = work()
        self.where = "beside"

        def joined() -> R:
            self.where = "alone"
            self.joined += 1
            return result

        return joined


def step(executor: Branching, tokens: int) -> int:
    """One of the 26B-A4B for `tokens` sequences; how many layers it has."""
    config = find_model("gemma-4-26b-a4b").target
    ops = KernelOps(executor, torch.bfloat16 if executor.target.arch.has_bf16 else torch.float16)  # type: ignore[union-attr]
    model = Gemma4(config, synthetic_model(config, ops), ops)
    cache = KVCache.whole(config, ops, batch=tokens, max_len=64)
    ids = torch.empty(tokens, 1, dtype=torch.int64, device="meta")
    model.forward(Batch.decode(ids, ids[:, 0], cache, 64, ops), cache)
    return len(config.layers)


@pytest.mark.parametrize("tokens", [2, 16, 128])
@pytest.mark.parametrize("arch", list(ARCHES))
def test_the_dense_mlp_is_a_branch_beside_launches_that_wait_for_no_block(arch: str, tokens: int) -> None:
    """Else two half-resident grids could wait for each other for ever."""
    executor = Branching(arch)
    count = step(executor, tokens)
    assert executor.joined == count
    assert [kernel for kernel, _ in executor.asked["branch"]] == ["w4a16_gemm", "w4a16_gemm"] * count
    assert {kernel for kernel, _ in executor.asked["beside"]} == {"moe_router", "moe_w4a16"}
    for name, problem in dict.fromkeys(executor.asked["beside"]):
        kernel, target = find_kernel(name), Target.of(find_arch(arch))
        for launch in kernel.launches(problem, kernel.default_config(problem, target), target):
            assert not launch.cooperative, launch


@pytest.mark.parametrize("fails", ["moe_router", "moe_w4a16"])
def test_a_branch_is_joined_where_what_goes_beside_it_fails(fails: str) -> None:
    """A capture whose branch nobody joins fails for that, in place of what went wrong."""
    executor = Branching("sm90", fails)
    with pytest.raises(LookupError, match=fails):
        step(executor, 4)
    assert executor.joined == 1
