"""The offline repack: int4 in compressed-tensors' layout, or int8, to the order in which the kernel's lanes consume it.

A strip is 32 rows of W. The kernel's unit is a strip x 32 columns: 512 bytes, lane 4 g + t owning bytes 16 lane ..
16 lane + 15, four words of eight weights: rows 4 g .. 4 g + 3. Word 2 s + j, nibbles i and i + 4 (i = 0..3) hold row
4 g + 2 s + (i & 1), columns 16 j + 2 t + 8 (i >> 1) and the next. So A fragments of m16n8k16, m16n8k8 and wgmma come
out of a word without a shuffle (and those of m8n8k4 out of two lanes' halves), columns keep their order in x, and a
lane ends with four neighbouring outputs. One order serves every arch, every M and every configuration.

A tile of int8 is 1024 bytes: first rows 4 g and 4 g + 1 of all lanes (half s = 0), 16 bytes each, then the other two.
Word 2 j + i of a lane's four in a half, byte b, holds row 4 g + 2 s + (b & 1), column 16 j + 2 t + 8 i + (b >> 1).

Scales become [N / 32, K / group_size, 32], rows in their own order. Where groups have minima it is 64: of each two rows
their scales, then their minima. Nibbles keep compressed-tensors' +8, with minima they are 0 to 15 as they stand; bytes
are int8 codes + 128.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kerngen.errors import ProblemError
from kerngen.templates.common.rows.spec import require
from kerngen.templates.common.rows.torch_rows import TORCH_DTYPE, Draw
from kerngen.templates.common.w4.tiling import STRIP, Packing, packing_of


def _order() -> Tensor:
    """[lane, word, nibble] -> row * 32 + column within the 32 x 32 tile, flattened, int64."""
    lane = torch.arange(32).view(32, 1, 1)
    word = torch.arange(4).view(1, 4, 1)
    nibble = torch.arange(8).view(1, 1, 8)
    i, high = nibble % 4, nibble // 4
    row = 4 * (lane // 4) + 2 * (word // 2) + i % 2
    column = 2 * (lane % 4) + 16 * (word % 2) + 8 * (i // 2) + high
    return (row * STRIP + column).reshape(-1)


def _order_int8() -> Tensor:
    """[half, lane, word, byte] -> row * 32 + column within the 32 x 32 tile, flattened, int64."""
    half = torch.arange(2).view(2, 1, 1, 1)
    lane = torch.arange(32).view(1, 32, 1, 1)
    word = torch.arange(4).view(1, 1, 4, 1)
    byte = torch.arange(4).view(1, 1, 1, 4)
    row = 4 * (lane // 4) + 2 * half + byte % 2
    column = 2 * (lane % 4) + 16 * (word // 2) + 8 * (word % 2) + byte // 2
    return (row * STRIP + column).reshape(-1)


def interleave(weight_packed: Tensor, weight_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Both, whose dim 0 is the rows of gate, then those of up, in the order in which a gated kernel wants them packed.

    A strip becomes 16 rows of gate and 16 of up: of four neighbouring rows, which one lane ends with, the first two are
    gate's and the others up's of the same two outputs. Raises ProblemError where there are no such strips.
    """
    return _interleaved(weight_packed), _interleaved(weight_scale)


def _interleaved(t: Tensor) -> Tensor:
    if t.shape[0] % STRIP:
        raise ProblemError(f"gate and up have {t.shape[0]} rows; they must be a multiple of {STRIP}")
    if t.is_meta:
        return t
    halves = t.view(2, -1, 2, *t.shape[1:])  # gate or up, pair, row of the pair
    return halves.transpose(0, 1).reshape(t.shape)


def separate(t: Tensor) -> Tensor:
    """The inverse of interleave: gate's rows, then up's."""
    return t.view(-1, 2, 2, *t.shape[1:]).transpose(0, 1).reshape(t.shape)


def nibbles(words: Tensor) -> Tensor:
    """int32 [...] -> uint8 [..., 8], least significant first."""
    shifts = torch.arange(0, 32, 4, device=words.device, dtype=torch.int32)
    return ((words.unsqueeze(-1) >> shifts) & 15).to(torch.uint8)


def _words(nibbles: Tensor) -> Tensor:
    """uint8 [..., 8] -> int32 [...], least significant first."""
    shifts = torch.arange(0, 32, 4, device=nibbles.device, dtype=torch.int64)
    word = (nibbles.to(torch.int64) << shifts).sum(-1)
    return torch.where(word >= 1 << 31, word - (1 << 32), word).to(torch.int32)


def pack_nibbles(codes: Tensor) -> Tensor:
    """uint8 [..., K] below 16 to int32 [..., K / 8], the lowest element in the lowest bits."""
    return (codes[..., 0::2] | codes[..., 1::2] << 4).contiguous().view(torch.int32)


def pack(weight_packed: Tensor, weight_scale: Tensor) -> tuple[Tensor, Tensor]:
    """A checkpoint's tensors in kernel order: (w_packed, scales).

    weight_packed: [N, K / 8] int32 as compressed-tensors packs it, lowest column in the lowest nibble, value + 8, or
    with minima the value; or [N, K] int8, the values. weight_scale: [N, K / group_size], W = value * scale; with minima
    [N, K / group_size, 2], W = value * scale + minimum. Returns w_packed [N / 32, K / 32, 32, 4] int32, of int8
    [N / 32, K / 32, 64, 4], and scales [N / 32, K / group_size, 32] in weight_scale's dtype, with minima
    [N / 32, K / group_size, 64]; both contiguous. Raises ProblemError where N or K is not a multiple of 32.
    """
    is_int8 = weight_packed.dtype == torch.int8
    n, k = weight_packed.shape[0], weight_packed.shape[1] * (1 if is_int8 else 8)
    if n % STRIP or k % STRIP:
        raise ProblemError(f"W is {n} x {k}; both must be multiples of {STRIP}")
    if weight_scale.shape[0] != n or k % weight_scale.shape[1] or weight_scale.shape[2:] not in ((), (2,)):
        raise ProblemError(f"scales of shape {tuple(weight_scale.shape)} do not fit a W of {n} x {k}")
    of_group = STRIP * (weight_scale.ndim - 1)
    lanes = 64 if is_int8 else 32
    packed = torch.empty(n // STRIP, k // STRIP, lanes, 4, dtype=torch.int32, device=weight_packed.device)
    if weight_packed.is_meta:  # shapes alone
        return packed, weight_scale.new_empty(n // STRIP, weight_scale.shape[1], of_group)
    order = (_order_int8 if is_int8 else _order)().to(weight_packed.device)
    rows = max(1, (1 << 22) // k)  # strips at a time: bounds the scratch to about 1 GB
    for s in range(0, n // STRIP, rows):
        part = weight_packed[s * STRIP : (s + rows) * STRIP]
        codes = part.view(torch.uint8) ^ 128 if is_int8 else nibbles(part)
        q = codes.view(-1, STRIP, k // STRIP, STRIP)  # [strips, row, k32, column]
        tiles = q.transpose(1, 2).reshape(-1, k // STRIP, STRIP * STRIP)[..., order]
        words = tiles.view(torch.int32) if is_int8 else _words(tiles.view(*tiles.shape[:2], -1, 8))
        packed[s : s + rows] = words.view(-1, k // STRIP, lanes, 4)
    pairs = weight_scale.reshape(
        n // STRIP, 16, 2, -1, of_group // STRIP
    )  # [strip, pair, row, group, scale or minimum]
    return packed, pairs.permute(0, 3, 1, 4, 2).reshape(n // STRIP, -1, of_group).contiguous()


def rounded_scales(scales: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Scales or minima that a file has in more digits, in `dtype`; and how many of them are not the same there, as a
    tensor beside them: nobody waits for it.
    """
    made = scales.to(dtype)
    return made, (made.double() != scales.double()).sum()


def format_of(w_packed: Tensor, scales: Tensor) -> str:
    """The format, by its name in tiling.WEIGHTS, of what `pack` or `pack_experts` gives. Raises ProblemError where they
    are of none.
    """
    lanes, of_group = w_packed.shape[-2], scales.shape[-1]
    is_format = lanes in (STRIP, 2 * STRIP) and of_group in (STRIP, 2 * STRIP)
    require(is_format, f"codes and scales of {tuple(w_packed.shape)} and {tuple(scales.shape)} are no format")
    return Packing(0, 4 * lanes // STRIP, of_group > STRIP).name


def pack_experts(weight_packed: Tensor, weight_scale: Tensor, *, gated: bool) -> tuple[Tensor, Tensor]:
    """`pack` of each expert's matrix, one behind the other: an expert is a number of strips of 32 rows.

    Both as `pack` takes them, with a dimension of E experts before. gated: the rows are gate's, then up's, and
    `interleave` goes before. Returns what `pack` does, [E, ...] each. Raises ProblemError as those two.
    """
    tensors = weight_packed, weight_scale
    if gated:
        of_gate_up = interleave(*(t.transpose(0, 1) for t in tensors))
        tensors = of_gate_up[0].transpose(0, 1), of_gate_up[1].transpose(0, 1)
    packed, scales = pack(*(t.reshape(-1, *t.shape[2:]) for t in tensors))
    num_experts = len(weight_packed)
    return packed.view(num_experts, -1, *packed.shape[1:]), scales.view(num_experts, -1, *scales.shape[1:])


def drawn(draw: Draw, n: int, k: int, group_size: int, dtype: str, weights: str = "int4") -> tuple[Tensor, Tensor]:
    """A random W of n x k as `pack` takes it, scales and minima in `dtype`. Its standard deviation is about k ** -0.5.

    weights: a format by its name (tiling.py).
    """
    packing, shape = packing_of(weights, group_size), (n, k // group_size)
    # uniform on -8..7: a standard deviation of 4.6; on -128..127: 73.9
    codes, deviation = draw.integers(-(2**31), 2**31, n, k // 8).to(torch.int32), 4.6
    if packing.bits == 8:
        codes, deviation = draw.integers(-128, 128, n, k).to(torch.int8), 73.9
    scale = (1 + 0.25 * draw.normal(*shape, dtype="fp32").clamp(-3, 3)) / (deviation * k**0.5)
    if packing.has_minima:
        middle = 0.0 if packing.bits == 8 else 7.5  # of the codes
        minimum = scale * (0.2 * deviation * draw.normal(*shape, dtype="fp32").clamp(-3, 3) - middle)
        scale = torch.stack((scale, minimum), dim=-1)
    return codes, scale.to(TORCH_DTYPE[dtype])


def drawn_table(draw: Draw, n: int, k: int, weights: str, group_size: int) -> tuple[Tensor, Tensor]:
    """As `drawn`, in kernel order, with fp16 scales: a packed table."""
    return pack(*drawn(draw, n, k, group_size, "fp16", weights))


def eighths_table(draw: Draw, n: int, k: int, weights: str, group_size: int) -> tuple[Tensor, Tensor]:
    """A packed table of small multiples of 1/8, whose products fp32 sums exactly in any order."""
    packing, shape = packing_of(weights, group_size), (n, k // group_size)
    scales = draw.integers(1, 3, *shape) / 8
    if packing.has_minima:
        scales = torch.stack((scales, draw.integers(-8, 9, *shape) / 8), dim=-1)
    if packing.bits == 8:
        codes = draw.integers(-20, 21, n, k).to(torch.int8)
    else:
        codes = draw.integers(-(2**31), 2**31, n, k // 8).to(torch.int32)
    return pack(codes, scales.half())


def unpack(w_packed: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """The exact inverse of `pack`: weight_packed [N, K / 8] int32 or [N, K] int8, and weight_scale, with its minima."""
    strips, k32, lanes = w_packed.shape[:3]
    is_int8 = lanes == 64
    order = (_order_int8 if is_int8 else _order)().to(w_packed.device)
    tiles = torch.empty(strips, k32, STRIP * STRIP, dtype=torch.uint8, device=w_packed.device)
    codes = w_packed.contiguous().view(torch.uint8) if is_int8 else nibbles(w_packed)
    tiles[..., order] = codes.view(strips, k32, STRIP * STRIP)
    q = tiles.view(strips, k32, STRIP, STRIP).transpose(1, 2).reshape(strips * STRIP, -1)
    packed = (q ^ 128).view(torch.int8) if is_int8 else _words(q.view(len(q), -1, 8))
    pairs = scales.view(strips, -1, 16, scales.shape[2] // STRIP, 2)  # [strip, group, pair, scale or minimum, row]
    by_rows = pairs.permute(0, 2, 4, 1, 3).reshape(strips * STRIP, scales.shape[1], -1).contiguous()
    return packed, by_rows if scales.shape[2] > STRIP else by_rows.squeeze(-1)


def rows_of(w_packed: Tensor, scales: Tensor, ids: Tensor) -> Tensor:
    """Rows ids [n] int64 of a W in kernel order, [n, K] fp32. It may be captured in a CUDA graph."""
    n, (strips, tiles, lanes) = len(ids), w_packed.shape[:3]
    strip, quad, half, odd = ids // STRIP, ids % STRIP // 4, ids % 4 // 2, ids % 2
    two = torch.arange(2, device=ids.device)
    if lanes == 64:
        stored = w_packed.contiguous().view(torch.uint8).view(strips, tiles, 2, 8, 4, 4, 2, 2)
        codes = stored[strip, :, half, quad, :, :, :, odd].int() - 128  # [n, tile, t, word, column of two]
    else:
        words = w_packed.view(strips, tiles, 8, 4, 2, 2)[strip, :, quad, :, half]  # [n, tile, t, word]
        shifts = 4 * odd[:, None, None] + 8 * two[:, None] + 16 * two  # [n, half of a word's columns, column of two]
        codes = (words[..., None, None] >> shifts[:, None, None, None] & 15).flatten(3, 4)
    rows = codes.transpose(2, 3).reshape(n, scales.shape[1], -1).float()
    if scales.shape[2] == STRIP:
        found = scales[strip, :, ids % STRIP].float()  # [n, group]
        return ((rows - 8.0 * (lanes == 32)) * found[..., None]).flatten(1)
    pairs = scales.view(strips, -1, 16, 2, 2)[strip, :, ids % STRIP // 2, :, odd].float()  # [n, group, 2]
    return (rows * pairs[..., :1] + pairs[..., 1:]).flatten(1)


def table_format(w_packed: Tensor, scales: Tensor) -> tuple[int, int, str, int]:
    """Of a W in kernel order: its rows and columns, its format by name (tiling.py), and its group_size."""
    (strips, tiles), groups = w_packed.shape[:2], scales.shape[1]
    weights = format_of(w_packed, scales)
    shown = f"{tuple(w_packed.shape)} and {tuple(scales.shape)}"
    fits = groups > 0 and tiles * STRIP % groups == 0 and len(scales) == strips
    require(fits, f"codes and scales of {shown} are no packed matrix")
    return strips * STRIP, tiles * STRIP, weights, tiles * STRIP // groups


def dequantize(weight_packed: Tensor, weight_scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """What `pack` takes as [N, K] in dtype: value * scale, which is exact in fp32, plus minimum where there are any."""
    is_int8, has_minima = weight_packed.dtype == torch.int8, weight_scale.ndim == 3
    n, k = weight_packed.shape[0], weight_packed.shape[1] * (1 if is_int8 else 8)
    group_size = k // weight_scale.shape[1]
    dense = torch.empty(n, k, dtype=dtype, device=weight_packed.device)
    rows = max(1, (1 << 24) // k)  # at a time: bounds the scratch
    for begin in range(0, n, rows):
        part = slice(begin, begin + rows)
        codes = weight_packed[part] if is_int8 else nibbles(weight_packed[part])
        q = codes.view(-1, k // group_size, group_size).float() - (0.0 if is_int8 or has_minima else 8.0)
        scales = weight_scale[part].float().unsqueeze(-1)
        w = q * scales[:, :, 0] + scales[:, :, 1] if has_minima else q * scales
        dense[part] = w.view(-1, k)
    return dense
