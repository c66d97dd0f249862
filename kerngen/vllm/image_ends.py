"""vLLM's images of a sequence, ranges of its tokens, as `ends` of attn_prefill: the last key that each new token sees.

vLLM's mask of a layer with a window: a token sees the window's keys up to itself, and of its own image those behind it.
Together q - window < k <= the image's end. What lies before the window in an image vLLM cuts as well (Gemma-4), or it
names no image that is longer than the window. Sources in vLLM 0.26: compute_kv_seq_mask in
vllm/v1/attention/ops/triton_attention_helpers.py, mm_req_doc_ranges in vllm/v1/worker/gpu_model_runner.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

Images: TypeAlias = Sequence[tuple[int, int]]  # positions in the sequence of the first and the last token of each


def images_among(images: Images, first: int, last: int) -> Images:
    """Of `images` what lies among the new tokens at positions `first` to `last`: the parts of two tokens or more, in
    which all but the last see behind themselves. Before `first` there is nothing new, behind `last` no key yet.
    """
    parts = ((max(first, begin), min(last, end)) for begin, end in images)
    return [(begin, end) for begin, end in parts if begin < end]


def ends_of(sequences: Iterable[tuple[int, int, Images]], num_tokens: int) -> Tensor:
    """ends [num_tokens] int32, on the CPU: of each new token the position of the last key that it sees.

    sequences: of each the position of its first new token, how many there are, and `images_among` them. Tokens
    behind those of all sequences, which pad a batch, have 0. Ends never fall within a sequence.
    """
    ends, at = torch.zeros(num_tokens, dtype=torch.int32), 0
    for first, count, images in sequences:
        own = ends[at : at + count]
        own.copy_(torch.arange(first, first + count))
        for begin, end in images:
            own[begin - first : end - first + 1].clamp_(min=end)
        at += count
    return ends
