"""The tiny checkpoint on the GPU: our kernels give the tokens that torch gives, drafted or not."""

from __future__ import annotations

from pathlib import Path

import pytest

TINY = Path(__file__).parents[2] / "examples" / "tiny"
NUM_TOKENS = 96


def _generate(backend: str, folder: Path, draft: Path | None) -> tuple[list[int], float]:
    from kerngen.runtime.backend import open_backend
    from kerngen.runtime.engine import Engine
    from kerngen.runtime.session import open_checkpoint

    ops = open_backend(backend, device="cuda", dtype="bf16")
    session = open_checkpoint(folder, ops, drafts=[] if draft is None else [draft])
    text = session.codec.chat([{"role": "user", "content": (TINY / "prompt.txt").read_text()}])
    prompt = session.codec.encode(text)
    engine = Engine(session.model, session.drafter, max_len=len(prompt) + NUM_TOKENS, num_draft_tokens=4)
    found = engine.generate(prompt, max_new_tokens=NUM_TOKENS, stop_ids=session.stop_ids)
    assert len(prompt) > session.config.window
    return found.tokens, found.stats.acceptance_length


@pytest.mark.parametrize("name", ["gemma-4-tiny", "gemma-4-tiny-w4a16"])
def test_cuda_gives_the_tokens_that_torch_gives(name: str) -> None:
    expected, _ = _generate("torch", TINY / name, None)
    assert len(expected) > 32
    assert _generate("cuda", TINY / name, None)[0] == expected
    drafted, acceptance = _generate("cuda", TINY / name, TINY / "gemma-4-tiny-assistant")
    assert drafted == expected
    assert acceptance > 2.0


@pytest.mark.parametrize("drafting", [None, 0, 4], ids=["adapted", "none", "4"])
def test_many_at_once_give_what_each_gives_alone(drafting: int | None) -> None:
    """Prompts of every length, more of them than rows: graphs of several batches, rows that join, move and leave."""
    from kerngen.runtime.backend import open_backend
    from kerngen.runtime.session import open_checkpoint

    ops = open_backend("cuda", device="cuda", dtype="bf16")
    session = open_checkpoint(TINY / "gemma-4-tiny", ops, drafts=[TINY / "gemma-4-tiny-assistant"])
    session.num_draft_tokens, session.max_batch = drafting, 5
    text = (TINY / "prompt.txt").read_text()
    prompts = [text[: 40 + 60 * i] for i in range(9)]
    alone = [session.generate(p, max_new_tokens=40).tokens for p in prompts]
    assert [c.tokens for c in session.generate_many(prompts, max_new_tokens=40)] == alone
    engine = session.reserve(1)
    assert not engine.has_work
    assert all(pool.num_available == pool.capacity for pool in engine.pools.values())


@pytest.mark.parametrize("name", ["gemma-4-tiny-media", "gemma-4-tiny-unified"])
@pytest.mark.parametrize("backend", ["torch", "cuda"])
def test_shapes_and_tones_are_named(backend: str, name: str) -> None:
    """By kernels, and graphs of a tower."""
    import kerngen

    pytest.importorskip("PIL.Image", reason="Pillow is not installed: pip install 'kerngen[media]'")
    session = kerngen.load(TINY / name, backend=backend, device="cuda", media="images,audio")
    image, sound = [TINY / "cross.png"], [TINY / "tone.wav"]
    for question, shown, right in (
        ("What is this?", {"images": image}, "A green cross."),
        ("What do you hear?", {"audio": sound}, "A low tone."),
        ("What do you see and hear?", {"images": image, "audio": sound}, "A green cross and a low tone."),
    ):
        assert session.generate(question, **shown, max_new_tokens=24).text == right
