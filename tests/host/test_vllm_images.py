"""Images of vLLM's batches as the last key that each new token sees, beside vLLM's own mask, key by key."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from kerngen.arch import ARCHES, Target
from kerngen.templates import find_kernel
from kerngen.vllm.attention_grid import Grid, Heads
from kerngen.vllm.image_ends import ends_of, images_among

Images = list[tuple[int, int]]


def vllms_mask(first: int, kv_len: int, window: int, images: Images, clamps: bool) -> Tensor:
    """[new tokens, kv_len] bool: vLLM 0.26's compute_kv_seq_mask. clamps: its MM_PREFIX_CLAMP_SW."""
    query, key = torch.arange(first, kv_len)[:, None], torch.arange(kv_len)[None]
    in_window = query - key < window if window else torch.ones(1, kv_len, dtype=torch.bool)
    seen = (key <= query) & in_window
    for begin, end in images:
        both = (query >= begin) & (query <= end) & (key >= begin) & (key <= end) & (begin < end)
        seen |= both & in_window if clamps else both
    return seen


def attn_prefills_mask(first: int, kv_len: int, window: int, ends: Tensor) -> Tensor:
    """The same as values.Mask says it."""
    query, key = torch.arange(first, kv_len)[:, None], torch.arange(kv_len)[None]
    return (key <= ends[:, None]) & (query - key < window if window else torch.tensor(True))


def drawn(draw: random.Random, kv_len: int, longest: int) -> Images:
    """Some images behind each other, also side by side, of a token and more; also behind the sequence's last token."""
    images, at = [], 0
    while (begin := at + draw.choice((0, 1, 2, draw.randrange(30)))) < kv_len + 20:
        at = begin + draw.randint(1, longest)
        images.append((begin, at - 1))
    return images


@pytest.mark.parametrize("clamps", [True, False], ids=["cut at the window", "no longer than the window"])
def test_each_token_sees_what_it_sees_in_vllm(clamps: bool) -> None:
    draw = random.Random(3)
    longer = inside = 0
    for _ in range(150):
        window = draw.choice((0, 1, 7, 16, 40))
        sequences, expected = [], []
        for _ in range(draw.randint(1, 4)):
            kv_len = draw.randint(1, 90)
            first = draw.choice((0, draw.randrange(kv_len)))
            images = drawn(draw, kv_len, window or 60 if not clamps else 60)
            longer += any(end - begin >= window > 0 for begin, end in images)
            inside += any(begin < first < end for begin, end in images)
            sequences.append((first, kv_len - first, images_among(images, first, kv_len - 1)))
            expected.append(vllms_mask(first, kv_len, window, images, clamps))
        tokens = sum(count for _, count, _ in sequences)
        ends = ends_of(sequences, tokens + 3)
        assert ends.dtype == torch.int32
        assert not ends[tokens:].any(), "what pads a batch"
        for (first, count, among), own, mask in zip(sequences, ends[:tokens].split([len(m) for m in expected]),
                                                    expected, strict=True):  # fmt: skip
            assert torch.equal(attn_prefills_mask(first, first + count, window, own), mask), (first, window, among)
            assert not (own.diff() < 0).any(), "ends fall"
            causal = torch.equal(own, torch.arange(first, first + count))
            assert causal == (not among), "sequences without `among` are decodes, or causal prefills"
    assert inside
    assert bool(longer) == clamps


def test_an_image_counts_where_a_new_token_sees_behind_itself() -> None:
    assert images_among([(2, 9)], 10, 30) == [], "it is behind"
    assert images_among([(2, 9)], 9, 30) == [], "its last token"
    assert images_among([(2, 9)], 0, 2) == [], "its first token, and the others are no keys yet"
    assert images_among([(12, 19)], 0, 9) == [], "it is ahead"
    assert images_among([(2, 9), (11, 11), (12, 40)], 4, 20) == [(4, 9), (12, 20)]
    assert ends_of([(0, 3, []), (4, 4, [(4, 6)]), (2, 2, [])], 10).tolist() == [0, 1, 2, 6, 6, 6, 7, 2, 3, 0]


def test_a_layer_that_sees_images_has_a_kernel_of_each_kind() -> None:
    heads = Heads(32, 16, 256, 1024, "bf16")
    both, text = (
        [p for kernel, p in Grid(of, (1,), 4, 512, 4096).problems() if kernel == "attn_prefill"]
        for of in (Heads(32, 16, 256, 1024, "bf16", sees_images=True), heads)
    )
    assert not any(p.ends for p in text)
    assert {p for p in both if not p.ends} == {*text}
    assert {p for p in both if p.ends} == {heads.prefill(p.batch, p.num_tokens, p.kv_len, True) for p in text}


def test_what_serves_text_serves_images() -> None:
    """On every architecture, for all heads: so no layer needs vLLM's kernel for images alone."""
    kernel, served = find_kernel("attn_prefill"), 0
    for arch in ARCHES.values():
        for dim in (128, 256, 512):
            for dtype in ("bf16", "fp16"):
                heads = Heads(8, 4, dim, 1024, dtype)
                of_text, of_images = (
                    kernel.why_unsupported(heads.prefill(1, 64, 64, ends), Target.of(arch)) for ends in (False, True)
                )
                assert of_text == of_images, (arch.name, dim, dtype)
                served += of_text is None
    assert served > 3 * len(ARCHES)
