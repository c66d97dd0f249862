"""Lists of key tiles: which keys the queries of a block see beside their mask. What tile_lists.cuh says on the device.

A list is of LIST_QUERIES query tokens of a sequence that follow each other, counted from its first one in the batch,
and of one kv head, whose query heads share it. An entry is the number of LIST_KEYS keys, from key 0 of the sequence on.
"""

from __future__ import annotations

from collections.abc import Sequence

from kerngen.templates.common.rows.spec import require, require_tokens

LIST_QUERIES = 128  # query tokens that share a list
LIST_KEYS = 128  # keys of an entry
MEAN_KEYS = (16, 32)  # keys that a mean is of, by which lists are chosen
NOTHING = -1e30  # the score of keys that no query of a block sees: finite, so that thresholds are numbers


def num_lists(num_tokens: int, batch: int) -> int:
    """Of a kv head: as many as any division of the tokens among `batch` sequences takes."""
    return num_tokens // LIST_QUERIES + batch


def first_list(begin: int, sequence: int) -> int:
    """The first one of a sequence, whose query tokens begin at `begin` of all."""
    return begin // LIST_QUERIES + sequence


def num_entries(kv_len: int) -> int:
    """The most that a list has."""
    return max(-(-kv_len // LIST_KEYS), 0)


def query_blocks(q_lens: Sequence[int]) -> list[tuple[int, int, int, int]]:
    """(list, sequence, first token in it, tokens) of each list that has queries."""
    found, begin = [], 0
    for sequence, q_len in enumerate(q_lens):
        at = first_list(begin, sequence)
        for first in range(0, q_len, LIST_QUERIES):
            found.append((at + first // LIST_QUERIES, sequence, first, min(LIST_QUERIES, q_len - first)))
        begin += q_len
    return found


def require_lists(num_tokens: int, batch: int) -> None:
    """Raises ProblemError unless a grid has a block for each list of a kv head, in y or z."""
    require(batch > 0, f"batch={batch} is not positive")
    require_tokens(num_tokens)
    lists = num_lists(num_tokens, batch)
    require(lists <= 65535, f"num_tokens={num_tokens} batch={batch}: {lists} lists; 65,535 at most")


def require_means(mean_keys: int, page_size: int) -> None:
    """Raises ProblemError unless a page has whole means."""
    require(mean_keys in MEAN_KEYS, f"mean_keys={mean_keys} is not one of: {', '.join(map(str, MEAN_KEYS))}")
    whole = page_size > 0 and page_size % mean_keys == 0
    require(whole, f"page_size={page_size} is no multiple of mean_keys={mean_keys}: means are of keys of one page")
