"""Tensors to calls of exchange_best."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kerngen.templates.call import Call, op
from kerngen.templates.common.rows.spec import require
from kerngen.templates.common.rows.torch_rows import DTYPE_NAME, empty
from kerngen.templates.common.w4.pack import table_format
from kerngen.templates.common.w4.table import DENSE
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
    return _called(x, _Table(weight, weight.shape[1]), "rows", rows, 0.0, first_row, peers)


@op(takes={**_TAKES, "x": "D[T, K]", "packed": "int32[S, U, L, 4]", "table_scales": "fp16[S, G, R]"})
def exchange_best_packed(
    x: Tensor, packed: Tensor, table_scales: Tensor, rows: Tensor, first_row: int, peers: Peers
) -> Call[tuple[Tensor, Tensor]]:
    """As exchange_best, of a weight as embed_packed's table, whose values are rounded to x's dtype."""
    _, width, table, group_size = table_format(packed, table_scales)
    require(width == x.shape[1], f"x has {x.shape[1]} columns, and the packed table {width}")
    form = _Table(packed, width, table, group_size, table_scales)
    return _called(x, form, "rows", rows, 0.0, first_row, peers)


@op(takes={**_TAKES, "logits": "D[T, V]"})
def exchange_best_logits(
    logits: Tensor, rows: Tensor, logit_cap: float, first_row: int, peers: Peers
) -> Call[tuple[Tensor, Tensor]]:
    """As exchange_best, of logits [T, V] that this rank has: logit_cap * tanh(logit / logit_cap) in fp32 of those at
    rows [T], or the logits themselves where logit_cap is 0.
    """
    return _called(None, _Table(logits, logits.shape[1]), "logits", rows, logit_cap, first_row, peers)


@dataclass(frozen=True, slots=True)
class _Table:
    """What rows are read of, and how it is stored."""

    tensor: Tensor
    width: int
    form: str = DENSE
    group_size: int = 0
    scales: Tensor | None = None


def _called(
    x: Tensor | None, table: _Table, source: str, rows: Tensor, cap: float, first_row: int, peers: Peers
) -> Call[tuple[Tensor, Tensor]]:
    (tokens,) = rows.shape
    problem = None
    if tokens:
        dtype = DTYPE_NAME[(table.tensor if x is None else x).dtype]
        of_table = table.form, table.group_size
        problem = Problem(peers.addresses.shape[0] - 1, table.width, dtype, source, tokens, *of_table)
        require(tokens <= peers.max_rows, f"{tokens} tokens; the peers' memory has slots of {peers.max_rows}")
        require(0 <= peers.rank < problem.ranks, f"rank={peers.rank} is not in 0..{problem.ranks - 1}")
    ids, values = empty(rows, tokens), empty(rows, tokens, dtype=torch.float32)
    arguments = {
        "ids": ids, "values": values, "rows": rows, "x": x if x is None else x.contiguous(), "table": table.tensor,
        "addresses": peers.addresses, "cap": cap, "first_row": first_row, "rank": peers.rank,
        "max_rows": peers.max_rows, "num_tokens": tokens,
        "table_scales": table.scales,
    }  # fmt: skip
    return Call("exchange_best", problem, arguments, (values, ids))
