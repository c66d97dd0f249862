"""What an engine asks of the kernels was built before its first request."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from kerngen.arch import Target, find_device
from kerngen.runtime.config import read_drafter_config, read_model_config
from kerngen.runtime.drafting import MtpDrafter
from kerngen.runtime.engine import Engine, Request
from kerngen.runtime.executors import Say
from kerngen.runtime.executors.reference import Reference
from kerngen.runtime.executors.trace import Trace
from kerngen.runtime.model import Gemma4
from kerngen.runtime.ops.eager import TorchOps
from kerngen.runtime.ops.kernels import KernelOps
from kerngen.runtime.sampling import Sampling
from kerngen.runtime.selection import Selector
from kerngen.runtime.weights.loader import load_drafter, load_model
from kerngen.templates import find_kernel
from kerngen.templates.call import Call
from kerngen.templates.kernel import static_fields

TINY = Path(__file__).parents[2] / "examples" / "tiny"


class Judging(Reference):
    """Knows which builds an H200 was given, and which it then needs."""

    def __init__(self) -> None:
        super().__init__()
        self._selector = Selector([], Target.of(find_device("H200")))
        self.built: set[Any] = set()
        self.needed: dict[Any, str] = {}

    def _key(self, name: str, problem: Any) -> Any:
        config = self._selector.choice(find_kernel(name), problem).config
        return name, tuple(static_fields(problem).items()), config

    def build(self, groups: Iterable[Iterable[tuple[str, Any]]], say: Say, meanwhile: Callable[[], None]) -> None:
        for group in groups:
            self.built |= {self._key(name, problem) for name, problem in group}
        meanwhile()

    def run(self, call: Call[Any], where: str) -> Any:
        if call.problem is not None:
            self.needed.setdefault(self._key(call.kernel, call.problem), f"{where}: {call.problem}")
        return super().run(call, where)


@pytest.mark.parametrize("drafts", [0, None])
@torch.inference_mode()
def test_nothing_is_built_once_requests_come(drafts: int | None) -> None:
    executor, draw = Judging(), random.Random(drafts)
    ops = KernelOps(executor, torch.bfloat16)
    config = read_model_config(TINY / "gemma-4-tiny-w4a16")
    model = Gemma4(config, load_model(TINY / "gemma-4-tiny-w4a16", config, ops), ops)
    drafter_config = read_drafter_config(TINY / "gemma-4-tiny-assistant", config)
    drafter = MtpDrafter(drafter_config, load_drafter(TINY / "gemma-4-tiny-assistant", drafter_config, ops), model)
    engine = Engine(model, drafter, max_len=140, max_batch=3, num_draft_tokens=drafts, prefill_chunk=70, page_size=16,
                    buckets=(1, 2))  # fmt: skip
    before = [tensor.clone() for tensor in (engine.runner.ints, engine.runner.hidden, engine.cache.tables)]
    engine.make_ready()
    assert executor.built
    assert not executor.needed, "nothing is computed"
    for tensor, was in zip((engine.runner.ints, engine.runner.hidden, engine.cache.tables), before, strict=True):
        assert torch.equal(tensor, was)
    lengths = [1, 71, 3, 100]
    requests = [
        Request([2, *(draw.randrange(300, 1000) for _ in range(n))], draw.randint(1, 4),
                Sampling(0.8, 20, 0.9, seed=n) if n % 3 == 0 else Sampling())
        for n in lengths
    ]  # fmt: skip
    engine.generate_many(requests)
    assert len(executor.needed) > 10
    assert not [text for key, text in executor.needed.items() if key not in executor.built]


def test_who_listens_computes_nothing_and_leaves_no_rubbish_where_torch_reads_places() -> None:
    listening = Trace(Reference())
    places, numbers = torch.full((3,), 1 << 40), torch.full((3,), 2.0)
    problem = find_kernel("rmsnorm").problem_type()
    result = listening.run(Call("rmsnorm", problem, {}, (places, [numbers])), "norm")
    assert result[0] is places
    assert not places.any()
    assert numbers.tolist() == [2.0] * 3
    listening.run(Call("rmsnorm", None, {}, None), "norm")
    assert list(listening.asked) == [("rmsnorm", problem)]


def test_where_nothing_is_compiled_nothing_is_rehearsed() -> None:
    TorchOps(torch.device("cpu"), torch.float32).build_ahead(
        [lambda _: pytest.fail("rehearsed")], lambda *_: None, lambda: None
    )
