"""A divided model in processes of its own, over gloo, makes the tokens of one rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from command import ROOT
from divided_models import ODD, make_pair
from divided_sessions import opens, opens_with_media, too_large
from test_step_plan import EveryThird
from tiny_gemma import prompt
from tiny_media import VISION, interleaved, item, make_model

from kerngen.errors import KerngenError
from kerngen.runtime.config import Arm
from kerngen.runtime.engine import Engine, Handle, Request
from kerngen.runtime.engine.draft_length import Choice
from kerngen.runtime.engine.ranks import Ranks
from kerngen.runtime.sampling import Sampling
from kerngen.runtime.session import Session

TINY = ROOT / "examples" / "tiny"


def requests() -> list[Request]:
    """Of every kind; some begin alike, and all of one length of prompt and more than one window."""
    common = prompt(18, seed=7)
    how = [
        Sampling(), Sampling(), Sampling(0.9, 30, 0.9, seed=1), Sampling(1.2, min_p=0.1, seed=2),
        Sampling(repetition_penalty=1.3, frequency_penalty=0.5), Sampling(0.8, seed=3, logit_bias=((31, 3.0),)),
    ]  # fmt: skip
    made = [Request([*common, 30 + i, *prompt(3 + i, seed=i)], 6, sampling) for i, sampling in enumerate(how)]
    made.append(Request(prompt(9, seed=8), 6, mask=EveryThird()))
    made.append(Request(prompt(40, seed=9), 6, suppressed_ids=range(10, 40), logprobs=2))
    return made


def engine_of(session: Session, **options: Any) -> Engine:
    options = {"max_len": 64, "max_batch": 4, "page_size": 8, "prefill_chunk": 24} | options
    return Engine(session.model, session.drafter, ranks=session.ranks, **options)


CROWDED = {"num_pages": {"full": 12, "sliding": 14}}  # less than what four take: some are preempted


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    found = {variant: make_pair(tmp_path_factory.mktemp(variant), variant) for variant in (*ODD, "dflash")}
    return found | {"trained": (TINY / "gemma-4-tiny", TINY / "gemma-4-tiny-assistant")}


@pytest.fixture(scope="module")
def expected(pairs: dict[str, tuple[Path, Path]]) -> dict[str, list[list[int]]]:
    """What one rank makes of each request alone, without drafts."""
    found = {}
    for variant, (target, _) in pairs.items():
        engine = engine_of(opens(target, None, "torch", None, None, None), max_batch=1, prefix_caching=False)
        found[variant] = [engine.generate_many([request])[0].tokens for request in requests()]
    return found


@pytest.fixture(scope="module", params=[2, 3, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """The processes of each number of ranks, which open one model after the other."""
    group = Ranks(request.param, "cpu")
    yield group
    group.close()


@pytest.mark.parametrize("variant", [*ODD, "trained"])
def test_a_divided_model_makes_one_ranks_tokens(
    ranks: Ranks, pairs: dict[str, tuple[Path, Path]], expected: dict[str, list[list[int]]], variant: str
) -> None:
    """Greedy and sampled, guided, penalized, with prefix hits and preempted, with drafts and without."""
    if variant == "trained" and ranks.world.size > 2:
        pytest.skip("its two query heads do not divide among more")
    session = ranks.load(partial(opens, *pairs[variant], "torch"))
    for drafts, options in ((0, {}), (3, CROWDED)):
        engine = engine_of(session, num_draft_tokens=drafts, **options)
        if variant == "dense":
            engine.make_ready()
        made = engine.generate_many(requests())
        assert [g.tokens for g in made] == expected[variant], (drafts, options)
        if options:
            assert engine.load.num_preemptions > 0
        else:
            assert sum(g.stats.num_cached_tokens for g in made) > 0, "prompts that begin alike share pages"
    if variant == "trained":
        assert max(g.stats.acceptance_length for g in made) > 1.2, "its drafts are accepted on all ranks alike"


@pytest.mark.parametrize("variant", ODD)
def test_so_do_the_kernels(
    ranks: Ranks, pairs: dict[str, tuple[Path, Path]], expected: dict[str, list[list[int]]], variant: str
) -> None:
    """Their references, in fp32: the calls of the launched path."""
    session = ranks.load(partial(opens, *pairs[variant], "kernels"))
    engine = engine_of(session, num_draft_tokens=2, page_size=16)
    some = [0, 2, 6]
    made = engine.generate_many([requests()[i] for i in some])
    assert [g.tokens for g in made] == [expected[variant][i] for i in some]
    assert "sums of routed experts" in session.ops.outside() or variant != "moe"


@pytest.mark.parametrize("backend", ["torch", "kernels"])
def test_a_dflash_drafter_drafts_alike_on_all_ranks(
    ranks: Ranks, pairs: dict[str, tuple[Path, Path]], expected: dict[str, list[list[int]]], backend: str
) -> None:
    """Each rank has all of it, and some rows of the head."""
    session = ranks.load(partial(opens, *pairs["dflash"], backend))
    engine = engine_of(session, num_draft_tokens=5, page_size=16)
    some = [0, 2, 6]
    made = engine.generate_many([requests()[i] for i in some])
    assert [g.tokens for g in made] == [expected["dflash"][i] for i in some]
    alone = engine_of(opens(*pairs["dflash"], backend, None, None, None), num_draft_tokens=5, page_size=16)
    assert [g.stats.accepted for g in alone.generate_many([requests()[i] for i in some])] == [
        g.stats.accepted for g in made
    ]


def test_ranks_ask_the_same_of_two_drafters(
    ranks: Ranks, pairs: dict[str, tuple[Path, Path]], expected: dict[str, list[list[int]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    both = (pairs["k_eq_v"][1], pairs["dflash"][1])
    session = ranks.load(partial(opens, pairs["dflash"][0], both, "torch"))
    engine = engine_of(session, page_size=16)
    arms = cycle((Arm(3), Arm(5, 1), Arm(0), Arm(11, 1), Arm(7)))
    monkeypatch.setattr(engine._lengths, "choose", lambda bucket: Choice(next(arms), bucket))
    some = [0, 2, 6]
    made = engine.generate_many([requests()[i] for i in some])
    assert [g.tokens for g in made] == [expected["dflash"][i] for i in some]


def test_an_engine_without_drafts_of_a_model_that_has_a_drafter(
    ranks: Ranks, pairs: dict[str, tuple[Path, Path]], expected: dict[str, list[list[int]]]
) -> None:
    """No rank drafts then, and all have room for the same."""
    session = ranks.load(partial(opens, *pairs["dense"], "torch"))
    engine = Engine(session.model, max_len=64, max_batch=4, page_size=8, prefill_chunk=24, ranks=session.ranks)
    engine.make_ready()
    assert [g.tokens for g in engine.generate_many(requests())] == expected["dense"]


def test_mixed_batches_and_all_of_a_prompts_logprobs(
    ranks: Ranks, pairs: dict[str, tuple[Path, Path]], expected: dict[str, list[list[int]]]
) -> None:
    session = ranks.load(partial(opens, pairs["dense"][0], None, "torch"))
    engine = engine_of(session)
    first = engine.submit(requests()[0])
    while len(first.tokens) < 3:
        engine.step()
    second = engine.submit(Request(requests()[2].prompt, 6, requests()[2].sampling, prompt_logprobs=1))
    third = engine.submit(requests()[3])
    while engine.has_work:
        engine.step()
    for handle, index in ((first, 0), (second, 2), (third, 3)):
        assert handle.tokens == expected["dense"][index]
    alone = engine_of(opens(pairs["dense"][0], None, "torch", None, None, None))
    weighed = alone.submit(Request(requests()[2].prompt, 1, prompt_logprobs=1))
    while not weighed.is_done:
        alone.step()
    assert len(second.prompt_logprobs) == len(weighed.prompt_logprobs) > 0
    for mine, want in zip(second.prompt_logprobs, weighed.prompt_logprobs, strict=True):
        assert mine.logprob == pytest.approx(want.logprob, abs=1e-3)


def test_every_rank_embeds_what_it_needs(ranks: Ranks, tmp_path: Path) -> None:
    """The other ranks are told the images and sounds, and make one rank's tokens with them."""
    if ranks.world.size == 3:
        pytest.skip("the model's four query heads do not divide among three")
    make_model(tmp_path, "dense", **VISION)
    parts = [(5, item(24, 1), 7), (4, item(11, 1, "audio"), 3, item(20, 2), 2), (9,), (5, item(24, 1), 3)]
    prompts = [interleaved(*of_each, seed=i) for i, of_each in enumerate(parts)]
    asked = [Request(ids, 6, media=media) for ids, media in prompts]
    engine = engine_of(opens_with_media(tmp_path, None, None, None), max_batch=1, prefix_caching=False)
    expected = [engine.generate_many([request])[0].tokens for request in asked]
    session = ranks.load(partial(opens_with_media, tmp_path))
    divided = engine_of(session, prefill_chunk=20, media_cache_bytes=30 * 32 * 4, **CROWDED)
    assert [g.tokens for g in divided.generate_many(asked)] == expected
    assert len(divided.runner._embeddings) == 1, "what has no room is forgotten"
    if ranks.world.size == 2:
        assert_what_one_rank_cannot_embed_ends_alone(divided, asked[2:], expected[2:])
        ranks.require_alive()


def assert_what_one_rank_cannot_embed_ends_alone(
    engine: Engine, others: Sequence[Request], expected: Sequence[Sequence[int]]
) -> None:
    """Whichever rank that is."""
    handles, wrong = [engine.submit(others[0])], list[Handle]()
    for rank in (1, 0):
        engine.step()
        ids, media = interleaved(3, too_large(rank), 2)
        wrong.append(engine.submit(Request(ids, 6, media=media)))
    handles += [engine.submit(request) for request in others[1:]]
    while engine.has_work:
        engine.step()
    assert [handle.tokens for handle in handles] == expected
    said = "no memory left to embed image input"
    assert [(type(h.error), said in str(h.error), h.tokens) for h in wrong] == [(KerngenError, True, [])] * 2
