"""The forward of a divided model: one rank's results, the same bits on all ranks, and the exchanges that it says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from divided_models import ODD, make_pair
from ranks import Threads
from tiny_gemma import CPU, load, load_assistant, prompt
from torch import Tensor

from kerngen.arch import find_arch
from kerngen.runtime.batch import Batch
from kerngen.runtime.cache import KVCache
from kerngen.runtime.config import read_drafter_config, read_model_config
from kerngen.runtime.drafting import MtpDrafter
from kerngen.runtime.executors.reference import Reference
from kerngen.runtime.model import Gemma4
from kerngen.runtime.ops import Ops
from kerngen.runtime.ops.eager import TorchOps
from kerngen.runtime.ops.kernels import KernelOps
from kerngen.runtime.weights.loader import load_drafter, load_model
from kerngen.runtime.world import World
from kerngen.workload.steps import Step, recorder
from kerngen.workload.workload import find_model, workload

T = TypeVar("T")
PROMPT = prompt(20)
BACKENDS: dict[str, Callable[[Any], Ops]] = {
    "torch": lambda ranks: TorchOps(CPU, torch.float32, ranks),
    "kernels": lambda ranks: KernelOps(Reference(collectives=ranks), torch.float32),
}


@pytest.fixture(scope="module", params=ODD)
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_pair(tmp_path_factory.mktemp(request.param), request.param)


def on_ranks(size: int, work: Callable[[Ops, World], T], backend: str) -> list[T]:
    threads = Threads(size)

    def run(rank: int) -> T:
        try:
            with torch.inference_mode():
                return work(BACKENDS[backend](threads.of(rank)), World(rank, size))
        except BaseException:
            threads.stop()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def computed(model: Gemma4, drafter: MtpDrafter) -> tuple[list[Tensor], list[Tensor]]:
    """Floats and tokens of a prefill, a decode step of one sequence, and a draft."""
    cache = KVCache.whole(model.config, model.ops, batch=1, max_len=32)
    states = model.forward(Batch.prefill(torch.tensor(PROMPT), 0, cache), cache)
    logits = model.logits(states)
    token, length = model.greedy(states[-1:]), torch.tensor([len(PROMPT)])
    hidden = model.forward(Batch.decode(token[None], length, cache, 32, model.ops), cache)
    y = drafter.step(token, hidden, length + 1, cache, 32)
    draft = drafter.greedy(y)
    return [states, logits, hidden, drafter.logits(y)], [model.greedy(states), token, model.greedy(hidden), draft]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_compute_what_one_rank_does(folders: tuple[Path, Path], size: int, backend: str) -> None:
    whole = load(folders[0])
    floats, tokens = computed(whole, load_assistant(folders[1], whole))

    def work(ops: Ops, world: World) -> tuple[list[Tensor], list[Tensor]]:
        config = read_model_config(folders[0])
        drafts = read_drafter_config(folders[1], config)
        part = config.divided(world)
        model = Gemma4(part, load_model(folders[0], part, ops), ops)
        mine = drafts.divided(part)
        return computed(model, MtpDrafter(mine, load_drafter(folders[1], mine, ops), model))

    found = on_ranks(size, work, backend)
    for made, chosen in found:
        for mine, want in zip(made, floats, strict=True):
            torch.testing.assert_close(mine, want, rtol=1e-3, atol=1e-3)
        assert [t.tolist() for t in chosen] == [t.tolist() for t in tokens]
        for mine, first in zip(made, found[0][0], strict=True):
            assert torch.equal(mine, first), "residuals, and so choices, are the same bits on all ranks"


def test_suppressed_tokens_are_chosen_on_no_rank(tmp_path: Path) -> None:
    """Also where all of a rank's tokens are suppressed."""
    folder, _ = make_pair(tmp_path, "dense")
    suppressed = [*range(56, 104), 3, 7]

    def work(ops: Ops, world: World) -> Tensor:
        config = read_model_config(folder).divided(world)
        model = Gemma4(config, load_model(folder, config, ops), ops, suppressed_ids=suppressed)
        cache = KVCache.whole(config, ops, batch=1, max_len=32)
        return model.greedy(model.forward(Batch.prefill(torch.tensor(PROMPT), 0, cache), cache))

    alone = on_ranks(1, work, "torch")[0]
    assert not set(alone.tolist()) & set(suppressed)
    for backend in BACKENDS:
        for found in on_ranks(2, work, backend):
            assert torch.equal(found, alone)


@pytest.mark.parametrize(("name", "size"), [("gemma-4-31b", 2), ("gemma-4-26b-a4b", 4)])
def test_a_steps_exchanges_are_two_a_layer_and_one_of_the_choice(name: str, size: int) -> None:
    """Launches of few tokens, collectives of more; of a layer with experts the second has two rows."""
    model, arch = find_model(name), find_arch("sm90")
    rank = model.divided(World(size - 1, size))
    layers, row = len(model.target.layers), 2 * model.target.hidden_size
    experts = bool(model.target.num_experts)
    assert rank.drafter is not None

    def exchanged(step: Step) -> tuple[Counter[tuple[str, int]], Counter[tuple[int, int, bool, int]]]:
        found: Counter[tuple[str, int]] = Counter()
        launched: Counter[tuple[int, int, bool, int]] = Counter()
        called: set[str] = set()

        def note(kernel: str, problem: Any, where: str) -> None:
            called.add(kernel)
            if kernel == "exchange_norm":
                launched[problem.ranks, problem.hidden, problem.pairs, problem.num_tokens] += 1

        recorder(rank.target, rank.drafter, arch).record(step, note, collective=lambda *told: found.update([told]))
        assert not called & {"w4a16_norm", "decode_layers"}, "a norm needs the whole sum"
        return found, launched

    hidden = model.target.hidden_size
    for step, tokens in ((Step.decode(1, 512), 1), (Step.verify(2, 4, 512), 8)):
        launches = Counter({(size, hidden, False, tokens): layers}) + Counter({(size, hidden, experts, tokens): layers})
        assert exchanged(step) == (Counter({("best_of_ranks", 12 * tokens): 1}), launches)
    ends = 2 * row if experts else row
    sums = Counter({("all_reduce", 512 * row): layers}) + Counter({("all_reduce", 512 * ends): layers})
    assert exchanged(Step.prefill(512, 512)) == (sums, Counter())
    text = rank.drafter.text
    of_draft = Counter({(size, text.hidden_size, False, 1): len(text.layers)})  # its MLP is whole on every rank
    assert exchanged(Step.draft(1, 512)) == (Counter({("best_of_ranks", 12): 1}), of_draft)


def test_a_divided_models_workload_is_of_its_own_sizes() -> None:
    model, arch = find_model("gemma-4-26b-a4b"), find_arch("sm90")
    widths = {}
    for rank in (0, 3):
        load = workload(model.divided(World(rank, 4)), arch)
        widths[rank] = {item.problem.inner for item in load.items if item.kernel == "moe_w4a16"}
        heads = {item.problem.num_q_heads for item in load.items if item.kernel == "attn_decode"}
        assert heads == {4}
    assert widths == {0: {192}, 3: {160}}
