"""The forward of a divided model: one rank's results, the same bits on all ranks, and the exchanges that it says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
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
from kerngen.runtime.config import Keeping, read_drafter_config, read_model_config
from kerngen.runtime.drafting import MtpDrafter
from kerngen.runtime.executors.collectives import Collectives
from kerngen.runtime.executors.reference import Reference
from kerngen.runtime.model import Gemma4
from kerngen.runtime.ops import Ops, ResidualNorms, residual_dtype
from kerngen.runtime.ops.eager import TorchOps
from kerngen.runtime.ops.kernels import KernelOps
from kerngen.runtime.weights.loader import load_drafter, load_model
from kerngen.runtime.world import MOST_ROWS, World, most_rows
from kerngen.templates import find_kernel
from kerngen.templates.call import Call
from kerngen.templates.common.rows.torch_rows import DTYPE_NAME
from kerngen.templates.exchange_best.spec import POSTED
from kerngen.templates.exchange_best.spec import Problem as BestProblem
from kerngen.templates.exchange_norm.spec import Problem
from kerngen.templates.values import Peers
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


class Exchanging(Reference):
    """Also answers exchange_norm and exchange_best as GPUs that share memory do: of what every rank has, not one."""

    def __init__(self, ranks: Collectives, shares: bool = True) -> None:
        super().__init__(collectives=ranks)
        self.shares = shares
        self.exchanged: Counter[Problem] = Counter()
        self.chosen: Counter[BestProblem] = Counter()
        self.built: list[tuple[str, Any]] = []

    def share_memory(self, hidden: int) -> None:
        world = self.collectives.world
        if self.shares:
            addresses = torch.zeros(world.size + 1, dtype=torch.int64)
            self.peers = {**self.peers, **{w: Peers(addresses, world.rank, most_rows(w)) for w in (hidden, POSTED)}}

    def run(self, call: Call[Any], where: str) -> Any:
        if call.kernel not in ("exchange_norm", "exchange_best") or call.problem is None:
            return super().run(call, where)
        kernel, given, size = find_kernel(call.kernel), call.arguments, self.collectives.world.size
        kernel.require_arguments(given)
        if call.kernel == "exchange_best":
            best = self.collectives.best_of_ranks(*kernel.reference.of_rank(call.problem, dict(given)))
            for name, value in zip(("values", "ids"), best, strict=True):
                given[name].copy_(value)
            self.chosen[call.problem] += 1
            return call.result
        of_ranks: list[dict[str, Any]] = [dict(given) for _ in range(size)]
        for name in ("h", "routed", "topk_weights"):
            if given[name] is not None:
                for of, part in zip(of_ranks, self.collectives.all_gather(given[name], 0).chunk(size), strict=True):
                    of[name] = part
        for name, value in kernel.reference.expected_of(call.problem, of_ranks).items():
            given[name].copy_(value)
        self.exchanged[call.problem] += 1
        return call.result

    def build(self, groups: Any, say: Any, meanwhile: Any) -> None:
        self.built += [asked for group in groups for asked in group]
        meanwhile()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("has_scalar", [True, False])
@pytest.mark.parametrize("tokens", [1, 3, 64, 65])
def test_the_end_of_a_layer_with_experts_is_one_exchange(tokens: int, has_scalar: bool, dtype: torch.dtype) -> None:
    """To the bit what a sum by collectives and moe_combine give, where two rows a token fit; else those two."""
    hidden, top_k, size = 72, 3, 3
    draw = torch.Generator().manual_seed(tokens)

    def normal(*shape: int, mean: float = 0.0) -> Tensor:
        return (mean + torch.randn(*shape, generator=draw)).to(dtype)

    weights = [normal(hidden, mean=1.0) for _ in range(4)]
    scalar = normal(1, mean=1.0) if has_scalar else None
    norms = ResidualNorms(weights[0], weights[1], 1e-6, scalar)
    moe: Any = SimpleNamespace(down=SimpleNamespace(is_summand=True), router_scale=weights[0], dense_norm=weights[2],
                               post_norm=weights[3])  # fmt: skip
    residual = normal(tokens, hidden).to(residual_dtype(dtype))
    parts = [(normal(tokens, hidden), normal(tokens, top_k, hidden)) for _ in range(size)]
    routes = torch.rand(tokens, top_k, generator=draw)
    problem = Problem(size, hidden, DTYPE_NAME[dtype], DTYPE_NAME[residual.dtype], top_k, has_scalar, num_tokens=tokens)
    is_one = 2 * tokens <= MOST_ROWS
    threads = Threads(size)

    def work(rank: int, shares: bool) -> tuple[Tensor, Tensor]:
        executor = Exchanging(threads.of(rank), shares)
        executor.share_memory(hidden)
        ops = KernelOps(executor, dtype)
        stream = residual.clone()

        def combine() -> Tensor:
            return ops.moe_combine(stream, *parts[rank], routes, moe, norms)

        try:
            ops.build_ahead([lambda _: combine()], lambda *_: None, lambda: None)
            assert (("exchange_norm", problem) in executor.built) == (shares and is_one)
            stream.copy_(residual)
            out = combine()
        except BaseException:
            threads.stop()
            raise
        assert executor.exchanged == (Counter([problem]) if shares and is_one else Counter())
        assert ("sums of routed experts" in ops.outside()) == (not (shares and is_one))
        return stream, out

    with ThreadPoolExecutor(size) as pool:
        shared, summed = (list(pool.map(work, range(size), [shares] * size)) for shares in (True, False))
    for made in (*shared, *summed):
        for mine, want in zip(made, summed[0], strict=True):
            assert torch.equal(mine, want)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_forward_is_the_same_bits_by_exchanges_and_by_sums(folders: tuple[Path, Path], size: int) -> None:
    """In 16 bits, of widths that ranks share unevenly."""
    threads = Threads(size)

    def work(rank: int, shares: bool) -> tuple[list[Tensor], Counter[Problem]]:
        executor = Exchanging(threads.of(rank), shares)
        try:
            with torch.inference_mode():
                ops = KernelOps(executor, torch.bfloat16)
                config = read_model_config(folders[0]).divided(World(rank, size))
                weights = load_model(folders[0], config, ops)
                model = Gemma4(config, weights, ops)
                cache = KVCache.whole(config, ops, batch=1, max_len=32)
                states = model.forward(Batch.prefill(torch.tensor(PROMPT), 0, cache), cache)
                token, length = model.greedy(states[-1:]), torch.tensor([len(PROMPT)])
                after = model.forward(Batch.decode(token[None], length, cache, 32, ops), cache)
        except BaseException:
            threads.stop()
            raise
        chosen = [model.greedy(after, screened=screened) for screened in (True, False)]
        assert sum(executor.chosen.values()) == (3 if shares else 0)
        assert ("the chosen token's logit" in ops.outside()) == (not shares)
        without = Gemma4(config, weights, ops, suppressed_ids=sorted({int(token) for token in chosen[0]}))
        others = [without.greedy(after, screened=screened) for screened in (True, False)]
        assert torch.equal(*others)
        assert not torch.isin(others[0], chosen[0]).any()
        return [states, after, *chosen, *others], executor.exchanged

    with ThreadPoolExecutor(size) as pool:
        shared, summed = (list(pool.map(work, range(size), [shares] * size)) for shares in (True, False))
    config = read_model_config(folders[0])
    ends = Counter[int]()
    for problem, count in shared[0][1].items():
        ends[problem.top_k] += count
    layers = 2 * len(config.layers)  # of a prefill and a step
    assert ends == Counter([config.top_k_experts, 0] * layers)
    for (made, exchanged), (want, none) in zip(shared, summed, strict=True):
        assert exchanged == shared[0][1]
        assert not none
        for mine, other in zip(made, want, strict=True):
            assert torch.equal(mine, other)


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
    """Launches of few tokens, collectives of more; of a layer with experts the second has two rows. Of one token the
    kernel of all layers sums over the ranks, and asks for none; of up to eight a projection's own launch may.
    """
    model, arch = find_model(name), find_arch("sm90")
    rank = model.divided(World(size - 1, size))
    layers, row = len(model.target.layers), 2 * model.target.hidden_size
    top_k = model.target.top_k_experts
    assert rank.drafter is not None

    def exchanged(step: Step) -> tuple[Counter[tuple[str, int]], Counter[Any], list[Any]]:
        found: Counter[tuple[str, int]] = Counter()
        launched: Counter[Any] = Counter()
        chosen = []

        def note(kernel: str, problem: Any, where: str) -> None:
            if kernel == "decode_layers":
                assert problem.ranks == size
                launched["decode_layers"] += 1
            if kernel == "w4a16_norm":
                assert problem.ranks == size, "a norm needs the whole sum"
                launched[problem.ranks, problem.n, 0, problem.num_tokens] += 1
            if kernel == "exchange_norm":
                launched[problem.ranks, problem.hidden, problem.top_k, problem.num_tokens] += 1
            elif kernel == "exchange_best":
                chosen.append(problem)

        recorder(rank.target, rank.drafter, arch).record(step, note, collective=lambda *told: found.update([told]))
        return found, launched, chosen

    hidden = model.target.hidden_size
    chosen = [BestProblem(size, hidden)]
    assert exchanged(Step.decode(1, 512)) == (Counter(), Counter(["decode_layers"]), chosen)
    for step, tokens in ((Step.decode(2, 512), 2), (Step.verify(2, 4, 512), 8)):
        launches = Counter({(size, hidden, 0, tokens): layers}) + Counter({(size, hidden, top_k, tokens): layers})
        assert exchanged(step) == (Counter(), launches, [BestProblem(size, hidden, num_tokens=tokens)])
    ends = 2 * row if top_k else row
    sums = Counter({("all_reduce", 512 * row): layers}) + Counter({("all_reduce", 512 * ends): layers})
    assert exchanged(Step.prefill(512, 512)) == (sums, Counter(), [])
    text = rank.drafter.text
    of_draft = Counter({(size, text.hidden_size, 0, 1): len(text.layers)})  # its MLP is whole on every rank
    chosen = [BestProblem(size, text.hidden_size)]
    assert exchanged(Step.draft(1, 512)) == (Counter(), of_draft, chosen)
    rank = find_model(name, None, Keeping("int4")).divided(World(size - 1, size))
    assert exchanged(Step.draft(1, 512)) == (Counter(), Counter(["decode_layers"]), chosen)


def test_a_divided_models_workload_is_of_its_own_sizes() -> None:
    model, arch = find_model("gemma-4-26b-a4b"), find_arch("sm90")
    widths = {}
    for rank in (0, 3):
        load = workload(model.divided(World(rank, 4)), arch)
        widths[rank] = {item.problem.inner for item in load.items if item.kernel == "moe_w4a16"}
        heads = {item.problem.num_q_heads for item in load.items if item.kernel == "attn_decode"}
        assert heads == {4}
        sums = {(p.top_k, p.num_tokens): p for p in (i.problem for i in load.items if i.kernel == "exchange_norm")
                if p.hidden == model.target.hidden_size}  # fmt: skip
        # a token of a layer with experts takes two of MOST_ROWS
        assert {key for key in sums if key[1] & (key[1] - 1) == 0} == {
            (top_k, 1 << e) for top_k in (0, 8) for e in range(7 if top_k else 8)
        }
        for (top_k, tokens), problem in sums.items():
            assert problem == Problem(4, 2816, "bf16", "bf16", top_k, top_k > 0, num_tokens=tokens)
    assert widths == {0: {192}, 3: {160}}
