"""Weight sources: named weights, read one by one. A checkpoint's are here, generated ones in synthetic.py, repacked
ones in repacked.py. A rank of a divided model copies the rows and columns that it has, and looks at no others.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from kerngen.errors import CheckpointError
from kerngen.runtime.config import LayerConfig, ModelConfig
from kerngen.runtime.ops import Experts, Linear, Ops, WeightView, dense_weights, int4_weights, rows_of_table
from kerngen.runtime.quant import joined_packing
from kerngen.runtime.weights.fp16_range import mlp_exponents, times_power
from kerngen.runtime.weights.int4 import becomes_int4, to_int4
from kerngen.runtime.weights.mapped import DTYPES, Box
from kerngen.runtime.weights.packed import (
    PackedTensors,
    codes_layout,
    scale_dtype,
    table_is_packed,
    table_scale_dtype,
)
from kerngen.runtime.weights.quantized import FLOATS, IgnoreList, Packed, find_packed
from kerngen.runtime.weights.safetensors import Checkpoint
from kerngen.runtime.weights.tensors import Advance, TensorSource
from kerngen.runtime.world import Span
from kerngen.templates.common.w4.tiling import Packing

# Stored by the E-series on layers that own no cache, and never used there.
DEAD_KV = re.compile(r"layers\.(\d+)\.self_attn\.(?:k_proj|v_proj|k_norm|v_norm)\..*")
# Left over by other tools, and ignored with a warning: V of layers whose V is K, and tables that are computed.
DEAD_V = re.compile(r"layers\.(\d+)\.self_attn\.v_proj\..*")
# Read before, if at all (kv_scales.py).
KV_SCALES = re.compile(r"layers\.\d+\.self_attn\.[kv]_scale")
DEAD_ROPE = re.compile(r"(?:layers\.\d+\.self_attn\.)?rotary_emb\.\w*inv_freq")

Parts = Sequence[tuple[str, Span]]  # modules with their out_features, one under the other; of a rank, which of them


class WeightSource(Protocol):
    """Answers the builders' questions (loader.py).

    is_dry: tensors have shapes and no storage yet, so their values must not be looked at.
    """

    config: ModelConfig
    ops: Ops
    is_dry: bool

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """A float tensor in `ops.dtype`, or one in `dtype`, which is of floats or of integers."""

    def scalar(self, name: str) -> Tensor:
        """A float tensor [1] in `ops.dtype`; 1 where the model has none of that name."""

    def rows(self, name: str, rows: Span, width: int) -> Tensor:
        """Those rows of a float table [rows.whole, width], in `ops.dtype`."""

    def table(self, module: str, rows: int, width: int) -> Linear:
        """The embedding table [rows, width], prepared for the backend: packed where it is stored so."""

    def linear(self, parts: Parts, in_features: Span) -> Linear:
        """The linears called `parts`, one under the other, repacked for the backend."""

    def mlp(self, gate_up: Parts, down: Parts, norm: Tensor) -> tuple[Linear, Linear]:
        """gate | up [2 I, H] and down [H, I] of a gated MLP behind the RMS norm with the weight `norm` [H]."""

    def unpacked(self, module: str, out_features: int, in_features: int) -> Linear:
        """A small linear that kernels want in floats, however it is stored."""

    def head(self, embed: Linear, rows: Span) -> Linear:
        """Those rows of the output matrix [vocab, H]; shares `embed`'s memory where the two are tied. embed: the whole
        table, as it is prepared, or these rows of it.
        """

    def experts(self, name: str, norm: Tensor) -> tuple[Experts, Experts]:
        """gate_up [E, 2 I, H] and down [E, H, I] of the layer `name`, prepared for the backend. norm: as of `mlp`."""


class CheckpointSource(TensorSource):
    """The text model's weights, or a drafter's, in a folder."""

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig, ops: Ops, advance: Advance | None = None) -> None:
        super().__init__(checkpoint, ops, advance)
        self.config = config
        self.absent: list[str] = []  # scalars that the checkpoint leaves out
        self._ignored = IgnoreList(config.quant.ignore if config.quant else (), strict=False)
        self._packed: dict[tuple[str, tuple[int, ...]], Packed | None] = {}

    def check_left(self, prefix: str) -> None:
        """Raise CheckpointError if a tensor of the model was not asked for: then config.json says too little.

        Warns of tensors that transformers ignores or makes up, too.
        """
        folder, left = self.checkpoint.folder, []
        for name in sorted(n for n in self.checkpoint.names - self.used if n.startswith(prefix)):
            short = name.removeprefix(prefix).removeprefix("model.")  # which a drafter's prefix does not hold
            if self.config.has_kv_scales and KV_SCALES.fullmatch(short):
                continue
            dead = DEAD_KV.fullmatch(short)
            if dead and self._layer_is(dead[1], lambda layer: not layer.owns_kv):
                continue
            dead = DEAD_V.fullmatch(short)
            if not DEAD_ROPE.fullmatch(short) and not (dead and self._layer_is(dead[1], lambda layer: layer.v_is_k)):
                shape = list(self.checkpoint.shape(name))
                raise CheckpointError(
                    f"{folder} holds {name} {shape}, which its {self.checkpoint.said_by} does not account for"
                )
            left.append(name)
        for names, what in ((left, "is stored and ignored"), (self.absent, "is not stored; 1 is used")):
            if names:
                more = f" and {len(names) - 1} like it" if len(names) > 1 else ""
                warnings.warn(f"{folder}: {names[0]}{more} {what}, as in transformers", stacklevel=2)

    def _layer_is(self, index: str, test: Callable[[LayerConfig], bool]) -> bool:
        layers = self.config.layers
        return len(index) <= 9 and int(index) < len(layers) and test(layers[int(index)])

    def scalar(self, name: str) -> Tensor:
        """A float tensor [1] in `ops.dtype`; 1 where the checkpoint lacks it, as transformers initializes it."""
        if name in self.checkpoint:
            return self.tensor(name, 1)
        if self.is_dry:
            self.absent.append(name)
        return self._allocate((1,), self.ops.dtype).fill_(1.0)

    def table(self, module: str, rows: int, width: int) -> Linear:
        """Packed where a kernel's order serves lookups and the rank's part of the head: see table_is_packed."""
        quant, named = self.config.quant, self.config.quant is not None and self.config.quant.packings is not None
        if not named and any(f"{module}.{part}" in self.checkpoint for part in ("weight_packed", "qweight")):
            raise CheckpointError(f"{self.checkpoint.folder}: the embedding table is packed, which is not implemented")
        packed = self._find(module, (rows, width)) if quant is not None and named else None
        if packed is None:
            return dense_weights(self.tensor(f"{module}.weight", rows, width))
        if not table_is_packed(packed.packing, self.config):
            dense = self._allocate((rows, width), self.ops.dtype)
            self._fill_dense([(module, Span.of(rows))], Span.of(width), dense)
            return dense_weights(dense)
        made = self._allocate_packed(packed.packing, (rows,), width, table_scale_dtype(self.ops.dtype))
        self._copy_packed(packed, made, (Span.of(rows),), Span.of(width))
        return self.ops.prepare(made.view("embedding"))

    def linear(self, parts: Parts, in_features: Span) -> Linear:
        """The linears called `parts`, one under the other, repacked for the backend.

        Stays packed if all of them are, in a form that has each one's without loss; a mixture with dense ones becomes
        dense. What is dense becomes int4 where the config has that done as weights are loaded.
        """
        made = self._prepared(self._joined(parts, in_features, self.ops.dtype), parts)
        return made if in_features.is_whole else replace(made, is_summand=True)

    def mlp(self, gate_up: Parts, down: Parts, norm: Tensor) -> tuple[Linear, Linear]:
        """As `linear` of both. In fp16 with the powers of two that keep what is between in range (fp16_range.py)."""
        hidden, inner = Span.of(norm.shape[0]), gate_up[0][1]
        if self.ops.dtype != torch.float16:  # one after the other: what is stored of one goes before the next comes
            first = self._prepared(self._joined(gate_up, hidden, self.ops.dtype), gate_up, gated=True)
            return first, self.linear(down, inner)
        names = [
            [self._floats_of(module, out, cols) for module, out in parts]
            for parts, cols in ((gate_up, hidden), (down, inner))
        ]
        both = self._in_range(
            self._joined(gate_up, hidden, self._mlp_dtype(*names[0])),
            self._joined(down, inner, self._mlp_dtype(*names[1])),
            norm,
            *names,
        )
        second = replace(both[1], is_summand=not inner.is_whole)
        return self._prepared(both[0], gate_up, gated=True), self._prepared(second, down)

    def _prepared(self, weights: Linear, parts: Parts, *, gated: bool = False) -> Linear:
        """`weights` for the backend; int4 where the config has that done as they are loaded. gated: gate and up."""
        quant, rows, cols = self.config.quant, weights.out_features, weights.in_features
        if (
            quant is not None
            and weights.is_dense
            and becomes_int4(quant, rows, cols, self.ops.dtype)
            and not self._is_ignored(parts)
        ):
            packed, scales = to_int4(weights.weight, quant.group_size)
            weights = int4_weights(packed, scales, rows, cols, quant.group_size, fused_name(parts))
        if gated and not weights.is_dense:
            weights = replace(weights, gated=True)
        return weights if self.is_dry else self.ops.prepare(weights)

    def _joined(self, parts: Parts, in_features: Span, dtype: torch.dtype) -> Linear:
        """As they are stored, with weights or scales in `dtype`."""
        rows, cols = sum(out.size for _, out in parts), in_features.size
        packing = joined_packing([p.packing if p else None for p in self._found([parts], in_features)])
        if packing is not None:
            packed = self._allocate_packed(packing, (rows,), cols, scale_dtype(dtype, packing))
            self._fill_packed(parts, in_features, packed)
            return packed.view(fused_name(parts))
        dense = self._allocate((rows, cols), dtype)
        self._fill_dense(parts, in_features, dense)
        return dense_weights(dense)

    def _floats_of(self, module: str, out_features: Span, in_features: Span) -> str:
        """The name of the tensor with the module's weights, or with their scales."""
        packed = self._find(module, (out_features.whole, in_features.whole))
        return packed.scales if packed else f"{module}.weight"

    def _mlp_dtype(self, *names: str) -> torch.dtype:
        """What the weights or scales of an MLP, called so, are read in.

        In fp16 that is before powers of two make them fit: what holds them exactly, which is bf16 where all are dense
        and bf16. Else it is `ops.dtype`.
        """
        if self.is_dry or self.ops.dtype != torch.float16:
            return self.ops.dtype
        is_bf16 = all(self.checkpoint.dtype(n) == "BF16" and not n.endswith(("scale", "scales")) for n in names)
        return torch.bfloat16 if is_bf16 else torch.float32

    def _in_range(
        self, gate_up: WeightView, down: WeightView, norm: Tensor, *stored: Sequence[str]
    ) -> tuple[WeightView, WeightView]:
        """Both in `ops.dtype`, in fp16 with the powers of two of fp16_range.py.

        stored: of each the tensors that its weights or scales come from, each as many rows as the next.
        """
        if self.is_dry or self.ops.dtype != torch.float16:
            return gate_up, down
        up, down_exponents = mlp_exponents(
            gate_up, down, norm, self.ops.collectives, normed=self.config.activation == "gelu_tanh"
        )
        of_gate_and_up = torch.stack((torch.zeros_like(up), up), -1)  # [2] or [E, 2]
        made = []
        for weights, exponents, names in zip((gate_up, down), (of_gate_and_up, down_exponents), stored, strict=True):
            *codes, floats = weights.tensors  # weights, or codes and scales
            rounded = times_power(floats.view(exponents.numel(), -1), exponents.flatten()).view(floats.shape)
            for name, part in zip(names, rounded.view(len(names), -1), strict=True):
                self._looks.append((name, torch.stack(torch.aminmax(part)), rounded.dtype))
            made.append(replace(weights, tensors=(*codes, rounded)))
        return made[0], made[1]

    def _is_ignored(self, parts: Parts) -> bool:
        return any(module in self._ignored for module, _ in parts)

    def unpacked(self, module: str, out_features: int, in_features: int) -> Linear:
        dense = self._allocate((out_features, in_features), self.ops.dtype)
        self._fill_dense([(module, Span.of(out_features))], Span.of(in_features), dense)
        return dense_weights(dense)

    def head(self, embed: Linear, rows: Span) -> Linear:
        """lm_head. Tied models may store it too (the W4A16 releases do): a copy of the table shares its memory, a head
        with other values is used and warned of, as transformers does.
        """
        tied = rows_of_table(embed, rows)
        own = self.own_head(tied, rows)
        return tied if own is None else own

    def own_head(self, tied: Linear, rows: Span) -> Linear | None:
        """None where it is `tied`, those rows of the table."""
        made = self._own_head(tied, rows)
        return made if made is None or rows.is_whole else replace(made, rows=rows)

    def _own_head(self, tied: Linear, rows: Span) -> Linear | None:
        config, checkpoint = self.config, self.checkpoint
        stored, hidden = [("lm_head", rows)], Span.of(config.hidden_size)
        if not config.tied or self._find("lm_head", (rows.whole, hidden.whole)):
            return self.linear(stored, hidden)
        if "lm_head.weight" in checkpoint:
            self.used.add("lm_head.weight")
            checkpoint.require("lm_head.weight", (rows.whole, hidden.whole), FLOATS)
            is_copy = self.is_dry or (tied.is_dense and self._is_copy("lm_head.weight", tied.weight, (rows, hidden)))
            if not is_copy:
                warnings.warn(
                    f"{checkpoint.folder}: config.json says tie_word_embeddings, but lm_head.weight differs from "
                    "embed_tokens.weight; both are used as they are stored",
                    stacklevel=2,
                )
                return self.linear(stored, hidden)
        return None

    def experts(self, name: str, norm: Tensor) -> tuple[Experts, Experts]:
        """gate_up [E, 2 I, H] and down [E, H, I] of the layer `name`, prepared for the backend.

        Each stays packed where every expert's is, in a form that has each one's without loss; a mixture becomes dense.
        In fp16 as `mlp`.
        """
        inner, hidden = self.config.expert_span, Span.of(self.config.hidden_size)
        both = [
            self._stored_experts(f"{name}.experts", fused, parts, in_features)
            for fused, parts, in_features in (
                ("gate_up_proj", (("gate_proj", inner), ("up_proj", inner)), hidden),
                ("down_proj", (("down_proj", hidden),), inner),
            )
        ]
        packings = [stored.packing for stored in both]
        gate_up, down = (self._experts(stored, packings) for stored in both)
        gate_up, down = self._in_range(gate_up, down, norm, *(stored.floats for stored in both))
        if not self.is_dry:
            gate_up, down = self.ops.prepare_experts(gate_up, down)
        return gate_up, replace(down, is_summand=not inner.is_whole)

    def _stored_experts(self, name: str, fused: str, parts: Parts, in_features: Span) -> _StoredExperts:
        """One matrix an expert: a single tensor called `fused`, dense or packed, or linears that each expert has."""
        num, together = self.config.num_experts, f"{name}.{fused}"
        made = partial(_StoredExperts, parts, in_features)
        if together in self.checkpoint:
            return made([together], None, together=together)
        if packed := self._find(together, (num, sum(out.whole for _, out in parts), in_features.whole)):
            return made([packed.scales], packed.packing, packed=packed)
        each = [[(f"{name}.{e}.{part}", out) for part, out in parts] for e in range(num)]
        floats = [self._floats_of(module, out, in_features) for modules in each for module, out in modules]
        packing = joined_packing([p.packing if p else None for p in self._found(each, in_features)])
        return made(floats, packing, each=each)

    def _experts(self, stored: _StoredExperts, packings: Sequence[Packing | None]) -> Experts:
        """As they are stored, but for the type of floats. packings: of gate_up and of down, whose scales share it."""
        num, cols = self.config.num_experts, stored.in_features
        sizes, dtype = [out.size for _, out in stored.parts], self._mlp_dtype(*stored.floats)
        boxes = _under_each_other(stored.parts, Span.of(num))
        if len(boxes) == 1:
            sizes = [sum(sizes)]
        if stored.packing is None:
            dense = self._allocate((num, sum(sizes), cols.size), dtype)
            if stored.together is not None:
                for part, box in zip(dense.split(sizes, 1), boxes, strict=True):
                    self._copy(stored.together, part, FLOATS, box=(*box, cols))
            else:
                for modules, matrix in zip(stored.each, dense, strict=True):
                    self._fill_dense(modules, cols, matrix)
            return dense_weights(dense)
        made = self._allocate_packed(stored.packing, (num, sum(sizes)), cols.size, scale_dtype(dtype, *packings))
        if stored.packed is not None:
            for packed_part, box in zip(made.split(sizes), boxes, strict=True):
                self._copy_packed(stored.packed, packed_part, box, cols)
        else:
            for modules, packed_matrix in zip(stored.each, made.each(), strict=True):
                self._fill_packed(modules, cols, packed_matrix)
        return made.view(fused_name(stored.parts))

    def _find(self, module: str, shape: tuple[int, ...]) -> Packed | None:
        """As find_packed, looked at once."""
        if (module, shape) not in self._packed:
            stored = None if self.config.quant and self.config.quant.on_load else self.config.quant
            found = find_packed(self.checkpoint, stored, module, shape, self._ignored)
            self._packed[module, shape] = found
        return self._packed[module, shape]

    def _found(self, linears: Iterable[Parts], in_features: Span) -> list[Packed | None]:
        """How each of these modules is packed."""
        return [self._find(module, (out.whole, in_features.whole)) for parts in linears for module, out in parts]

    def _allocate_packed(self, packing: Packing, rows: tuple[int, ...], cols: int, dtype: torch.dtype) -> PackedTensors:
        """rows: all dimensions but the last. dtype: of scales and minima."""
        shape = (*rows, cols // packing.group_size)
        codes, each = codes_layout(packing)
        return PackedTensors(
            packing,
            self._allocate((*rows, cols // each), DTYPES[codes]),
            self._allocate(shape, dtype),
            self._allocate(shape, dtype) if packing.has_minima else None,
        )

    def _fill_packed(self, parts: Parts, in_features: Span, into: PackedTensors) -> None:
        """Fill `into` with the packed linears called `parts`, one under the other."""
        for (module, out), part in zip(parts, into.split([out.size for _, out in parts]), strict=True):
            if (packed := self._find(module, (out.whole, in_features.whole))) is None:
                raise TypeError(f"{module} is not packed")
            if packed.packing == into.packing:
                self._copy_packed(packed, part, (out,), in_features)
                continue
            own = self._allocate_packed(packed.packing, (out.size,), in_features.size, into.scales.dtype)
            self._copy_packed(packed, own, (out,), in_features)
            if not self.is_dry:
                part.take(own)

    def _copy_packed(self, packed: Packed, into: PackedTensors, rows: Box, cols: Span) -> None:
        """rows: the part of all dimensions but the last, of which `cols` is."""
        self.used |= packed.used
        group, (codes, each) = packed.packing.group_size, codes_layout(packed.packing)
        tensors = [(packed.codes, into.codes, each, (codes,)), (packed.scales, into.scales, group, FLOATS)]
        if packed.minima is not None and into.minima is not None:
            tensors.append((packed.minima, into.minima, group, FLOATS))
        wanted = [(name, out, dtypes, (*rows, cols.over(each))) for name, out, each, dtypes in tensors]
        self._copy_all(wanted, is_transposed=packed.is_transposed)

    def _fill_dense(self, parts: Parts, cols: Span, out: Tensor) -> None:
        """Fill `out` [rows, cols] with the linears called `parts`, unpacking those that are packed."""
        for (module, rows), part in zip(parts, out.split([n.size for _, n in parts]), strict=True):
            if (packed := self._find(module, (rows.whole, cols.whole))) is None:
                self._copy(f"{module}.weight", part, FLOATS, box=(rows, cols))
                continue
            dtype = scale_dtype(self._mlp_dtype(packed.scales), packed.packing)
            own = self._allocate_packed(packed.packing, (rows.size,), cols.size, dtype)
            self._copy_packed(packed, own, (rows,), cols)
            if not self.is_dry:
                part.copy_(own.dense(out.dtype))


@dataclass(frozen=True, slots=True)
class _StoredExperts:
    """How one matrix of every expert is stored. parts: what each is made of, one under the other. floats: the tensors
    that weights or scales come from, each as many rows as the next. packing: None where all become dense.

    together: a dense tensor of all experts, or packed: packed ones, or each: the modules of every expert.
    """

    parts: Parts
    in_features: Span
    floats: list[str]
    packing: Packing | None
    together: str | None = None
    packed: Packed | None = None
    each: Sequence[Parts] = ()


def _under_each_other(parts: Parts, first: Span) -> list[tuple[Span, Span]]:
    """Where the parts' rows lie in one tensor that has all of them behind each other, `first` being of the dimension
    before; as few boxes as will do.
    """
    whole = sum(out.whole for _, out in parts)
    if all(out.is_whole for _, out in parts):
        return [(first, Span.of(whole))]
    found, before = [], 0
    for _, out in parts:
        found.append((first, out.after(before, whole)))
        before += out.whole
    return found


def fused_name(parts: Parts) -> str:
    """What a matrix made of these modules is called: "gate_proj+up_proj"."""
    return "+".join(module.rpartition(".")[2] for module, _ in parts)
