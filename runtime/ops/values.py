"""Weights and norms of a layer as values: a WeightView is a matrix with the format that it is stored in.

Each backend has a table from a format's name to its code for it. A new format is an entry there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kerngen.runtime.world import Span
from kerngen.templates.common.w4.tiling import STRIP


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How weights are stored. name: by which a backend knows what to do with them. tensors: what they are made of.

    group_size: weights of a row that share a scale, and a minimum where the format has minima; 0 for none. Another
    format (fp8) is another name with its tensors.
    """

    name: str
    tensors: tuple[str, ...]
    group_size: int = 0


DENSE = WeightFormat("dense", ("weight",))


@dataclass(frozen=True, slots=True)
class WeightView:
    """y = x W^T, W [out_features, in_features]; of experts, whose tensors have one dimension more, one W each.

    tensors: as `format` names them. As loaded they are in a checkpoint's order; after `Ops.prepare` in whatever order
    the backend's kernel wants, and only that backend may read them.
    name: of the projections that it fuses, for records and profiles: "gate_up". gated: rows are gate | up, and only
    Ops.gated multiplies with it. Of a divided model, rows: which rows of the whole output head these are, where ranks
    have a part each; is_summand: the rank has some of the columns, so that ranks' products are to be added.
    """

    format: WeightFormat
    tensors: tuple[Tensor, ...]
    out_features: int
    in_features: int
    name: str = "linear"
    gated: bool = False
    rows: Span | None = None
    is_summand: bool = False

    @property
    def is_dense(self) -> bool:
        return self.format == DENSE

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors)

    @property
    def weight(self) -> Tensor:
        """Of a dense one: W itself, in `ops.dtype`. Raises TypeError for any other."""
        return self._tensor("weight")

    @property
    def packed(self) -> Tensor:
        """The codes of one that is packed. Raises TypeError for any other."""
        return self._tensor("packed")

    @property
    def scales(self) -> Tensor:
        """Of one whose groups have scales. Raises TypeError for any other."""
        return self._tensor("scales")

    def _tensor(self, name: str) -> Tensor:
        if name not in self.format.tensors:
            raise TypeError(f"{self.name} is {self.format.name}, made of {', '.join(self.format.tensors)}: no {name}")
        return self.tensors[self.format.tensors.index(name)]


Linear = WeightView  # one matrix
Experts = WeightView  # one an expert


def dense_weights(weight: Tensor) -> WeightView:
    """weight: [out_features, in_features] in `ops.dtype`, or [E, out_features, in_features] of experts."""
    return WeightView(DENSE, (weight,), *weight.shape[-2:])


def rows_of_table(table: WeightView, rows: Span) -> WeightView:
    """Those rows of a table that a backend has prepared, which share its memory, as an output head. table: the whole
    one, or these rows of it. Rows of a packed one are whole strips.
    """
    tensors = table.tensors
    if table.out_features != rows.size:
        each = 1 if table.is_dense else STRIP
        tensors = tuple(t[rows.start // each : rows.stop // each] for t in tensors)
    return replace(table, tensors=tensors, out_features=rows.size, name="head", rows=None if rows.is_whole else rows)


def int4_weights(
    packed: Tensor, scales: Tensor, out_features: int, in_features: int, group_size: int, name: str = "linear",
    gated: bool = False,
) -> WeightView:  # fmt: skip
    """Symmetric int4: W[o, j] = (nibble - 8) * scale[o, j / group_size].

    As loaded (compressed-tensors order): packed int32 [out_features, in_features / 8], element j of a row in word j /
    8, bits 4 * (j % 8); scales [out_features, in_features / group_size] in `ops.dtype`.
    """
    made = WeightFormat("int4", ("packed", "scales"), group_size)
    return WeightView(made, (packed, scales), out_features, in_features, name, gated)


def grouped_weights(
    packed: Tensor, scales: Tensor, minima: Tensor | None = None, *, name: str = "linear", gated: bool = False
) -> WeightView:
    """W[o, j] = code * scale[o, j / group_size], plus minimum[o, j / group_size] where there are minima. Of experts all
    tensors have one dimension more.

    As loaded: packed int8 [out_features, in_features], or int32 [out_features, in_features / 8] with element j of a row
    in word j / 8, bits 4 * (j % 8), a nibble being its code with minima, and code + 8 without. scales and minima
    [out_features, in_features / group_size] in one dtype, that of `ops` or fp16; the view has them in one tensor, the
    last dimension 2. The format is int4, int4_min, int8 or int8_min.
    """
    is_int8 = packed.dtype == torch.int8
    out_features, in_features = packed.shape[-2], packed.shape[-1] * (1 if is_int8 else 8)
    made = ("int8" if is_int8 else "int4") + ("" if minima is None else "_min")
    form = WeightFormat(made, ("packed", "scales"), in_features // scales.shape[-1])
    both = scales if minima is None else torch.stack((scales, minima), dim=-1)
    return WeightView(form, (packed, both), out_features, in_features, name, gated)


@dataclass(frozen=True, slots=True)
class ResidualNorms:
    """Where a layer's product enters the residual stream: residual <- (residual + norm(h; post_weight)) * layer_scalar,
    in place, and then norm(residual; next_weight).

    Weights [H] and layer_scalar [1] in `ops.dtype`; layer_scalar None for 1. into: a tensor like the residual, which
    takes the new one in its place; the residual stays as it is.
    """

    post_weight: Tensor
    next_weight: Tensor
    eps: float
    layer_scalar: Tensor | None = None
    into: Tensor | None = None
