"""Block-sparse attention, once, in torch: means of keys, scores by them, and which tiles of keys are kept.

Source: FlashPrefill, arXiv 2603.06199: a block of queries attends to the tiles of keys whose estimated mass is at least
alpha times that of its heaviest tile, to the first and the last few, and densely at the prompt's end. There a tile is
estimated by the mean of its keys. Here it is by the means of its parts of mean_keys keys, each of which counts as a
key: a mean of 128 keys hides a few that matter. Heads that share a kv head share its tiles: what one of them keeps, all
keep.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from kerngen.templates.common.attention.kv_formats_torch import read_rows
from kerngen.templates.common.attention.tile_lists import (
    LIST_KEYS,
    LIST_QUERIES,
    NOTHING,
    num_entries,
    num_lists,
    query_blocks,
)

LOG2E = 1.4426950408889634


def means_of(k: Tensor, mean_keys: int) -> Tensor:
    """[keys // mean_keys, num_kv_heads, d] fp32: the mean of each whole part of k [keys, num_kv_heads, d]."""
    whole = len(k) // mean_keys * mean_keys
    return k[:whole].float().unflatten(0, (-1, mean_keys)).mean(1)


def tile_scores(q: Tensor, means: Tensor, first: int, mean_keys: int, sm_scale: float) -> Tensor:
    """log2 of each key tile's estimated mass, [num_q_heads, tiles] fp32, of queries q [n, num_q_heads, d].

    q stand at positions first .. first + n - 1; means [m, num_kv_heads, d] are those of the sequence's keys from 0 on.
    A query counts a mean if it sees all of its keys, and with e to the power of its score. NOTHING for a tile of which
    no query counts a mean. tiles: up to the last query's own.
    """
    n, num_q_heads, _ = q.shape
    tiles = num_entries(first + n)
    found = torch.full((num_q_heads, tiles), NOTHING, dtype=torch.float32, device=q.device)
    seen = (first + n) // mean_keys  # means that the last query sees
    if not seen:
        return found
    last = torch.arange(1, seen + 1, device=q.device) * mean_keys - 1
    hidden = last[None, :] > torch.arange(first, first + n, device=q.device)[:, None]  # [n, seen]
    per_tile, group = LIST_KEYS // mean_keys, num_q_heads // means.shape[1]
    for head in range(num_q_heads):
        s = q[:, head].float() @ means[:seen, head // group].float().T * (sm_scale * LOG2E)
        s = s.masked_fill(hidden, -torch.inf)
        s = torch.nn.functional.pad(s, (0, tiles * per_tile - seen), value=-torch.inf)
        mass = torch.logsumexp(s.unflatten(1, (tiles, per_tile)).double() / LOG2E, dim=(0, 2)) * LOG2E
        found[head] = mass.float().clamp(min=NOTHING)
    return found


def kept_tiles(
    scores: Tensor, first: int, n: int, num_kv_heads: int, log2_alpha: float, num_first: int, num_last: int,
    dense_from: int,
) -> Tensor:  # fmt: skip
    """Which tiles a block of n queries at positions `first` and on sees, [num_kv_heads, tiles] bool.

    scores [num_q_heads, tiles] as `tile_scores` makes them. Kept are the first num_first tiles; the last num_last up to
    that of the block's first query, and those behind it; those that a head of the group scores at least alpha times its
    highest; all, if the last query stands at dense_from or behind.
    """
    tiles = num_entries(first + n)
    if not tiles:  # all of them stand before the first key
        return torch.zeros(num_kv_heads, 0, dtype=torch.bool, device=scores.device)
    tile = torch.arange(tiles, device=scores.device)
    always = (tile < num_first) | (tile > first // LIST_KEYS - num_last)
    if first + n - 1 >= dense_from:
        always = torch.ones_like(always)
    by_head = scores[:, :tiles].unflatten(0, (num_kv_heads, -1))  # [kv head, group, tiles]
    # in fp32, as kernels add: a score at the threshold is kept
    least = by_head.amax(-1, keepdim=True) + torch.tensor(log2_alpha, dtype=torch.float32, device=scores.device)
    return always | ((by_head >= least) & (by_head > NOTHING / 2)).any(1)


def in_queries(kept: Tensor, queries: int, keys: int) -> Tensor:
    """What kept [lists, num_kv_heads, tiles] is of each query and key, [num_kv_heads, queries, keys] bool."""
    each = kept.transpose(0, 1).repeat_interleave(LIST_QUERIES, 1).repeat_interleave(LIST_KEYS, 2)
    return each[:, :queries, :keys]


def of_lists(counts: Tensor, tiles: Tensor, width: int) -> Tensor:
    """[lists, num_kv_heads, width] bool: what counts [lists, num_kv_heads] and tiles [lists, num_kv_heads, n] keep.

    Lists of nobody may hold anything.
    """
    kept = torch.zeros(*counts.shape, width + 1, dtype=torch.bool, device=counts.device)
    at = torch.arange(tiles.shape[-1], device=counts.device) < counts[..., None]
    return kept.scatter_(-1, tiles.long().where(at, width).clamp(0, width), True)[..., :width]


def as_lists(kept: Tensor) -> tuple[Tensor, Tensor]:
    """counts [...] and tiles [..., n] int32 of kept [..., n] bool: the numbers of kept tiles, from the last
    one down, then -1.
    """
    n = kept.shape[-1]
    numbers = torch.arange(n, dtype=torch.int32, device=kept.device)
    tiles = torch.where(kept, numbers, -1).sort(-1, descending=True).values
    return kept.sum(-1).int(), tiles


# ---- of all sequences of a batch, as the kernels are given them


def write_means(
    means: Tensor, k_cache: Tensor, block_table: Tensor, kv_lens: Tensor, starts: Tensor, kv_format: str,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    """Puts the means of each sequence's keys, from the one that holds starts[s] on and as far as they are whole, in
    means [P, num_kv_heads, r, d], rounded to `dtype`. k_cache [P, num_kv_heads, page_size, entries] in kv_format.
    """
    per_page = means.shape[2]
    mean_keys = k_cache.shape[2] // per_page
    for table, kv_len, start in zip(block_table, kv_lens.tolist(), starts.tolist(), strict=True):
        at = torch.arange(start // mean_keys, max(kv_len, 0) // mean_keys, device=means.device)
        if not len(at):
            continue
        key = torch.arange(int(at[0]) * mean_keys, (int(at[-1]) + 1) * mean_keys, device=means.device)
        page, row = table[key // k_cache.shape[2]].long(), key % k_cache.shape[2]
        made = means_of(read_rows(k_cache, kv_format, dtype, page, row, keys=True), mean_keys)
        means[table[at // per_page].long(), :, at % per_page] = made.to(dtype).to(means.dtype)


def scores_of_lists(
    q: Tensor, means: Tensor, block_table: Tensor, kv_lens: Tensor, cu_seqlens_q: Tensor, page_size: int,
    sm_scale: float, max_tiles: int,
) -> Tensor:  # fmt: skip
    """[num_lists, num_q_heads, max_tiles] fp32: `tile_scores` of each list, NOTHING elsewhere."""
    begins, lens, per_page = cu_seqlens_q.tolist(), kv_lens.tolist(), means.shape[2]
    mean_keys = page_size // per_page
    shape = num_lists(len(q), len(lens)), q.shape[1], max_tiles
    scores = torch.full(shape, NOTHING, dtype=torch.float32, device=q.device)
    for at, s, first, count in query_blocks([end - begin for begin, end in pairwise(begins)]):
        position = lens[s] - (begins[s + 1] - begins[s]) + first
        mean = torch.arange(lens[s] // mean_keys, device=q.device)
        its = means[block_table[s][mean // per_page].long(), :, mean % per_page]
        queries = q[begins[s] + first : begins[s] + first + count]
        found = tile_scores(queries, its, position, mean_keys, sm_scale)
        scores[at, :, : found.shape[1]] = found
    return scores


def lists_of_scores(
    scores: Tensor, num_kv_heads: int, kv_lens: Tensor, cu_seqlens_q: Tensor, log2_alpha: float, num_first: int,
    num_last: int, dense_from: Tensor,
) -> tuple[Tensor, Tensor, tuple[int, int]]:  # fmt: skip
    """counts [num_lists, num_kv_heads] and lists [num_lists, num_kv_heads, max_tiles] int32 of `kept_tiles` of each,
    -1 behind a list's end; and how many entries they have, and would have of all tiles.
    """
    begins, lens, dense = cu_seqlens_q.tolist(), kv_lens.tolist(), dense_from.tolist()
    counts = torch.zeros(len(scores), num_kv_heads, dtype=torch.int32, device=scores.device)
    lists = torch.full((*counts.shape, scores.shape[2]), -1, dtype=torch.int32, device=scores.device)
    kept_ones = all_ones = 0
    for at, s, first, count in query_blocks([end - begin for begin, end in pairwise(begins)]):
        position = lens[s] - (begins[s + 1] - begins[s]) + first
        kept = kept_tiles(scores[at], position, count, num_kv_heads, log2_alpha, num_first, num_last, dense[s])
        counts[at], found = as_lists(kept)
        lists[at, :, : found.shape[-1]] = found
        kept_ones, all_ones = kept_ones + int(kept.sum()), all_ones + kept.numel()
    return counts, lists, (kept_ones, all_ones)
