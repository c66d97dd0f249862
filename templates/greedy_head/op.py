"""Tensors to calls of greedy_head."""

from __future__ import annotations

import torch
from torch import Tensor

from kerngen.templates.call import Call, op
from kerngen.templates.common.rows.spec import require
from kerngen.templates.common.rows.torch_rows import DTYPE_NAME, empty
from kerngen.templates.common.screen.screen_spec import COLUMNS, GROUP_TILES, bits_of, num_bounds
from kerngen.templates.common.w4.pack import table_format
from kerngen.templates.common.w4.table import DENSE
from kerngen.templates.greedy_head.spec import Problem

_OF_SCREEN = {
    "codes": "int32[(V + 15) // 16, _, _, 32, 4]",  # the rest by bits, below
    "bounds": "fp32[(V + 15) // 16 * 16, _]",
}


@op(takes={"x": "D[M, K]", "weight": "D[V, K]", **_OF_SCREEN})
def greedy_head(x: Tensor, weight: Tensor, codes: Tensor, bounds: Tensor) -> Call[Tensor]:
    """The row of weight [V, K] whose product with x is the greatest, the lowest one on a tie: [M] int64 of x [M, K].

    codes, bounds: of weight, as head_screen makes them, in any of its bits; likely ones give a likely answer. The
    products are rounded to x's dtype, as those of a dense matrix are. A row whose bounds are NaN is never chosen.
    M <= 32; K a multiple of 8, at most 7680.
    """
    return _called(x, weight, None, (weight.shape[0], DENSE, 0), codes, bounds)


@op(takes={"x": "D[M, K]", "packed": "int32[S, U, L, 4]", "table_scales": "fp16[S, G, R]", "codes": "int32[...]",
           "bounds": "fp32[_, _]"})  # fmt: skip
def greedy_head_packed(x: Tensor, packed: Tensor, table_scales: Tensor, codes: Tensor, bounds: Tensor) -> Call[Tensor]:
    """As greedy_head, of a weight as embed_packed's table, whose values are rounded to x's dtype. codes, bounds: of
    these values.
    """
    vocab, hidden, table, group_size = table_format(packed, table_scales)
    require(hidden == x.shape[1], f"x has {x.shape[1]} columns, and the packed table {hidden}")
    return _called(x, packed, table_scales, (vocab, table, group_size), codes, bounds)


def _called(
    x: Tensor, weight: Tensor, table_scales: Tensor | None, form: tuple[int, str, int], codes: Tensor, bounds: Tensor
) -> Call[Tensor]:
    """form: rows of the table, and how it is stored."""
    (tokens, hidden), (vocab, table, group_size) = x.shape, form
    bits = bits_of(codes.shape[2])
    groups = -(-hidden // (COLUMNS * GROUP_TILES[bits]))
    require(codes.shape[1] == groups, f"codes have {codes.shape[1]} groups of columns; K = {hidden} has {groups}")
    columns = num_bounds(bits)
    require(bounds.shape[1] == columns, f"bounds are {bounds.shape[1]} a row; of {bits} bits there are {columns}")
    ids = empty(x, tokens, dtype=torch.int64)
    problem = Problem(vocab, hidden, DTYPE_NAME[x.dtype], tokens, bits, table, group_size) if tokens else None
    arguments = {
        "ids": ids, "x": x.contiguous(), "weight": weight, "codes": codes, "bounds": bounds, "num_tokens": tokens,
        "table_scales": table_scales,
    }  # fmt: skip
    return Call("greedy_head", problem, arguments, ids)
