"""The torch backend against transformers: logits, greedy tokens, chunks, the ring cache and the drafter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_gemma import (
    CPU,
    VARIANTS,
    WINDOW,
    hf_greedy,
    hf_logits,
    load,
    load_assistant,
    make_assistant,
    make_target,
    prompt,
)
from transformers import Gemma4ForCausalLM

from kerngen.runtime.batch import Batch
from kerngen.runtime.cache import KVCache
from kerngen.runtime.config import RopeConfig
from kerngen.runtime.engine import Engine
from kerngen.runtime.model import Gemma4, inverse_frequencies, rounded_scale
from kerngen.runtime.ops.eager import TorchOps
from kerngen.templates.values import AttnBatch, KVView, Mask

PROMPT = prompt(5 * WINDOW + 3)  # the window is shorter than the prompt, and divides nothing
HF = Gemma4ForCausalLM


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, HF]]:
    root = tmp_path_factory.mktemp("targets")
    return {name: (root / name, make_target(root / name, name)) for name in VARIANTS}


def prefill(model: Gemma4, ids: list[int], chunk: int, page_size: int = 4, outputs: str = "all") -> torch.Tensor:
    """Hidden states of every token (or of the last one) after a prefill in chunks."""
    cache = KVCache.whole(model.config, model.ops, batch=1, max_len=len(ids), page_size=page_size)
    tokens = torch.tensor(ids)
    parts = [
        model.forward(Batch.prefill(tokens[i : i + chunk], i, cache), cache, outputs=outputs)
        for i in range(0, len(ids), chunk)
    ]
    return torch.cat(parts)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(targets: dict[str, tuple[Path, HF]], variant: str) -> None:
    folder, hf = targets[variant]
    model = load(folder)
    ours, theirs = model.logits(prefill(model, PROMPT, len(PROMPT))), hf_logits(hf, PROMPT)
    assert theirs.std() > 0.5, "the random model must not be flat"
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_64_greedy_tokens_equal_transformers(targets: dict[str, tuple[Path, HF]], variant: str) -> None:
    folder, hf = targets[variant]
    expected = hf_greedy(hf, PROMPT, 64)
    assert len(set(expected)) > 4, "the reference must not repeat itself"
    engine = Engine(load(folder), max_len=len(PROMPT) + 64, prefill_chunk=7, page_size=4)
    assert engine.generate(PROMPT, max_new_tokens=64).tokens == expected


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("chunk", [1, 5, WINDOW, 2 * WINDOW + 1])
def test_chunked_prefill_equals_one_shot(targets: dict[str, tuple[Path, HF]], variant: str, chunk: int) -> None:
    model = load(targets[variant][0])
    whole = prefill(model, PROMPT, len(PROMPT))
    torch.testing.assert_close(prefill(model, PROMPT, chunk), whole, atol=1e-4, rtol=0)


def test_a_prefill_that_needs_only_the_last_token_skips_the_layers_that_share_kv(
    targets: dict[str, tuple[Path, HF]],
) -> None:
    model = load(targets["shared_ple"][0])
    whole = prefill(model, PROMPT, len(PROMPT))
    last = prefill(model, PROMPT, len(PROMPT), outputs="last")
    assert last.shape == (1, model.config.hidden_size)
    torch.testing.assert_close(last[0], whole[-1], atol=1e-4, rtol=0)
    assert prefill(model, PROMPT, len(PROMPT), outputs="none").shape == (0, model.config.hidden_size)


def test_two_sequences_of_different_length_decode_together(targets: dict[str, tuple[Path, HF]]) -> None:
    model = load(targets["k_eq_v"][0])
    lengths, q_len = [19, 3], 3
    sequences = [prompt(n + q_len, seed=n) for n in lengths]
    cache = KVCache.whole(model.config, model.ops, batch=2, max_len=32, page_size=4)
    parts = [torch.tensor(s[:n]) for s, n in zip(sequences, lengths, strict=True)]
    ids = torch.cat(parts)
    positions = [torch.arange(n) for n in lengths]
    slots = cache.slots_of(torch.tensor([0] * lengths[0] + [1] * lengths[1]), torch.cat(positions))
    ends = torch.tensor([0, lengths[0], sum(lengths)], dtype=torch.int32)
    kv_lens = torch.tensor(lengths, dtype=torch.int32)
    ragged = Batch(ids, torch.cat(positions), kv_lens, slots, 0, max(lengths), ends, max(lengths))
    model.forward(ragged, cache, outputs="none")
    new = torch.tensor([s[n:] for s, n in zip(sequences, lengths, strict=True)])
    hidden = model.forward(Batch.decode(new, torch.tensor(lengths), cache, 64, model.ops), cache).view(2, q_len, -1)
    for got, sequence in zip(hidden, sequences, strict=True):
        whole = prefill(model, sequence, len(sequence))
        torch.testing.assert_close(got, whole[-q_len:], atol=1e-4, rtol=0)


@pytest.mark.parametrize("window", [0, 2])
def test_a_query_that_sees_no_key_gives_zeros_and_nan_stays_nan(window: int) -> None:
    """Four queries and a cache of two tokens: the first two sit before its start."""
    generator = torch.Generator().manual_seed(0)
    pages = KVView(*(torch.randn(1, 1, 4, 8, generator=generator) for _ in range(2)))
    table, kv_lens = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
    q = torch.randn(4, 2, 8, generator=generator)
    q[3, 1, 5] = float("nan")
    batch = AttnBatch(table, kv_lens, Mask(window=window), 64, 4)
    out = TorchOps(CPU, torch.float32).attn_decode(q, pages, batch)
    assert torch.equal(out[:2], torch.zeros(2, 2, 8))
    torch.testing.assert_close(out[2], pages.v_cache[0, :, 0].expand(2, -1))  # one key: its value
    assert out[3, 0].isfinite().all()
    assert out[3, 1].isnan().all()


@pytest.mark.parametrize("num_centroids", [0, 12])
@pytest.mark.parametrize("variant", ["dense", "k_eq_v", "shared_ple"])
def test_drafter_logits_equal_transformers(
    tmp_path: Path, targets: dict[str, tuple[Path, HF]], variant: str, num_centroids: int
) -> None:
    """Three draft steps from the end of a prompt that is longer than window + 1, each from the same state."""
    folder, hf = targets[variant]
    assistant = make_assistant(tmp_path, variant, num_centroids=num_centroids)
    model = load(folder)
    drafter = load_assistant(tmp_path, model)
    cache = KVCache.whole(model.config, model.ops, batch=1, max_len=len(PROMPT), page_size=4)
    hidden = model.forward(Batch.prefill(torch.tensor(PROMPT), 0, cache), cache, outputs="last")
    with torch.no_grad():
        out = hf(torch.tensor([PROMPT]), output_hidden_states=True, return_shared_kv_states=True)
    token, lengths = torch.tensor([11]), torch.tensor([len(PROMPT)])
    theirs_token, theirs_hidden = token[None], out.hidden_states[-1][:, -1:]
    for _ in range(3):
        y = drafter.step(token, hidden, lengths, cache, 64)
        hidden = drafter.carried(y)
        with torch.no_grad():
            embedded = hf.get_input_embeddings()(theirs_token)
            theirs = assistant(
                inputs_embeds=torch.cat((embedded, theirs_hidden), dim=-1),
                position_ids=lengths[None],
                shared_kv_states=out.shared_kv_states,
            )
        torch.testing.assert_close(drafter.logits(y), theirs.logits[0], atol=1e-4, rtol=0)
        torch.testing.assert_close(hidden, theirs.last_hidden_state[0], atol=1e-4, rtol=1e-4)
        token = drafter.greedy(y)
        theirs_token, theirs_hidden = theirs.logits.argmax(-1), theirs.last_hidden_state
        assert token.tolist() == theirs_token[0].tolist()
        hidden = theirs_hidden[0]  # rounding differences would grow from step to step


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_16_bit_stays_near_transformers(targets: dict[str, tuple[Path, HF]], variant: str, dtype: torch.dtype) -> None:
    folder, hf = targets[variant]
    model, rounded = load(folder, dtype), HF.from_pretrained(folder, dtype=dtype)
    ours_error = theirs_error = distance = 0.0
    for seed in range(4):
        ids = prompt(len(PROMPT), seed)
        exact, theirs = hf_logits(hf, ids), hf_logits(rounded, ids).float()
        ours = model.logits(prefill(model, ids, len(ids)))
        ours_error += float((ours - exact).square().mean())
        theirs_error += float((theirs - exact).square().mean())
        distance += float((ours - theirs).square().mean())
    # Both round at the same places but in attention: alike in error, and nearer to each other than to fp32.
    assert ours_error < 1.5 * theirs_error
    assert distance < theirs_error


def test_embedding_scale_is_rounded_to_the_tables_dtype() -> None:
    assert rounded_scale(5376**0.5, torch.bfloat16) == 73.5
    assert rounded_scale(1536**0.5, torch.bfloat16) == 39.25
    assert rounded_scale(5376**0.5, torch.float32) == pytest.approx(73.3212, abs=1e-4)


def test_proportional_rope_rotates_64_of_256_pairs_with_the_whole_head_as_denominator() -> None:
    inv_freq = inverse_frequencies(RopeConfig(1e6, 64, 1.0), 512, CPU)
    assert inv_freq.shape == (256,)
    assert inv_freq[:3].tolist() == pytest.approx([1.0, 0.94746, 0.89769], abs=1e-5)
    assert inv_freq[63].item() == pytest.approx(0.0333762, abs=1e-7)
    assert not inv_freq[64:].any()
