"""A dense matrix's rows in eight bits, with what that may be wrong by: enough to tell which rows cannot be an arg-max.

Row r of W is scale[r] * q[r] + e[r], q whole numbers within 127. So W[r] x lies within |e[r]| |x| of scale[r] (q[r] x),
by Cauchy and Schwarz. greedy_head reads q alone, and of W only the rows whose interval reaches as high as the highest
lower end.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kerngen.errors import ProblemError
from kerngen.templates.common.int8_spec import COLUMNS, ROWS, TOKEN_STEPS, padded
from kerngen.templates.common.row_spec import require

MOST_CODE = 127
_AT_ONCE = 1 << 22  # elements of W that are converted at once: 16 MiB in fp32


def int8_screen(weight: Tensor, excluded: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
    """Codes and bounds of weight [V, K], in any float, V and K padded to whole tiles. excluded: rows never wanted.

    Raises ProblemError for what is no matrix of floats, and for excluded rows that there are not.

    codes: [V / 16, K / 64, 2, 32, 4] int32 of four bytes each. Tile by tile, lane 4 g + t of a warp has columns 16 t to
    16 t + 15 of row g, and of row g + 8 behind it. bounds: [V, 2] fp32: a row's scale, and b: what is computed with
    the row's codes is at most b |x| off W[r] x, roundings of x and of all sums included. NaN for rows that are never
    wanted: those in `excluded`, and what pads V.
    """
    shown = f"{weight.dtype} {list(weight.shape)}"
    require(weight.ndim == 2 and weight.is_floating_point(), f"int8_screen: {shown} is no matrix of floats")
    v, k = weight.shape
    if bad := [i for i in excluded if not 0 <= i < v]:
        raise ProblemError(f"int8_screen: excluded row {bad[0]} is not in 0..{v - 1}")
    rows, columns = padded(v, ROWS), padded(k, COLUMNS)
    codes = torch.empty(rows // ROWS, columns // COLUMNS, 2, 32, 4, dtype=torch.int32, device=weight.device)
    bounds = torch.full((rows, 2), float("nan"), dtype=torch.float32, device=weight.device)
    if weight.is_meta:  # a record of shapes alone
        return codes, bounds
    step = max(_AT_ONCE // columns // ROWS, 1) * ROWS
    for first in range(0, v, step):
        part = weight[first : first + step].float()
        tiles, scale, bound = _coded(part)
        at = first // ROWS
        codes[at : at + len(tiles)] = tiles
        bounds[first : first + len(part), 0], bounds[first : first + len(part), 1] = scale, bound
    if excluded:
        bounds[torch.tensor(list(excluded), dtype=torch.int64, device=weight.device)] = float("nan")
    return codes, bounds


def _coded(w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of rows w [n, K] fp32: their tiles of codes, scales [n] and bounds [n]."""
    n, k = w.shape
    scale = w.abs().amax(-1) / MOST_CODE
    q = torch.where(scale[:, None] > 0, w / scale[:, None], 0.0).round_().clamp_(-MOST_CODE, MOST_CODE)
    kept = scale[:, None] * q
    # in fp64: squares of what is small leave fp32's range
    size, kept_size, error = (torch.linalg.vector_norm(m, dim=-1, dtype=torch.float64) for m in (w, kept, w - kept))
    # Of x, half a step of its largest element in each of K; 2^-18 and 2^-16 for sums in fp32, of codes and of the row
    # itself; and a thousandth for the norms.
    bound = (error + kept_size * (k**0.5 / (2 * TOKEN_STEPS) + 2.0**-18) + size * 2.0**-16) * (1 + 2.0**-10)
    whole = torch.zeros(padded(n, ROWS), padded(k, COLUMNS), dtype=torch.int8, device=w.device)
    whole[:n, :k] = q.to(torch.int8)
    tiles = whole.view(len(whole) // ROWS, 2, 8, -1, 4, 16).permute(0, 3, 1, 2, 4, 5)  # [strip, tile, half, g, t, byte]
    return tiles.contiguous().view(torch.int32).view(len(tiles), -1, 2, 32, 4), scale, bound
