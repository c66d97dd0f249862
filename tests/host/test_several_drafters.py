"""An engine with an MTP and a DFlash drafter asks either from step to step, and no token depends on it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from command import Kerngen
from test_dflash import ASKED, Noting, drafted
from test_engine_batches import PAGE, alone, assert_nothing_is_held, engine_for
from tiny_dflash import load_dflash, make_dflash
from tiny_gemma import load, load_assistant, make_assistant, make_target

import kerngen
from kerngen.errors import PageError, UsageError
from kerngen.runtime.config import NO_DRAFTS, Arm
from kerngen.runtime.drafters import Drafters
from kerngen.runtime.engine import Engine, page_check
from kerngen.runtime.engine.draft_length import Choice
from kerngen.runtime.engine.plan import RowUpdate
from kerngen.runtime.model import Gemma4

TINY = Path(__file__).parents[2] / "examples" / "tiny"
FOLDERS = (TINY / "gemma-4-tiny-assistant", TINY / "gemma-4-tiny-dflash")
EACH = (*(Arm(n) for n in range(1, 8)), *(Arm(n, 1) for n in (3, 5, 7, 11, 15)))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Gemma4, Path]:
    root: Path = tmp_path_factory.mktemp("drafters")
    make_target(root / "target", "k_eq_v")
    make_assistant(root / "assistant", "k_eq_v")
    make_dflash(root / "dflash", 5, (0, 1, 3))
    return load(root / "target"), root


@pytest.mark.parametrize("depth", [0, 1])
def test_whoever_drafts_no_token_changes(
    made: tuple[Gemma4, Path], monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    """Of any number of drafts, in any order; and the block is that of the text alone, whoever drafted before it."""
    model, root = made
    expected = alone(model, ASKED)
    known = {tuple(r.prompt): t for r, t in zip(ASKED, expected, strict=True)}
    block = load_dflash(root / "dflash", model)
    noting = Noting(block, known)
    both = Drafters([load_assistant(root / "assistant", model), noting])
    assert both.policy.arms == EACH
    noting.engine = engine = engine_for(model, both, num_draft_tokens=None, async_depth=depth, prefill_chunk=9,
                                        max_batch=5, num_pages={"full": 26, "sliding": 60})  # fmt: skip
    draw, asked = random.Random(1), set[Arm]()

    def choose(bucket: int) -> Choice:
        arm = draw.choice((NO_DRAFTS, *EACH))
        asked.add(arm)
        return Choice(arm, bucket)

    monkeypatch.setattr(engine._lengths, "choose", choose)
    made_ = engine.generate_many(ASKED)
    assert [g.tokens for g in made_] == expected
    assert_nothing_is_held(engine)
    assert {arm.by for arm in asked} == {0, 1}
    assert sum(g.stats.num_preemptions for g in made_) > 0
    with torch.inference_mode():
        for (key, length), (drafts, context) in list(noting.notes.items())[:: 1 + depth]:
            _, alone_, from_scratch = drafted(block, [*key, *known[key]][: length + 1])
            assert alone_[: len(drafts)].tolist() == drafts, (len(key), length)
            torch.testing.assert_close(context, from_scratch, rtol=1e-3, atol=1e-3)


def test_pages_of_a_block_are_checked(made: tuple[Gemma4, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind what is verified, too: all of a block is written."""
    monkeypatch.setenv(page_check.VARIABLE, "1")
    model, root = made
    both = Drafters([load_assistant(root / "assistant", model), load_dflash(root / "dflash", model)])
    engine = engine_for(model, both, num_draft_tokens=None, prefill_chunk=9, max_batch=5,
                        num_pages={"full": 26, "sliding": 60})  # fmt: skip
    draw = random.Random(1)
    monkeypatch.setattr(engine._lengths, "choose", lambda bucket: Choice(draw.choice((NO_DRAFTS, *EACH)), bucket))
    made_ = engine.generate_many(ASKED)
    assert [g.tokens for g in made_] == alone(model, ASKED)
    assert sum(g.stats.num_preemptions for g in made_) > 0
    monkeypatch.setattr(engine._lengths, "choose", lambda bucket: Choice(Arm(3, 1), bucket))
    handle, update = engine.submit(ASKED[0]), engine.runner.update

    def broken(of: RowUpdate) -> None:
        update(of)
        engine.cache.tables[0, 0, (len(handle.known) + 12) // PAGE] = 999

    while len(handle.tokens) < 2:
        engine.step()
    monkeypatch.setattr(engine.runner, "update", broken)
    with pytest.raises(PageError, match=r"request \d+ .*is page 999; allowed are 0 to 25"):
        engine.step()


def test_it_chooses_among_both_by_itself(made: tuple[Gemma4, Path]) -> None:
    model, root = made
    both = Drafters([load_assistant(root / "assistant", model), load_dflash(root / "dflash", model)])
    engine = engine_for(model, both, num_draft_tokens=None)
    engine.make_ready()
    assert [g.tokens for g in engine.generate_many(ASKED)] == alone(model, ASKED)
    assert engine.runner.limits.max_drafts == (7, 15)


def test_what_does_not_go_together_is_said(made: tuple[Gemma4, Path]) -> None:
    model, root = made
    mtp, block = load_assistant(root / "assistant", model), load_dflash(root / "dflash", model)
    for among in ([block, block], [mtp, mtp], [mtp, block, mtp]):
        with pytest.raises(UsageError, match=f"{len(among)} drafters, "):
            Drafters(among)
    with pytest.raises(UsageError, match="no run is reproducible") as refused:
        Engine(model, Drafters([mtp, block]), max_len=60, reproducible=True)
    assert "name one drafter" in refused.value.hint
    with pytest.raises(UsageError, match="3 draft tokens, by which of 2 drafters"):
        engine_for(model, Drafters([mtp, block]))
    plain = Engine(model, Drafters([mtp, block]), max_len=60, max_batch=2, num_draft_tokens=0)
    assert plain.generate_many(ASKED[:1])[0].tokens == alone(model, ASKED)[0]


def test_a_command_and_a_session_take_both(kerngen: Kerngen) -> None:
    target, prompt = str(TINY / "gemma-4-tiny"), "What is a warp?"
    run = ("run", target, "--temperature", "0", "--max-new-tokens", "40", "--prompt", prompt)
    named = [word for folder in FOLDERS for word in ("--draft", str(folder))]
    assert kerngen.ok(*run, *named) == kerngen.ok(*run, "--no-draft")
    for args, words in (
        ((*run, *named, "--num-draft-tokens", "3"), "by which of 2 drafters"),
        (("run", target, *named, "--plan"), "--plan is for one drafter"),
        (("serve", target, *named, "--generated", "--port", "0"), "generated weights take one drafter"),
    ):
        code, _, err = kerngen(*args)
        assert (code, words in err) == (2, True), err


def test_a_session_says_what_drafts() -> None:
    session = kerngen.load(TINY / "gemma-4-tiny", draft=FOLDERS, device="cpu")
    assert session.drafter_folders == FOLDERS
    assert (session.draft_weights, session.drafter_names) == (
        "stored",
        "gemma-4-tiny-assistant and gemma-4-tiny-dflash",
    )
    plain = kerngen.load(TINY / "gemma-4-tiny", draft=False, device="cpu")
    assert (plain.draft_weights, plain.drafter_names) == (None, None)
    question = "What is a warp?"
    assert session.generate(question, max_new_tokens=24).text == plain.generate(question, max_new_tokens=24).text
