"""ggml's blocks in torch: each type taken apart into integer codes, and what they are multiplied with and added to.

An element is code * scale + minimum in fp32: that is what ggml computes (ggml-quants.c, dequantize_row_*), to the last
bit, since the product of a code and a scale is exact in fp32 but for Q6_K's, and there the order is ggml's. So one
description serves whoever wants numbers (`decode`), and kernels that keep the codes (`take_apart`).

raw: uint8 [..., blocks, bytes of a block], of rows whose blocks lie behind each other. Of a block of 32 nibbles element
j lies in the low half of byte j, and element j + 16 in the high half of the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kerngen.runtime.gguf.ggml_types import known

# IQ4_NL's and IQ4_XS's values of a nibble, and MXFP4's in halves (e2m1).
IQ4_TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
FP4_TABLE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
_LOW_NIBBLES = 0x0F0F0F0F0F0F0F0F
FLOAT_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Groups:
    """codes: int8 [..., K]. scales and minima: fp32 [..., K / group_size]; minima None where there are none."""

    codes: Tensor
    scales: Tensor
    minima: Tensor | None
    group_size: int

    def values(self) -> Tensor:
        """fp32 [..., K]."""
        grouped = self.codes.unflatten(-1, (-1, self.group_size)).float()
        grouped *= self.scales[..., None]
        if self.minima is not None:
            grouped += self.minima[..., None]
        return grouped.flatten(-2)


def take_apart(kind: str, raw: Tensor) -> Groups:
    """raw [..., blocks, bytes] of the quantised type `kind`. Raises CheckpointError for one that is not read."""
    return _TYPES[known(kind)](raw)


def decode(kind: str, raw: Tensor) -> Tensor:
    """fp32 [..., K]; as take_apart, and of floats."""
    if (dtype := FLOAT_TYPES.get(kind)) is not None:
        return raw.contiguous().flatten(-2).view(dtype).float()
    return take_apart(kind, raw).values()


def q4_0_words(raw: Tensor) -> Tensor:
    """Codes of Q4_0 in the order of compressed-tensors, int32 [..., K / 8]: element j of a row in word j / 8, bits 4 *
    (j % 8). In both a nibble n stands for n - 8.
    """
    # A copy in any case: a single block is contiguous where it lies, which is at no multiple of 8.
    eight = raw[..., 2:].clone(memory_format=torch.contiguous_format).view(torch.int64)  # bytes at a time: 2 a block
    low, high = eight & _LOW_NIBBLES, eight >> 4 & _LOW_NIBBLES
    for part in (low, high):  # a nibble a byte, until it is a nibble a nibble
        part |= part >> 4
        part &= 0x00FF00FF00FF00FF
        part |= part >> 8
        part &= 0x0000FFFF0000FFFF
        part |= part >> 16
    return torch.cat((low, high), -1).to(torch.int32).flatten(-2)


def _halves(raw: Tensor) -> Tensor:
    """fp16 [..., n] of uint8 [..., 2 n]."""
    return raw.contiguous().view(torch.float16)


def _scale(raw: Tensor, at: int = 0) -> Tensor:
    """fp32 [..., 1] of each block."""
    return _halves(raw[..., at : at + 2]).float()


def _nibbles(raw: Tensor) -> Tensor:
    """uint8 [..., 2 n] of [..., n] bytes: the low halves, then the high ones."""
    return torch.cat((raw & 15, raw >> 4), -1)


def _bits(raw: Tensor) -> Tensor:
    """uint8 [..., 8 n] of [..., n] bytes, the lowest bit first."""
    return (raw[..., None] >> torch.arange(8, dtype=torch.uint8, device=raw.device) & 1).flatten(-2)


def _signed(codes: Tensor, zero: int) -> Tensor:
    return (codes.to(torch.int8) - zero).flatten(-2)


def _groups(codes: Tensor, scales: Tensor, minima: Tensor | None = None, size: int = 32) -> Groups:
    """scales, minima [..., blocks, groups of a block]."""
    return Groups(codes, scales.flatten(-2), None if minima is None else minima.flatten(-2), size)


def _q4_0(raw: Tensor) -> Groups:
    return _groups(_signed(_nibbles(raw[..., 2:]), 8), _scale(raw))


def _q4_1(raw: Tensor) -> Groups:
    return _groups(_signed(_nibbles(raw[..., 4:]), 0), _scale(raw), _scale(raw, 2))


def _q5_0(raw: Tensor) -> Groups:
    return _groups(_signed(_nibbles(raw[..., 6:]) | _bits(raw[..., 2:6]) << 4, 16), _scale(raw))


def _q5_1(raw: Tensor) -> Groups:
    return _groups(_signed(_nibbles(raw[..., 8:]) | _bits(raw[..., 4:8]) << 4, 0), _scale(raw), _scale(raw, 2))


def _q8_0(raw: Tensor) -> Groups:
    return _groups(raw[..., 2:].contiguous().view(torch.int8).flatten(-2), _scale(raw))


def _k_scales(raw: Tensor) -> tuple[Tensor, Tensor]:
    """scales and minima [..., blocks, 8] of Q4_K and Q5_K: 6 bits of each in 12 bytes, times two fp16."""
    packed = raw[..., 4:16]
    low, middle, high = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat((low & 63, high & 15 | low >> 6 << 4), -1)
    minima = torch.cat((middle & 63, high >> 4 | middle >> 6 << 4), -1)
    return _scale(raw) * scales.float(), -(_scale(raw, 2) * minima.float())


def _k_nibbles(raw: Tensor) -> Tensor:
    """uint8 [..., blocks, 8, 32]: of each chunk of 32 bytes the low halves, then the high ones."""
    chunks = raw.unflatten(-1, (4, 32))
    return torch.stack((chunks & 15, chunks >> 4), -2).flatten(-3, -2)


def _q4_k(raw: Tensor) -> Groups:
    return _groups(_signed(_k_nibbles(raw[..., 16:]).flatten(-2), 0), *_k_scales(raw))


def _q5_k(raw: Tensor) -> Groups:
    fifth = raw[..., None, 16:48] >> torch.arange(8, dtype=torch.uint8, device=raw.device)[:, None] & 1
    return _groups(_signed((_k_nibbles(raw[..., 48:]) | fifth << 4).flatten(-2), 0), *_k_scales(raw))


def _q6_k(raw: Tensor) -> Groups:
    low = _nibbles(raw[..., :128].unflatten(-1, (2, 64)))  # [..., 2, 128]
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=raw.device)[:, None]
    high = (raw[..., 128:192].unflatten(-1, (2, 1, 32)) >> shifts & 3).flatten(-2)
    scales = _scale(raw, 208) * raw[..., 192:208].contiguous().view(torch.int8).float()
    return _groups(_signed((low | high << 4).flatten(-2), 32), scales, size=16)


def _looked_up(nibbles: Tensor, table: tuple[int, ...]) -> Tensor:
    return torch.tensor(table, dtype=torch.int8, device=nibbles.device)[nibbles.int()].flatten(-2)


def _iq4_nl(raw: Tensor) -> Groups:
    return _groups(_looked_up(_nibbles(raw[..., 2:]), IQ4_TABLE), _scale(raw))


def _iq4_xs(raw: Tensor) -> Groups:
    two = torch.arange(0, 8, 2, dtype=torch.uint8, device=raw.device)
    high = (raw[..., 2:4, None] >> two & 3).flatten(-2)  # of 8 groups
    low = torch.stack((raw[..., 4:8] & 15, raw[..., 4:8] >> 4), -1).flatten(-2)
    scales = _scale(raw) * ((low | high << 4).float() - 32)
    nibbles = _nibbles(raw[..., 8:].unflatten(-1, (8, 16))).flatten(-2)
    return _groups(_looked_up(nibbles, IQ4_TABLE), scales)


def _mxfp4(raw: Tensor) -> Groups:
    exponent = raw[..., :1].int()  # 2^(e - 128), whose two smallest are no normal numbers
    scales = torch.where(exponent < 2, 0x00200000 << exponent, exponent - 1 << 23).view(torch.float32)
    return _groups(_looked_up(_nibbles(raw[..., 1:]), FP4_TABLE), scales)


_TYPES: dict[str, Callable[[Tensor], Groups]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q4_K": _q4_k, "Q5_K": _q5_k,
    "Q6_K": _q6_k, "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs, "MXFP4": _mxfp4,
}  # fmt: skip
