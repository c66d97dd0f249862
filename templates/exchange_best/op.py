"""Tensors to calls of exchange_best."""

from __future__ import annotations

import torch
from torch import Tensor

from kerngen.templates.call import Call, op
from kerngen.templates.common.rows.spec import require
from kerngen.templates.common.rows.torch_rows import DTYPE_NAME, empty
from kerngen.templates.exchange_best.spec import Problem
from kerngen.templates.values import Peers

_TAKES = {"rows": "int64[T]", "addresses": "int64[N]"}


@op(takes={**_TAKES, "x": "D[T, K]", "weight": "D[V, K]"})
def exchange_best(x: Tensor, weight: Tensor, rows: Tensor, first_row: int, peers: Peers) -> Call[tuple[Tensor, Tensor]]:
    """The greatest of all ranks' logits [T] fp32, and its token [T] int64: of equal logits the lowest token, and -1
    where the greatest is NaN or infinite. A rank's logit is x [T, K] times row rows [T] int64 of its weight [V, K], in
    fp32 and rounded to their dtype; that row is token first_row + rows.

    peers: of memory for rows of 8 elements. Every rank makes the same calls in the same order on one stream, of the
    same T. Raises ProblemError for more tokens than a slot of the peers' memory has rows. On the CPU, where no memory
    is shared, rows stands for every rank's.
    """
    return _called(x, weight, weight.shape[1], "rows", rows, 0.0, first_row, peers)


@op(takes={**_TAKES, "logits": "D[T, V]"})
def exchange_best_logits(
    logits: Tensor, rows: Tensor, logit_cap: float, first_row: int, peers: Peers
) -> Call[tuple[Tensor, Tensor]]:
    """As exchange_best, of logits [T, V] that this rank has: logit_cap * tanh(logit / logit_cap) in fp32 of those at
    rows [T], or the logits themselves where logit_cap is 0.
    """
    return _called(None, logits, logits.shape[1], "logits", rows, logit_cap, first_row, peers)


def _called(
    x: Tensor | None, table: Tensor, width: int, source: str, rows: Tensor, cap: float, first_row: int, peers: Peers
) -> Call[tuple[Tensor, Tensor]]:
    (tokens,) = rows.shape
    problem = None
    if tokens:
        problem = Problem(peers.addresses.shape[0] - 1, width, DTYPE_NAME[table.dtype], source, tokens)
        require(tokens <= peers.max_rows, f"{tokens} tokens; the peers' memory has slots of {peers.max_rows}")
        require(0 <= peers.rank < problem.ranks, f"rank={peers.rank} is not in 0..{problem.ranks - 1}")
    ids, values = empty(rows, tokens), empty(rows, tokens, dtype=torch.float32)
    arguments = {
        "ids": ids, "values": values, "rows": rows, "x": x if x is None else x.contiguous(), "table": table,
        "addresses": peers.addresses, "cap": cap, "first_row": first_row, "rank": peers.rank,
        "max_rows": peers.max_rows, "num_tokens": tokens,
    }  # fmt: skip
    return Call("exchange_best", problem, arguments, (values, ids))
