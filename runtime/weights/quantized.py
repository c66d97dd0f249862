"""int4 matrices as they are stored: which tensors a module has, and whether they are what config.json says.

compressed-tensors (vllm-project/compressed-tensors, compressors/pack_quantized): for a linear [out, in] weight_packed
int32 [out, in / 8] with element j of a row in word j / 8, bits 4 * (j % 8); weight_scale [out, in / group_size];
weight_shape, the numbers out and in. A nibble n stands for n - 8. All experts of a layer may be one tensor of each with
a leading dimension, called gate_up_proj.weight_packed or gate_up_proj_packed.

GPTQ (ModelCloud/GPTQModel): qweight int32 [in / 8, out] with elements 8 i to 8 i + 7 of column o in word [i, o], lowest
first; scales [in / group_size, out]; qzeros, the nibble of 0 for each group and output; g_idx [in], each input's group.
A word is the very word of compressed-tensors, so the first is the second transposed.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kerngen.errors import CheckpointError
from kerngen.runtime.quant import QuantConfig
from kerngen.runtime.weights.packed import codes_layout
from kerngen.runtime.weights.safetensors import Checkpoint
from kerngen.templates.common.w4.tiling import Packing

FLOATS = ("BF16", "F16", "F32")
INTS = ("I64", "I32")
MAX_MATCH_S = 5.0  # that all of a checkpoint's regular expressions may take together
MAX_STEPS = 4_000_000  # of one expression on one name, some 50 ms; so that the deadline is looked at in between
NAME_CHARS = 64  # that the longest module of a text model has
_COMPLEX = re.compile(r"\(\?(?!:)|\\\d|\)[*+{]|\{")  # look-around, back references, a group that repeats, counts


@dataclass(frozen=True, slots=True)
class Packed:
    """A packed matrix [out, in], or one an expert [E, out, in], by the names of its tensors.

    codes: int32 [out, in / 8], or int8 [out, in]. minima: None where it has none. is_transposed: stored [in, out].
    used: all tensors that belong to it.
    """

    packing: Packing
    codes: str
    scales: str
    minima: str | None
    is_transposed: bool
    used: frozenset[str]


class IgnoreList:
    """quantization_config's `ignore`: module names, and "re:" with a regular expression for re.match.

    A checkpoint is untrusted, and a regular expression may take for ever. Those of bounded cost are matched, under a
    deadline for all of them together; `strict` raises CheckpointError for others, and else they match nothing: where
    there are weights, what is stored says more.
    """

    def __init__(self, patterns: Sequence[str], *, strict: bool) -> None:
        self._names = {p for p in patterns if not p.startswith("re:")}
        self._expressions: list[re.Pattern[str]] = []
        self._spent_s = 0.0
        for pattern in patterns:
            if pattern.startswith("re:"):
                try:
                    if _steps(pattern[3:]) <= MAX_STEPS:
                        self._expressions.append(re.compile(pattern[3:]))
                        continue
                except (re.error, RecursionError, OverflowError) as e:
                    raise CheckpointError(f"quantization_config: ignore holds {pattern!r}: {e}") from e
                if strict:
                    raise CheckpointError(
                        f"quantization_config: ignore holds {pattern!r}, which may take for ever to match",
                        hint="write it without repeated groups, counts, look-around and many of *, + and ?",
                    )

    def __contains__(self, module: str) -> bool:
        if module in self._names:
            return True
        began = time.perf_counter()
        found = any(expression.match(module) for expression in self._expressions)
        self._spent_s += time.perf_counter() - began
        if self._spent_s > MAX_MATCH_S:
            raise CheckpointError(
                f"quantization_config: ignore's {len(self._expressions)} regular expressions took more than "
                f"{MAX_MATCH_S:g} s to match"
            )
        return found


def _steps(expression: str) -> float:
    """At most how many ways a backtracking matcher may try on a module's name; infinite where that is hard to say.

    Each * and + may end at any character, each ? is there or not, each group has its alternatives.
    """
    plain = re.sub(r"\\[^\d]", "x", expression)  # escaped characters, and then classes, are single ones
    plain = re.sub(r"\[\^?\]?[^\]]*\]", "x", plain)
    if _COMPLEX.search(plain):
        return math.inf
    plain = re.sub(r"([*+?])\?", r"\1", plain.replace("(?:", "("))  # a lazy one tries no more than a greedy one
    steps = float(NAME_CHARS ** (plain.count("*") + plain.count("+")) * 2 ** min(plain.count("?"), 64))
    alternatives = [1]
    for char in plain:
        if char == "(":
            alternatives.append(1)
        elif char == "|":
            alternatives[-1] += 1
        elif char == ")" and len(alternatives) > 1:
            steps *= alternatives.pop()
    return steps * math.prod(alternatives)


def find_packed(
    checkpoint: Checkpoint, quant: QuantConfig | None, module: str, shape: tuple[int, ...], ignored: IgnoreList
) -> Packed | None:
    """The int4 tensors of `module`, whose matrix is `shape` ([out, in], or [E, out, in] of all experts), or None where
    it has none.

    Raises CheckpointError where they contradict config.json, by their headers and by the few numbers that say how they
    are to be read.
    """
    gptq = f"{module}.qweight" in checkpoint
    joined = ("." if f"{module}.weight_packed" in checkpoint else "_") if len(shape) == 3 else "."
    stem = f"{module}.weight" if joined == "." else module
    if not gptq and f"{stem}_packed" not in checkpoint:
        return None
    where = f"{checkpoint.folder}: {module}"
    if quant is None:
        raise CheckpointError(f"{where} is packed, but config.json has no quantization_config")
    if gptq != (quant.gptq is not None):
        has, says = ("qweight", "compressed-tensors") if gptq else (f"{stem}_packed", "gptq")
        raise CheckpointError(f"{where} has a tensor {has}, but quantization_config says {says}")
    if module in ignored:
        raise CheckpointError(f"{where} is packed, but quantization_config ignores it")
    if quant.packings is not None or quant.scheme is not None:
        return _find_named(checkpoint, quant, module, stem, shape)
    if gptq and len(shape) == 2:
        return _find_gptq(checkpoint, quant, module, (shape[0], shape[1]))
    return _find_compressed(checkpoint, quant, module, stem, shape)


def _find_compressed(
    checkpoint: Checkpoint, quant: QuantConfig, module: str, stem: str, shape: tuple[int, ...]
) -> Packed:
    where = f"{checkpoint.folder}: {module}"
    for extra in ("zero_point", "g_idx"):
        if f"{stem}_{extra}" in checkpoint:
            raise CheckpointError(f"{where}: {stem}_{extra} belongs to a scheme that is not implemented")
    words, scales, stored_shape = (f"{stem}_{part}" for part in ("packed", "scale", "shape"))
    group = _group_size(checkpoint, quant, module, scales, shape[-1], dim=len(shape) - 1)
    checkpoint.require(words, (*shape[:-1], shape[-1] // 8), ("I32",))
    checkpoint.require(scales, (*shape[:-1], shape[-1] // group), FLOATS)
    used = {words, scales}
    if stored_shape in checkpoint:
        checkpoint.require(stored_shape, (len(shape),), INTS)
        stored = tuple(checkpoint.tensor(stored_shape).tolist())
        if stored != shape:
            raise CheckpointError(f"{checkpoint.folder}: {stored_shape} says {stored}; config.json implies {shape}")
        used.add(stored_shape)
    return Packed(Packing(group), words, scales, None, is_transposed=False, used=frozenset(used))


def _find_named(checkpoint: Checkpoint, quant: QuantConfig, module: str, stem: str, shape: tuple[int, ...]) -> Packed:
    """Of tensors that are made to fit (gguf/weights.py, converted.py), or were (conversion.py)."""
    if (packing := quant.packing_of(module)) is None:
        raise CheckpointError(f"{checkpoint.folder}: {module} is packed, and {checkpoint.said_by} does not name it")
    codes, scales, minima = (f"{stem}_{part}" for part in ("packed", "scale", "minimum"))
    (dtype, each), groups = codes_layout(packing), shape[-1] // packing.group_size
    checkpoint.require(codes, (*shape[:-1], shape[-1] // each), (dtype,))
    names = [scales, minima] if packing.has_minima else [scales]
    for name in names:
        checkpoint.require(name, (*shape[:-1], groups), FLOATS)
    used = frozenset((codes, *names))
    return Packed(packing, codes, scales, minima if packing.has_minima else None, is_transposed=False, used=used)


def _find_gptq(checkpoint: Checkpoint, quant: QuantConfig, module: str, shape: tuple[int, int]) -> Packed:
    if (gptq := quant.gptq) is None:
        raise TypeError("only a GPTQ checkpoint has a qweight")
    out, cols = shape
    words, scales, zeros, order = (f"{module}.{part}" for part in ("qweight", "scales", "qzeros", "g_idx"))
    group = _group_size(checkpoint, quant, module, scales, cols, dim=0)
    if out % 8:
        raise CheckpointError(f"{checkpoint.folder}: {module} has {out} outputs; GPTQ stores their zeros by eights")
    checkpoint.require(words, (cols // 8, out), ("I32",))
    checkpoint.require(scales, (cols // group, out), FLOATS)
    checkpoint.require(zeros, (cols // group, out // 8), ("I32",))
    if not _is_all(checkpoint.tensor(zeros), gptq.zero * 0x11111111):
        raise CheckpointError(
            f"{checkpoint.folder}: {zeros} holds other zeros than {gptq.zero}: the weights are not symmetric",
            hint="only symmetric GPTQ checkpoints are read",
        )
    used = {words, scales, zeros}
    if order in checkpoint:
        require_neighbours(checkpoint, order, cols, group)
        used.add(order)
    elif gptq.act_order:
        raise CheckpointError(f"{checkpoint.folder}: desc_act is true, and {order}, which says of what, is missing")
    return Packed(Packing(group), words, scales, None, is_transposed=True, used=frozenset(used))


def require_neighbours(checkpoint: Checkpoint, order: str, cols: int, group: int) -> None:
    """Raises CheckpointError unless the tensor `order`, each input's group, says that groups are of neighbours."""
    checkpoint.require(order, (cols,), INTS)
    if not torch.equal(checkpoint.tensor(order).long(), torch.arange(cols) // group):
        raise CheckpointError(
            f"{checkpoint.folder}: {order} says that groups are not of neighbouring inputs (desc_act)",
            hint="only checkpoints without activation order are read",
        )


def _group_size(checkpoint: Checkpoint, quant: QuantConfig, module: str, scales: str, cols: int, *, dim: int) -> int:
    """What the shape of its scales says, if that is one of the config's; else the config's, which then does not fit."""
    stored = checkpoint.shape(scales) if scales in checkpoint else ()
    count = stored[dim] if dim < len(stored) else 0
    if count and cols % count == 0 and cols // count in quant.other_sizes:
        return cols // count
    if cols % quant.group_size:
        raise CheckpointError(
            f"{checkpoint.folder}: {module} has {cols} inputs, not a multiple of group_size {quant.group_size}"
        )
    return quant.group_size


def _is_all(words: Tensor, want: int) -> bool:
    """Whether every int32 of `words` has the bits of `want`."""
    signed = want - (1 << 32) if want >= 1 << 31 else want
    return words.numel() == 0 or [int(v) for v in torch.aminmax(words)] == [signed, signed]
