"""The offline repack: compressed-tensors' int4 layout to the order in which the kernel's lanes consume it.

A strip is 32 rows of W. The kernel's unit is a strip x 32 columns: 512 bytes, lane 4 g + t owning bytes 16 lane ..
16 lane + 15, four words of eight weights: rows 4 g .. 4 g + 3. Word 2 s + j, nibbles i and i + 4 (i = 0..3) hold row
4 g + 2 s + (i & 1), columns 16 j + 2 t + 8 (i >> 1) and the next. So A fragments of m16n8k16, m16n8k8 and wgmma come
out of a word without a shuffle (and those of m8n8k4 out of two lanes' halves), columns keep their order in x, and a
lane ends with four neighbouring outputs. One order serves every arch, every M and every configuration.

Scales become [N / 32, K / group_size, 32], rows in their own order. Nibbles keep compressed-tensors' +8.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kerngen.errors import ProblemError
from kerngen.templates.common.rows.torch_rows import TORCH_DTYPE, Draw
from kerngen.templates.common.w4.tiling import STRIP


def _order() -> Tensor:
    """[lane, word, nibble] -> row * 32 + column within the 32 x 32 tile, flattened, int64."""
    lane = torch.arange(32).view(32, 1, 1)
    word = torch.arange(4).view(1, 4, 1)
    nibble = torch.arange(8).view(1, 1, 8)
    i, high = nibble % 4, nibble // 4
    row = 4 * (lane // 4) + 2 * (word // 2) + i % 2
    column = 2 * (lane % 4) + 16 * (word % 2) + 8 * (i // 2) + high
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


def _nibbles(words: Tensor) -> Tensor:
    """int32 [...] -> uint8 [..., 8], least significant first."""
    shifts = torch.arange(0, 32, 4, device=words.device, dtype=torch.int32)
    return ((words.unsqueeze(-1) >> shifts) & 15).to(torch.uint8)


def _words(nibbles: Tensor) -> Tensor:
    """uint8 [..., 8] -> int32 [...], least significant first."""
    shifts = torch.arange(0, 32, 4, device=nibbles.device, dtype=torch.int64)
    word = (nibbles.to(torch.int64) << shifts).sum(-1)
    return torch.where(word >= 1 << 31, word - (1 << 32), word).to(torch.int32)


def pack(weight_packed: Tensor, weight_scale: Tensor) -> tuple[Tensor, Tensor]:
    """compressed-tensors' pack-quantized tensors in kernel order: (w_packed, scales).

    weight_packed: [N, K / 8] int32, lowest column in the lowest nibble, value + 8. weight_scale: [N, K / group_size].
    Returns w_packed [N / 32, K / 32, 32, 4] int32 and scales [N / 32, K / group_size, 32]
    in weight_scale's dtype, both contiguous. Raises ProblemError where N or K is not a multiple of 32.
    """
    n, k = weight_packed.shape[0], weight_packed.shape[1] * 8
    if n % STRIP or k % STRIP:
        raise ProblemError(f"W is {n} x {k}; both must be multiples of {STRIP}")
    if weight_scale.shape[0] != n or k % weight_scale.shape[1]:
        raise ProblemError(f"scales of shape {tuple(weight_scale.shape)} do not fit a W of {n} x {k}")
    packed = torch.empty(n // STRIP, k // STRIP, 32, 4, dtype=torch.int32, device=weight_packed.device)
    if weight_packed.is_meta:  # shapes alone
        return packed, weight_scale.new_empty(n // STRIP, weight_scale.shape[1], STRIP)
    order = _order().to(weight_packed.device)
    rows = max(1, (1 << 22) // k)  # strips at a time: bounds the scratch to about 1 GB
    for s in range(0, n // STRIP, rows):
        part = weight_packed[s * STRIP : (s + rows) * STRIP]
        q = _nibbles(part).view(-1, STRIP, k // STRIP, STRIP)  # [strips, row, k32, column]
        tiles = q.transpose(1, 2).reshape(-1, k // STRIP, STRIP * STRIP)
        packed[s : s + rows] = _words(tiles[..., order].view(-1, k // STRIP, 32, 4, 8))
    scales = weight_scale.view(n // STRIP, STRIP, -1).transpose(1, 2).contiguous()
    return packed, scales


def pack_experts(weight_packed: Tensor, weight_scale: Tensor, *, gated: bool) -> tuple[Tensor, Tensor]:
    """`pack` of each expert's matrix, one behind the other: an expert is a number of strips of 32 rows.

    weight_packed: [E, N, K / 8] int32; weight_scale: [E, N, K / group_size]. gated: the rows are gate's, then up's, and
    `interleave` goes before. Returns [E, N / 32, K / 32, 32, 4] int32 and [E, N / 32, K / group_size, 32]. Raises
    ProblemError as those two.
    """
    tensors = weight_packed, weight_scale
    if gated:
        of_gate_up = interleave(*(t.transpose(0, 1) for t in tensors))
        tensors = of_gate_up[0].transpose(0, 1), of_gate_up[1].transpose(0, 1)
    packed, scales = pack(*(t.reshape(-1, t.shape[-1]) for t in tensors))
    num_experts = len(weight_packed)
    return packed.view(num_experts, -1, *packed.shape[1:]), scales.view(num_experts, -1, *scales.shape[1:])


def drawn(draw: Draw, n: int, k: int, group_size: int, dtype: str) -> tuple[Tensor, Tensor]:
    """A random W of n x k as compressed-tensors stores it: weight_packed, and weight_scale in `dtype`. Its standard
    deviation is about k ** -0.5.
    """
    words = draw.integers(-(2**31), 2**31, n, k // 8).to(torch.int32)
    # nibbles uniform on -8..7: a standard deviation of 4.6
    scale = (1 + 0.25 * draw.normal(n, k // group_size, dtype="fp32").clamp(-3, 3)) / (4.6 * k**0.5)
    return words, scale.to(TORCH_DTYPE[dtype])


def unpack(w_packed: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """The exact inverse of `pack`: (weight_packed [N, K / 8] int32, weight_scale [N, K / group_size])."""
    strips, k32 = w_packed.shape[:2]
    order = _order().to(w_packed.device)
    tiles = torch.empty(strips, k32, STRIP * STRIP, dtype=torch.uint8, device=w_packed.device)
    tiles[..., order] = _nibbles(w_packed).view(strips, k32, STRIP * STRIP)
    q = tiles.view(strips, k32, STRIP, STRIP).transpose(1, 2).reshape(strips * STRIP, k32 * 4, 8)
    return _words(q), scales.transpose(1, 2).reshape(strips * STRIP, -1).contiguous()


def dequantize(weight_packed: Tensor, weight_scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """(nibble - 8) * scale as [N, K] in dtype, from compressed-tensors' layout; the product is exact in fp32."""
    n, k = weight_packed.shape[0], weight_packed.shape[1] * 8
    group_size = k // weight_scale.shape[1]
    dense = torch.empty(n, k, dtype=dtype, device=weight_packed.device)
    rows = max(1, (1 << 24) // k)  # at a time: bounds the scratch
    for begin in range(0, n, rows):
        part = slice(begin, begin + rows)
        q = _nibbles(weight_packed[part]).view(-1, k // group_size, group_size).float() - 8.0
        dense[part] = (q * weight_scale[part].float()[:, :, None]).view(-1, k)
    return dense
