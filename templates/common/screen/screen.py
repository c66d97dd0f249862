"""A dense matrix's rows in few bits with error bounds, which tell rows that cannot be the arg-max.

Row r of W is scale[r] * q[r] + e[r], q whole numbers of `bits` bits. So W[r] x lies within |e[r]| |x| of
scale[r] (q[r] x), by Cauchy and Schwarz. greedy_head reads q alone, and of W only the rows whose interval reaches as
high as the highest lower end.

Where e and x have nothing to do with each other, which is all but sure and is no proof, e[r] x is a sum of K terms of
random sign: its standard deviation is |e[r]| |x| / sqrt(K). DEVIATIONS of those are a likely bound, far below the sure
one, and are enough for a draft, which is verified.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kerngen.errors import ProblemError
from kerngen.templates.common.rows.spec import require
from kerngen.templates.common.screen.screen_spec import (
    COLUMNS,
    FIRST_BITS,
    GROUP_TILES,
    ROWS,
    TOKEN_STEPS,
    group_loads,
    num_bounds,
    padded,
    require_bits,
)
from kerngen.templates.common.w4.pack import dequantize, table_format, unpack
from kerngen.templates.common.w4.tiling import STRIP

DEVIATIONS = 4.0  # of a likely bound: a normal number is further off once in 16,000
# Of a row's largest element, what its largest code is tried for where bits are few. What is larger gets that code too.
_REACHES = (1.0, 0.9, 0.8, 0.7)
_AT_ONCE = 1 << 22  # elements of W that are converted at once: 16 MiB in fp32


def head_screen(
    weight: Tensor, excluded: Sequence[int] = (), bits: int = 8, likely: bool = False
) -> tuple[Tensor, Tensor]:
    """Codes and bounds of weight [V, K], in any float, V and K padded to whole tiles. excluded: rows never wanted.

    bits: of a code, 4, 6, 7 or 8. likely: bounds that hold but for chance, four standard deviations of the rounding
    of W, for what is verified afterwards (a draft); the roundings of x and of sums stay sure.
    Raises ProblemError for what is no matrix of floats, for other bits, and for excluded rows that there are not.

    codes: int32 [V / 16, K / 64 / TILES, LOADS, 32, 4], TILES side by side being a group. Of a tile lane 4 g + t of a
    warp has columns 16 t to 16 t + 15 of rows g and g + 8. In 8 bits TILES is 1, and LOADS are row g's bytes and row
    g + 8's, signed. In fewer a code is q + 2^(bits - 1), and a lane has planes: 16 bytes a tile of nibbles, byte i of
    both rows in one byte, row g's in the low half; in 6 and 7 bits 16 bytes for each two tiles of the two bits above.
    In 7 bits both are of c, a code without its last bit, and 16 bytes for four tiles of that bit follow. TILES are 1, 2
    and 4 in 4, 6 and 7 bits, LOADS 1, 3 and 7.
    bounds: [V, 2] fp32: a row's scale, and b: what is computed with the row's codes is at most b |x| off W[r] x,
    roundings of x and of all sums included. In 7 bits [V, 4]: then the same of the first six, which stand for
    4 c - 127, the middle of two codes in half steps; that bound is sure in any case. NaN for rows that are never
    wanted: those in `excluded`, and what pads V.
    """
    shown = f"{weight.dtype} {list(weight.shape)}"
    require(weight.ndim == 2 and weight.is_floating_point(), f"head_screen: {shown} is no matrix of floats")
    v, k = weight.shape
    return _screen(lambda first, stop: weight[first:stop].float(), (v, k), weight.device, excluded, bits, likely)


def packed_head_screen(
    w_packed: Tensor, scales: Tensor, dtype: torch.dtype, excluded: Sequence[int] = (), bits: int = 8,
    likely: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """head_screen of a packed W in kernel order (w4/pack.py), whose values are rounded to dtype."""
    v, k, _, _ = table_format(w_packed, scales)

    def rows(first: int, stop: int) -> Tensor:
        strips = slice(first // STRIP, -(-stop // STRIP))
        values = dequantize(*unpack(w_packed[strips], scales[strips]), dtype)
        return values[first % STRIP :][: stop - first].float()

    return _screen(rows, (v, k), w_packed.device, excluded, bits, likely)


def _screen(
    rows: Callable[[int, int], Tensor], shape: tuple[int, int], device: torch.device, excluded: Sequence[int],
    bits: int, likely: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """rows: those from a first one on up to another, fp32."""
    require_bits(bits)
    v, k = shape
    if bad := [i for i in excluded if not 0 <= i < v]:
        raise ProblemError(f"head_screen: excluded row {bad[0]} is not in 0..{v - 1}")
    num_rows, columns = padded(v, ROWS), padded(k, COLUMNS * GROUP_TILES[bits])
    of_codes = (num_rows // ROWS, columns // COLUMNS // GROUP_TILES[bits], group_loads(bits), 32, 4)
    codes = torch.empty(of_codes, dtype=torch.int32, device=device)
    bounds = torch.full((num_rows, num_bounds(bits)), float("nan"), dtype=torch.float32, device=device)
    if device.type == "meta":  # a record of shapes alone
        return codes, bounds
    step = max(_AT_ONCE // columns // ROWS, 1) * ROWS
    for first in range(0, v, step):
        part = rows(first, min(first + step, v))
        q, scale, error = _rounded(part, bits)
        at, n = first // ROWS, padded(len(part), ROWS)
        codes[at : at + n // ROWS] = _planes(q, n, columns, bits)
        into, size = bounds[first : first + len(part)], _size(part)
        into[:, 0], into[:, 1] = scale, _bound(size, scale[:, None] * q, error, likely)
        if bits in FIRST_BITS:
            kept = scale[:, None] * (2.0 * torch.floor(q / 2) + 0.5)
            # Sure ones: what is left out of small elements has one sign, and is all but unrelated to a token.
            into[:, 2], into[:, 3] = scale / 2, _bound(size, kept, _size(part - kept), likely=False)
    if excluded:
        bounds[torch.tensor(list(excluded), dtype=torch.int64, device=device)] = float("nan")
    return codes, bounds


def _rounded(w: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of rows w [n, K] fp32: whole numbers [n, K] fp32, scales [n] and |e| [n] fp64, the least of _REACHES."""
    most = w.abs().amax(-1)
    if bits == 8:
        return _scaled(w, most / 127, -127, 127)
    zero = 1 << bits - 1
    q, scale, error = _scaled(w, most / (zero - 0.5), -zero, zero - 1)
    for reach in _REACHES[1:]:
        others = _scaled(w, most * (reach / (zero - 0.5)), -zero, zero - 1)
        better = others[2] < error
        q = torch.where(better[:, None], others[0], q)
        scale, error = torch.where(better, others[1], scale), torch.where(better, others[2], error)
    return q, scale, error


def _scaled(w: Tensor, scale: Tensor, least: int, most: int) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.where(scale[:, None] > 0, w / scale[:, None], 0.0).round_().clamp_(least, most)
    return q, scale, _size(w - scale[:, None] * q)


def _size(m: Tensor) -> Tensor:
    """In fp64: squares of what is small leave fp32's range."""
    return torch.linalg.vector_norm(m, dim=-1, dtype=torch.float64)


def _bound(size: Tensor, kept: Tensor, error: Tensor, likely: bool) -> Tensor:
    """Of rows of `size` [n] that are kept as `kept` [n, K], `error` [n] off."""
    k = kept.shape[1]
    if likely:
        error = error * min(DEVIATIONS / k**0.5, 1.0)
    # Of x, half a step of its largest element in each of K; 2^-18 and 2^-16 for sums in fp32, of codes and of the row
    # itself; and a thousandth for the norms.
    return (error + _size(kept) * (k**0.5 / (2 * TOKEN_STEPS) + 2.0**-18) + size * 2.0**-16) * (1 + 2.0**-10)


def _planes(q: Tensor, rows: int, columns: int, bits: int) -> Tensor:
    """Codes [rows / 16, groups, loads, 32, 4] int32 of whole numbers q [n, K], padded with zeros."""
    zero = 0 if bits == 8 else 1 << bits - 1
    whole = torch.full((rows, columns), zero, dtype=torch.uint8, device=q.device)
    whole[: len(q), : q.shape[1]] = (q.to(torch.int16) + zero).to(torch.uint8)
    # [strip, half, g, group, tile, t, word, byte] -> [strip, group, tile, half, g, t, word, byte]
    c = whole.view(rows // ROWS, 2, 8, -1, GROUP_TILES[bits], 4, 4, 4).permute(0, 3, 4, 1, 2, 5, 6, 7)
    # [strip, group, half or tile, g, t, word, byte]
    first = c >> 1 if bits in FIRST_BITS else c
    planes = c.flatten(2, 3) if bits == 8 else (first[:, :, :, 0] & 15) | (first[:, :, :, 1] & 15) << 4
    if bits in (6, 7):
        # [strip, group, tile, half, g, t, byte]
        two = sum((first[..., word, :] >> 4 & 3) << 2 * word for word in range(4))
        assert isinstance(two, Tensor)
        two = two.unflatten(2, (-1, 2)).permute(0, 1, 2, 5, 6, 3, 4, 7).flatten(5, 6)  # [.., pair, g, t, word, byte]
        planes = torch.cat((planes, two), 2)
    if bits in FIRST_BITS:
        one = sum((c[:, :, :, i // 4, :, :, i % 4] & 1) << i for i in range(8))  # [strip, group, tile, g, t, byte]
        assert isinstance(one, Tensor)
        planes = torch.cat((planes, one.permute(0, 1, 3, 4, 2, 5)[:, :, None]), 2)
    return planes.contiguous().view(torch.int32).view(rows // ROWS, -1, group_loads(bits), 32, 4)
