"""Generation: drafting changes nothing, sampling keeps its distribution, stops and limits hold, steps never wait."""

from __future__ import annotations

import re
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_engine_batches import Oracle
from tiny_gemma import CPU, load, load_assistant, make_assistant, make_target, prompt
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from kerngen.errors import NumericsError, UsageError
from kerngen.runtime.config import Arm
from kerngen.runtime.drafting import MtpDrafter
from kerngen.runtime.engine import Engine, Generation
from kerngen.runtime.engine.plan import SamplingMode
from kerngen.runtime.model import Gemma4
from kerngen.runtime.ops.eager import TorchOps
from kerngen.runtime.sampling import Parameters, Sampling, accepted, choose, cut_for, distribution, likeliest, sample
from kerngen.templates.values import AttnBatch, HeadNorms, KVView

PROMPT = prompt(21)
COUNT = 64
NAN, INF = float("nan"), float("inf")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    root = tmp_path_factory.mktemp("engine")
    pairs = {}
    for variant, centroids in (("k_eq_v", 0), ("shared_ple", 12), ("moe", 0)):
        pairs[variant] = root / variant, root / f"{variant}-assistant"
        make_target(pairs[variant][0], variant)
        make_assistant(pairs[variant][1], variant, num_centroids=centroids)
    return pairs


@pytest.fixture(scope="module")
def models(folders: dict[str, tuple[Path, Path]]) -> dict[str, Gemma4]:
    return {variant: load(target) for variant, (target, _) in folders.items()}


@pytest.fixture(scope="module")
def model(models: dict[str, Gemma4]) -> Gemma4:
    return models["k_eq_v"]


PLAIN: dict[int, list[int]] = {}  # models live as long as the module


def plain_tokens(model: Gemma4) -> list[int]:
    """What `model` says greedily, without drafts."""
    if id(model) not in PLAIN:
        PLAIN[id(model)] = generate(model).tokens
    return PLAIN[id(model)]


def generate(model: Gemma4, drafter: MtpDrafter | None = None, *, k: int = 3, count: int = COUNT, **kwargs: Any) -> Any:
    sampling = kwargs.pop("sampling", None)
    stop_ids = kwargs.pop("stop_ids", ())
    engine = Engine(model, drafter, max_len=len(PROMPT) + count, num_draft_tokens=k, page_size=4, **kwargs)
    if isinstance(drafter, Oracle):
        drafter.engine = engine
    return engine.generate(PROMPT, max_new_tokens=count, sampling=sampling, stop_ids=stop_ids)


def test_stop_tokens_end_a_generation_within_a_step(model: Gemma4, folders: dict[str, tuple[Path, Path]]) -> None:
    plain = plain_tokens(model)
    stop = plain[9]
    end = plain.index(stop) + 1
    oracle = Oracle(load_assistant(folders["k_eq_v"][1], model), {tuple(PROMPT): plain}, chance=1.0)
    assert generate(model, oracle).stats.acceptance_length == 4
    for drafter in (None, oracle):
        result = generate(model, drafter, stop_ids=[stop])
        assert (result.tokens, result.stop_reason) == (plain[:end], "stop")
    assert generate(model, count=5).stop_reason == "length"
    assert generate(model, oracle, count=6).tokens == plain[:6]


def streamed(steps: Generator[list[int], None, Generation], seen: list[list[int]]) -> Generation:
    """What the stream returns; its steps go to `seen`."""
    while True:
        try:
            seen.append(next(steps))
        except StopIteration as end:
            result: Generation = end.value
            return result


def test_a_stream_yields_every_token_once_in_order(model: Gemma4, folders: dict[str, tuple[Path, Path]]) -> None:
    plain = plain_tokens(model)
    seen: list[list[int]] = []
    oracle = Oracle(load_assistant(folders["k_eq_v"][1], model), {tuple(PROMPT): plain})
    oracle.engine = engine = Engine(model, oracle, max_len=len(PROMPT) + COUNT, page_size=4)
    result = streamed(engine.stream(PROMPT, max_new_tokens=COUNT), seen)
    assert [t for part in seen for t in part] == result.tokens == plain
    assert len(seen) == result.stats.num_steps + 1


@pytest.mark.parametrize("max_batch", [1, 2])
def test_streams_go_on_beside_each_other(model: Gemma4, max_batch: int) -> None:
    """Whose turn it is does not matter, nor whether there is room for both: the second waits where there is not."""
    plain = plain_tokens(model)
    engine = Engine(model, max_len=len(PROMPT) + COUNT, max_batch=max_batch, page_size=4)
    first, second = (engine.stream(PROMPT, max_new_tokens=COUNT) for _ in range(2))
    assert [t for _ in range(3) for t in next(first)] == plain[:3]
    seen: list[list[int]] = [next(second)]
    assert streamed(first, []).tokens == plain
    assert streamed(second, seen).tokens == plain
    assert [t for part in seen for t in part] == plain


def test_a_stream_that_is_closed_frees_its_pages(model: Gemma4) -> None:
    engine = Engine(model, max_len=len(PROMPT) + COUNT, page_size=4)
    stream = engine.stream(PROMPT, max_new_tokens=COUNT)
    next(stream)
    assert engine.has_work
    stream.close()
    assert not engine.has_work
    assert all(pool.num_available == pool.capacity for pool in engine.pools.values())


def test_suppressed_tokens_are_never_chosen(model: Gemma4) -> None:
    plain = plain_tokens(model)
    banned = sorted(set(plain))[:3]
    other = Gemma4(model.config, model.weights, model.ops, suppressed_ids=banned)
    for sampling in (None, Sampling(temperature=1.0)):
        assert not set(generate(other, sampling=sampling).tokens) & set(banned)


def test_sampling_repeats_with_its_seed_and_varies_without(
    model: Gemma4, folders: dict[str, tuple[Path, Path]]
) -> None:
    drafter = load_assistant(folders["k_eq_v"][1], model)
    for d in (None, drafter):
        one, two, other = (generate(model, d, sampling=Sampling(0.8, 20, 0.95, seed)).tokens for seed in (1, 1, 2))
        assert one == two != other


def filtered(logits: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    return distribution(logits, Parameters.of([sampling] * len(logits)), cut_for([sampling]))


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.7, 5, 1.0), (1.3, 0, 0.8), (1, 9, 0.5)])
def test_filters_equal_transformers(temperature: float, top_k: int, top_p: float) -> None:
    logits = 3 * torch.randn(16, 40, generator=torch.Generator().manual_seed(0))
    expected = TemperatureLogitsWarper(float(temperature))(None, logits)
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(None, expected)
    ids, probs = filtered(logits, Sampling(temperature, top_k, top_p))
    dense = torch.zeros_like(logits).scatter(1, ids, probs)
    torch.testing.assert_close(dense, torch.softmax(expected, -1), atol=1e-6, rtol=1e-5)


SMALLEST = [(1e-38, 1.0), (1e-46, 1.0), (5e-324, 1.0), (1.0, 1e-46), (1e-40, 1e-300)]


@pytest.mark.parametrize(("temperature", "top_p"), SMALLEST)
@pytest.mark.parametrize("top_k", [0, 1, 5])
def test_the_smallest_filters_keep_the_likeliest_token(temperature: float, top_p: float, top_k: int) -> None:
    logits = 30 * torch.randn(16, 40, generator=torch.Generator().manual_seed(0)).tanh()
    logits[3] = -INF
    logits[3, 7] = -29.0  # all others are suppressed
    ids, probs = filtered(logits, Sampling(temperature, top_k, top_p))
    assert torch.equal(ids[:, 0], logits.argmax(-1))
    assert torch.equal(probs, torch.zeros_like(probs).index_fill(1, torch.tensor([0]), 1.0))


def test_the_highest_temperatures_are_uniform_over_what_is_not_suppressed() -> None:
    logits = torch.tensor([[30.0, -30.0, -INF, 0.0]])
    for temperature in (1e30, 1e39, 1e300):
        ids, probs = filtered(logits, Sampling(temperature))
        assert torch.equal(torch.zeros_like(probs).scatter(1, ids, probs), torch.tensor([[1 / 3, 1 / 3, 0, 1 / 3]]))


BROKEN = {
    "one NaN": [1.0, NAN, 2.0, 0.0], "all NaN": [NAN] * 4, "infinite": [1.0, INF, 2.0, 0.0], "none left": [-INF] * 4,
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_no_token_is_chosen_from_what_is_no_number(case: str) -> None:
    logits = torch.tensor([[0.5, 2.5, 1.0, -1.0], BROKEN[case]])
    assert likeliest(logits).tolist() == [1, -1]
    for sampling in (Sampling(1.0), Sampling(0.7, 3), Sampling(1.3, 0, 0.9), Sampling(1.0, 2, 1e-46)):
        ids, probs = filtered(logits, sampling)
        assert sample(ids, probs, torch.tensor([0.1, 0.1])).tolist() == [1, -1]
        # verified: the draft is what is chosen, and the row after it is the broken one
        wanted = Parameters.of([Sampling(sampling.temperature, 1)] * 2)
        tokens = choose(logits, torch.tensor([7, 8]), wanted)
        assert tokens.tolist() == [1, -1]
        assert accepted(torch.tensor([[1]]), tokens[None]).tolist() == [1]


class Breaking(TorchOps):
    """TorchOps whose hidden states become NaN after a few steps."""

    num_healthy = 5
    num_steps = 0

    def logits(self, h: Tensor, *args: Any) -> Tensor:
        self.num_steps += 1
        return super().logits(h if self.num_steps <= self.num_healthy else h * NAN, *args)


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("sampling", [None, Sampling(0.9, 10, 0.9)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("suppressed", [(), (95,)])
def test_a_model_that_breaks_while_it_generates_is_an_error(
    folders: dict[str, tuple[Path, Path]], drafts: bool, sampling: Sampling | None, suppressed: tuple[int, ...]
) -> None:
    target, assistant = folders["shared_ple"]  # its drafter has a centroid head, which asks for no logits
    loaded = load(target)
    model = Gemma4(loaded.config, loaded.weights, loaded.ops, suppressed_ids=suppressed)
    drafter = load_assistant(assistant, model) if drafts else None
    plain = generate(model, drafter, sampling=sampling).tokens
    engine = Engine(model, drafter, max_len=len(PROMPT) + COUNT, page_size=4)
    model.ops = Breaking(CPU, torch.float32)
    steps: list[list[int]] = []
    with pytest.raises(NumericsError, match=r"NaN or infinity \(float32\)") as caught:
        streamed(engine.stream(PROMPT, max_new_tokens=COUNT, sampling=sampling), steps)
    seen = [token for step in steps for token in step]
    assert 5 <= len(seen) < COUNT
    assert seen == plain[: len(seen)]
    found = re.search(r"no token can follow (\d+) tokens", str(caught.value))
    assert found
    assert len(PROMPT) + len(seen) <= int(found[1]) <= len(PROMPT) + len(seen) + 3  # drafts that were accepted with it
    model.ops = TorchOps(CPU, torch.float32)
    assert engine.generate(PROMPT, max_new_tokens=COUNT, sampling=sampling).tokens == plain


def test_suppressing_every_token_is_refused(model: Gemma4) -> None:
    with pytest.raises(UsageError, match="all 96 tokens"):
        Gemma4(model.config, model.weights, model.ops, suppressed_ids=range(96))
    with pytest.raises(UsageError, match=r"token 96 .*vocabulary of 96"):
        Gemma4(model.config, model.weights, model.ops, suppressed_ids=[96])


def test_samples_follow_the_distribution() -> None:
    probs = torch.tensor([[0.5, 0.3, 0.2, 0.0]])
    uniforms = torch.linspace(0, 1, 10_001)[:-1]
    ids = torch.tensor([[7, 3, 9, 1]]).expand(len(uniforms), -1)
    drawn = sample(ids, probs.expand(len(uniforms), -1), uniforms)
    assert [int((drawn == i).sum()) for i in (7, 3, 9, 1)] == pytest.approx([5000, 3000, 2000, 0], abs=2)


def test_a_sample_never_falls_on_a_filtered_token() -> None:
    """The largest uniform there is, times a total that is not 1, may round up to the total."""
    totals = torch.linspace(0.1, 1.0, 999)[:, None]
    probs = totals * torch.tensor([[0.75, 0.25, 0.0, 0.0]])
    ids = torch.tensor([[4, 5, 6, 7]]).expand(999, -1)
    for uniform, expected in ((1 - 2**-24, 5), (0.0, 4)):
        assert set(sample(ids, probs, torch.full((999,), uniform)).tolist()) == {expected}


def test_acceptance_counts_the_matching_prefix() -> None:
    targets = torch.tensor([[5, 6, 7, 8]])
    for drafts, count in (([5, 6, 7], 3), ([5, 9, 7], 1), ([4, 6, 7], 0)):
        assert accepted(torch.tensor([drafts]), targets).tolist() == [count]


def test_impossible_requests_are_refused(model: Gemma4, folders: dict[str, tuple[Path, Path]]) -> None:
    engine = Engine(model, max_len=30)
    for ids, count, message in (
        ([], 4, "empty"),
        ([2, 9999], 4, "9999"),
        (PROMPT, 0, "0 new tokens"),
        (PROMPT, 10, "need 31; the cache holds 30"),
    ):
        with pytest.raises(UsageError, match=message):
            engine.generate(ids, max_new_tokens=count)
    with pytest.raises(UsageError, match="takes 1,024"):
        Engine(model, max_len=2048)
    with pytest.raises(UsageError, match="8 draft tokens"):
        Engine(model, load_assistant(folders["k_eq_v"][1], model), max_len=30, num_draft_tokens=8)


class NoWaiting(TorchDispatchMode):
    """Fails on what would wait for a device: reading a value on the host, or a shape that depends on values."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "unique", "masked_select", "is_nonzero", "_to_copy_host")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        if any(name.startswith(word) for word in self.FORBIDDEN):
            raise AssertionError(f"a decode step must not call {func}")
        return func(*args, **(kwargs or {}))


class Deviceless(TorchOps):
    """TorchOps with the two ops that read values (cache write, attention) answered without looking."""

    def qkv_norm_rope(self, qkv: Tensor, heads: HeadNorms, kv: KVView, batch: AttnBatch) -> Tensor:
        return qkv[:, : heads.num_q_heads * kv.head_dim].reshape(len(qkv), heads.num_q_heads, kv.head_dim)

    def attn_decode(self, q: Tensor, kv: KVView, batch: AttnBatch) -> Tensor:
        return q


@pytest.mark.parametrize("variant", ["k_eq_v", "shared_ple", "moe"])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.9, 10, 0.9)], ids=["greedy", "sampled"])
def test_a_decode_step_never_waits_for_the_device(
    folders: dict[str, tuple[Path, Path]], variant: str, sampling: Sampling
) -> None:
    """So it can be captured in one CUDA graph, on a backend whose ops keep the same promise."""
    target, assistant = folders[variant]
    model = load(target)
    drafter = load_assistant(assistant, model)
    ops = Deviceless(CPU, torch.float32)
    for holder in (model, model.stack, drafter, drafter.stack):
        holder.ops = ops
    engine = Engine(model, drafter, max_len=40)
    with torch.inference_mode(), NoWaiting():
        result = engine.runner.step(1, Arm(3), SamplingMode(not sampling.is_greedy, cut_for([sampling])), 64)
    assert result.shape == (1, 6)
