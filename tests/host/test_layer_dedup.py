"""A model's record without running each of its layers, and without torch's compiler: the same calls."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kerngen.arch import find_arch
from kerngen.runtime.batch import Batch
from kerngen.runtime.cache import KVCache
from kerngen.runtime.config import read_model_config
from kerngen.runtime.executors.layer_dedup import OneOfEachKind
from kerngen.runtime.executors.record import Record
from kerngen.runtime.executors.reference import Reference
from kerngen.runtime.executors.shapes import ShapesAlone
from kerngen.runtime.executors.trace import RunsOnce
from kerngen.runtime.model import Gemma4
from kerngen.runtime.ops.kernels import KernelOps
from kerngen.runtime.weights.synthetic import synthetic_model
from kerngen.workload.steps import Recorder, Step
from kerngen.workload.workload import MODELS, find_model

TINY = Path(__file__).parents[2] / "examples" / "tiny" / "gemma-4-tiny-w4a16"
STEPS = (Step.decode(1, 512), Step.verify(8, 5, 2048), Step.prefill(512, 2048), Step.draft(32, 512))


@pytest.mark.parametrize("name", MODELS)
def test_layers_that_are_alike_ask_for_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, arch = find_model(name), find_arch("sm90")
    recorder, ran = Recorder(model.target, model.drafter, "bf16", arch), 0

    def calls(step: Step) -> list[Any]:
        found: list[Any] = []
        recorder.record(step, lambda *call: found.append(call), lambda *call: found.append(("beside", *call)))
        return found

    def counted(record: Record, key: object, make: Callable[[], Any]) -> Any:
        nonlocal ran
        ran += 1
        return make()

    few = [calls(step) for step in STEPS]
    monkeypatch.setattr(Record, "once", counted)
    assert [calls(step) for step in STEPS] == few
    layers = len(model.target.layers)
    assert ran >= 2 * layers, "each layer by itself, where no kernel takes them all"


def test_what_was_met_in_a_step_is_forgotten_with_it() -> None:
    model = find_model("gemma-4-12b")
    recorder = Recorder(model.target, model.drafter, "bf16", find_arch("sm90"))
    for context in (512, 2048, 8192):
        lens: list[int] = []
        recorder.record(Step.decode(8, context), lambda _, p, __, lens=lens: lens.append(getattr(p, "kv_len", 0)))
        assert max(lens) == context


class Listening(Reference):
    """The reference executor, and what it ran."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[tuple[str, Any]] = []

    def run(self, call: Any, where: str) -> Any:
        self.ran.append((call.kernel, call.problem))
        return super().run(call, where)


def test_one_layer_of_each_kind_runs_all_that_a_step_needs() -> None:
    """What runs before a step is captured: each kernel of it at each problem, and the step's result is as without."""
    config, executor = read_model_config(TINY), Listening()
    ops = KernelOps(executor, torch.bfloat16)
    model = Gemma4(config, synthetic_model(config, ops, 0), ops)
    cache = KVCache.whole(config, ops, batch=2, max_len=32, page_size=16)
    ids, lengths = torch.tensor([[3], [5]]), torch.tensor([4, 9])

    def step() -> tuple[torch.Tensor, list[tuple[str, Any]]]:
        executor.ran.clear()
        return model.forward(Batch.decode(ids, lengths, cache, 32, ops), cache), list(executor.ran)

    stack, (hidden, whole) = model.stack, step()
    layers = OneOfEachKind(model, None)
    for _ in range(2):
        with layers(RunsOnce()):
            zeros, few = step()
        assert model.stack is stack
        assert zeros.isfinite().all()
        assert set(few) == set(whole)
        assert len(few) < len(whole)
    again, _ = step()
    assert torch.equal(again, hidden)


def _meta(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize("make", [
    lambda: _meta(7) - 1, lambda: _meta(7) // 64, lambda: _meta(7) % 64,
    lambda: torch.add(_meta(7) % 64, _meta(2, 7, dtype=torch.int32), alpha=64),
    lambda: torch.zeros_like(_meta(3, 4, dtype=torch.bfloat16)), lambda: torch.empty_like(_meta(3, 4).t()),
    lambda: torch.arange(5, 12, device="meta"), lambda: torch.arange(5, 12, dtype=torch.int32, device="meta"),
    lambda: torch.arange(0, 12, 5, device="meta"), lambda: torch.cat((_meta(3, 4), _meta(3, 5)), dim=-1),
    lambda: torch.cat((_meta(3, 4), _meta(3, 4, dtype=torch.int32))), lambda: _meta(6, 8)[_meta(2)],
    lambda: _meta(2, 6, 8)[:, _meta(5), _meta(5)], lambda: _meta(6, 8)[_meta(6, dtype=torch.int64), 1:3],
    lambda: torch.stack([_meta(3, 4)] * 2), lambda: torch.stack([_meta(3, 4)] * 2, dim=1),
    lambda: _meta(6, 8)[1:, 2], lambda: _meta(6, dtype=torch.float32) - 1.5,
])  # fmt: skip
def test_shapes_are_those_that_torch_gives(make: Callable[[], torch.Tensor]) -> None:
    expected = make()
    with ShapesAlone():
        found = make()
    assert (found.shape, found.dtype, found.stride()) == (expected.shape, expected.dtype, expected.stride())
    assert found.is_meta


def test_tensors_with_values_keep_them() -> None:
    with ShapesAlone():
        x = torch.arange(3, 9)
        assert torch.cat((x // 2, x[torch.tensor([0, 5])] - 1)).tolist() == [1, 2, 2, 3, 3, 4, 2, 7]


def test_a_workload_is_found_without_torchs_compiler() -> None:
    """Which takes longer to load than the workload to find."""
    code = (
        "import sys; from kerngen.arch import find_arch; from kerngen.workload.workload import find_workload\n"
        "for name in ('gemma-4-31b', 'gemma-4-e2b', 'gemma-4-26b-a4b'): find_workload(name, find_arch('sm70'))\n"
        "print([m for m in ('torch._dynamo', 'torch._inductor', 'sympy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_cache_of_the_newest_tokens_has_pages_for_each_of_them() -> None:
    """In sliding layers neither two of a sequence's newest tokens share a row nor two sequences; full ones have all."""
    config = read_model_config(TINY)
    ops = KernelOps(Listening(), torch.bfloat16)
    last, page_size = 70, 16
    cache = KVCache.whole(config, ops, batch=3, max_len=1000, page_size=page_size, last=last)
    full, sliding = cache.tables
    assert torch.equal(full.flatten(), torch.arange(1, 3 * 63 + 1, dtype=torch.int32))
    for newest in (70, 71, 700, 1000):
        pages = sliding[:, (newest - last) // page_size : -(-newest // page_size)]
        assert len(pages.unique()) == pages.numel()
    assert cache.num_pages == {"full": 3 * 63 + 1, "sliding": 3 * 6 + 1}
    assert (int(sliding.min()), int(sliding.max())) == (1, 3 * 6)
