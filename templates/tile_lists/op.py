"""Tensors to calls of tile_lists."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kerngen.templates.call import Call, op
from kerngen.templates.common.attention.tile_lists import LIST_KEYS, num_lists
from kerngen.templates.common.rows.spec import require
from kerngen.templates.common.rows.torch_rows import empty
from kerngen.templates.tile_lists.spec import Problem
from kerngen.templates.values import AttnBatch


@dataclass(frozen=True, slots=True)
class TileRule:
    """What is kept, of 128 keys each: tiles that score log2_alpha above a head's highest, num_first at a sequence's
    begin, num_last up to the queries' own.
    """

    log2_alpha: float
    num_first: int
    num_last: int


_TAKES = {
    "scores": "fp32[L, NQ, N]",
    "density": "int64[2]",
    "dense_from": "int32[B]",
    "kv_lens": "int32[B]",
    "cu_seqlens_q": "int32[B + 1]",
}
_REQUIRED = ("scores", "density", "dense_from", "num_kv_heads", "num_tokens", "block_table", "kv_lens", "cu_seqlens_q",
             "log2_alpha", "num_first", "num_last")  # fmt: skip


@op(mutates=("density",), takes=_TAKES | {"block_table": "int32[B, M]"}, required=_REQUIRED)
def tile_lists(
    scores: Tensor, density: Tensor, dense_from: Tensor, num_kv_heads: int, num_tokens: int, batch: AttnBatch,
    rule: TileRule,
) -> Call[tuple[Tensor, Tensor]]:  # fmt: skip
    """Lists of the tiles of 128 keys that each 128 queries and each kv head see, which attn_prefill takes.

    scores [T // 128 + B, nq, n] as tile_scores makes them of num_tokens queries; density [2] int64: kept entries and
    all are added to it; dense_from [B] int32: queries at and behind that position see all. Kept are tiles that some
    query head scores at least log2_alpha (which is negative) above its highest one, the first num_first, and the
    num_last up to the queries' own. Returns counts [T // 128 + B, nkv] and lists [T // 128 + B, nkv, n] int32:
    of a list its `counts` entries, from the last tile down, and then -1.
    """
    require(batch.cu_seqlens_q is not None, "cu_seqlens_q is None: tile_lists takes ragged queries")
    (_, num_q_heads, tiles), sequences = scores.shape, len(dense_from)
    lists = num_lists(num_tokens, sequences)
    require(len(scores) == lists, f"scores are of {len(scores)} lists; {num_tokens} tokens of {sequences} sequences "
                                  f"have {lists}")  # fmt: skip
    require(rule.num_last > 0, f"num_last={rule.num_last}: a query sees itself, whose tile is one of the last")
    require(rule.num_first >= 0, f"num_first={rule.num_first} is negative")
    counts = empty(scores, lists, num_kv_heads, dtype=torch.int32)
    found = empty(scores, lists, num_kv_heads, tiles, dtype=torch.int32)
    problem = Problem(num_q_heads, num_kv_heads, sequences, num_tokens, tiles * LIST_KEYS) if num_tokens else None
    arguments = {
        "counts": counts, "lists": found, "density": density, "scores": scores, "cu_seqlens_q": batch.cu_seqlens_q,
        "kv_lens": batch.kv_lens, "dense_from": dense_from, "log2_alpha": rule.log2_alpha,
        "num_first": rule.num_first, "num_last": rule.num_last, "batch": sequences, "max_tiles": tiles,
    }  # fmt: skip
    return Call("tile_lists", problem, arguments, (counts, found))
