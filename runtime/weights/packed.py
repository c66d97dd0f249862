"""Packed matrices on the device as they are loaded, before a backend orders them: codes, scales and minima."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kerngen.runtime.config import ModelConfig
from kerngen.runtime.ops import WeightView, grouped_weights
from kerngen.templates.common.w4.pack import dequantize, nibbles
from kerngen.templates.common.w4.tiling import STRIP, Packing


def scale_dtype(dtype: torch.dtype, *packings: Packing | None) -> torch.dtype:
    """What scales and minima of matrices that share a dtype are kept in where activations are in `dtype`. bf16 would
    round what no bf16 weights were made into: other forms than symmetric int4, whose scales are released in bf16, keep
    fp16. None: a matrix that is dense.
    """
    has_others = any(packing is not None and not packing.is_int4 for packing in packings)
    return torch.float16 if dtype == torch.bfloat16 and has_others else dtype


def table_scale_dtype(dtype: torch.dtype) -> torch.dtype:
    """What an embedding's scales and minima are kept in: fp16, in which blocks have them, Q4_0's too. A row has the
    values that it would have decoded, but for what fp16 rounds where a scale is a product, as in Q4_K and Q6_K.
    """
    return torch.float16 if dtype == torch.bfloat16 else dtype


def table_is_packed(packing: Packing, config: ModelConfig) -> bool:
    """Whether an embedding that is stored so stays packed, in w4a16_gemm's order: in whole strips, also of the rows of
    the head that a rank of a divided model has.
    """
    rows, width = config.vocab_span, config.hidden_size
    return all(n % STRIP == 0 for n in (rows.whole, rows.start, rows.size, width)) and width % packing.group_size == 0


def codes_layout(packing: Packing) -> tuple[str, int]:
    """Of codes as `grouped_weights` takes them: safetensors' name of their dtype, and how many are in an element."""
    return ("I8", 1) if packing.bits == 8 else ("I32", 8)


@dataclass(frozen=True, slots=True)
class PackedTensors:
    """codes: int32 [rows, in / 8] or int8 [rows, in], as `codes_layout` says. scales, and minima where groups
    have some, [rows, in / group_size]. Of experts [E, ...] each.
    """

    packing: Packing
    codes: Tensor
    scales: Tensor
    minima: Tensor | None = None

    def view(self, name: str) -> WeightView:
        return grouped_weights(self.codes, self.scales, self.minima, name=name)

    def split(self, sizes: list[int]) -> Iterator[PackedTensors]:
        """Parts of so many rows, which share its memory."""
        yield from self._parts(lambda t: t.split(sizes, -2))

    def each(self) -> Iterator[PackedTensors]:
        """Every expert's, which share its memory."""
        yield from self._parts(lambda t: t.unbind())

    def _parts(self, cut: Callable[[Tensor], Sequence[Tensor]]) -> Iterator[PackedTensors]:
        codes, scales = cut(self.codes), cut(self.scales)
        minima = [None] * len(codes) if self.minima is None else cut(self.minima)
        for of_part in zip(codes, scales, minima, strict=True):
            yield PackedTensors(self.packing, *of_part)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """[rows, in] in `dtype`."""
        floats = self.scales if self.minima is None else torch.stack((self.scales, self.minima), dim=-1)
        return dequantize(self.codes, floats, dtype)

    def take(self, other: PackedTensors) -> None:
        """Fills this with the rows of `other`, whose packing goes into this one's (quant.joined_packing)."""
        theirs, own = other.packing, self.packing
        zero = 8 if theirs.is_int4 else 0  # what a code is stored with more, of 4 bits
        if theirs.bits == own.bits:
            self.codes.copy_(other.codes)
        else:
            codes = nibbles(other.codes).flatten(-2).to(torch.int8)
            self.codes.copy_(codes - zero)
            zero = 0
        times = theirs.group_size // own.group_size
        self.scales.copy_(other.scales.repeat_interleave(times, -1))
        if self.minima is None:
            return
        if other.minima is not None:
            self.minima.copy_(other.minima.repeat_interleave(times, -1))
        else:  # of a code that is stored with `zero` more
            self.minima.copy_(self.scales * -zero)
