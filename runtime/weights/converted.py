"""Checkpoints whose packed matrices lie in another order than loading takes: they are converted as they are read.

Of a module there are `weight_packed`, `weight_scale` and, with zero points, `weight_minimum`, as `find_packed` names
them. A stored code n stands for (n - zero) * scale: codes of 8 bits become n - 128, the minimum is what 0 stands for
then, and a scale of a whole row is given to groups of it.

compressed-tensors (vllm-project/compressed-tensors, compressors/pack_quantized): weight_packed int32 [out, in / e], e =
32 / bits elements in a word, the lowest first; weight_scale [out, groups]; weight_zero_point int32 [out / e, groups].
GPTQ (ModelCloud/GPTQModel): qweight int32 [in / e, out], scales [groups, out], qzeros int32 [groups, out / e].
AWQ (casper-hansen/AutoAWQ, gemm): qweight int32 [in, out / 8], scales and qzeros as GPTQ's; in a word elements are 0,
2, 4, 6, 1, 3, 5, 7, the lowest first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kerngen.errors import CheckpointError
from kerngen.runtime.quant import Scheme
from kerngen.runtime.weights.mapped import DTYPES, PIECE_BYTES, Box, Entry, MappedFile
from kerngen.runtime.weights.packed import codes_layout
from kerngen.runtime.weights.quantized import FLOATS, INTS, require_neighbours
from kerngen.runtime.weights.safetensors import Checkpoint
from kerngen.runtime.world import Span
from kerngen.templates.common.w4.pack import pack_nibbles, rounded_scales

_AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # where in a word the elements are
_CODES, _SCALES, _MINIMA = "weight_packed", "weight_scale", "weight_minimum"


@dataclass(frozen=True, slots=True)
class Module:
    """A packed module [out_features, in_features] by the names of its tensors. zeros: None where it has no such tensor.

    used: all that are stored of it. group_size: inputs that share a stored scale.
    """

    name: str
    out_features: int
    in_features: int
    group_size: int
    codes: str
    scales: str
    zeros: str | None
    used: frozenset[str]


@dataclass(frozen=True, slots=True)
class _Made(Entry):
    """A tensor that is made of a module's."""

    module: Module
    part: str


class ConvertedCheckpoint(Checkpoint):
    """`base` with its modules of `scheme` as loading takes them. Raises CheckpointError where their tensors contradict
    each other or the scheme.
    """

    def __init__(self, base: Checkpoint, scheme: Scheme) -> None:
        self.folder = base.folder
        self._base = base
        modules = [_module(base, scheme, name) for name in _packed_names(base, scheme)]
        self._made = _Tensors(base, scheme, modules)
        hidden = frozenset().union(*(module.used for module in modules))
        self._files: dict[str, MappedFile] = {n: f for n, f in base.files_by_name.items() if n not in hidden}
        if both := self._made.entries.keys() & self._files.keys():
            raise CheckpointError(f"{self.folder} has {sorted(both)[0]}, and the same packed")
        self._files |= dict.fromkeys(self._made.entries, self._made)

    @property
    def files(self) -> list[MappedFile]:
        return self._base.files

    def path(self, name: str) -> Path:
        entry = self._files[name].entries[name]
        return self._base.path(entry.module.codes) if isinstance(entry, _Made) else self._base.path(name)

    def said(self, used: Iterable[str], dtype: torch.dtype) -> list[str]:
        if not self._made.num_inexact or dtype == torch.float32:
            return []
        return [f"{self.folder}: {self._made.num_inexact:,} of {self._made.num_floats:,} scales and minima "
                "are no float16 and were rounded"]  # fmt: skip


class _Tensors(MappedFile):
    """What is made of the modules' tensors."""

    def __init__(self, base: Checkpoint, scheme: Scheme, modules: list[Module]) -> None:
        self.path, self._base, self._scheme = base.folder, base, scheme
        self.num_floats = self.num_inexact = 0  # scales and minima that were read, and those that fp16 rounds
        self.entries: Mapping[str, Entry] = {
            f"{module.name}.{entry.part}": entry for module in modules for entry in self._entries(module)
        }

    def _entries(self, module: Module) -> Iterator[_Made]:
        packing, out, columns = self._scheme.packing, module.out_features, module.in_features
        dtype, each = codes_layout(packing)
        made = [(_CODES, dtype, columns // each), (_SCALES, "F32", columns // packing.group_size)]
        if packing.has_minima:
            made.append((_MINIMA, "F32", columns // packing.group_size))
        for part, kind, width in made:
            yield _Made(kind, (out, width), 0, out * width * DTYPES[kind].itemsize, module, part)

    def tensor(self, name: str) -> Tensor:
        return torch.cat([piece for _, piece in self.pieces(name)])

    def pieces(self, name: str, rows: int = 1, box: Box = ()) -> Iterator[tuple[int, Tensor]]:
        entry = self.entries[name]
        if not isinstance(entry, _Made):
            raise TypeError(f"{name} is made of nothing")
        out, width = box or tuple(Span.of(n) for n in entry.shape)
        step = max(8, PIECE_BYTES // max(4 * entry.module.in_features, 1) // 8 * 8, -(-rows // 8) * 8)
        for begin in range(out.start, out.stop, step):
            part = slice(begin, min(begin + step, out.stop))
            yield begin - out.start, self._part(entry.module, entry.part, part, width.slice)

    def _part(self, module: Module, part: str, rows: slice, width: slice) -> Tensor:
        """Those rows, and those columns of the made tensor's."""
        bits = self._scheme.bits
        if part == _CODES:
            _, each = codes_layout(self._scheme.packing)
            codes = self._codes(module, rows, slice(width.start * each, width.stop * each))
            return pack_nibbles(codes) if bits == 4 else (codes ^ 128).view(torch.int8)
        scales, zeros = self._groups(module, rows)
        found = scales if part == _SCALES else (128.0 * (bits == 8) - zeros) * scales
        self.num_floats += found.numel()
        self.num_inexact += int(rounded_scales(found, torch.float16)[1])
        return found.repeat_interleave(module.group_size // self._scheme.packing.group_size, 1)[:, width]

    def _codes(self, module: Module, rows: slice, columns: slice) -> Tensor:
        """uint8 [rows, columns], below 2^bits."""
        bits, stored = self._scheme.bits, self._base.tensor(module.codes)
        each = 32 // bits
        if self._scheme.order == "compressed":
            words, within = _whole_words(columns, each)
            return _unpacked(stored[rows, words], bits)[:, within]
        if self._scheme.order == "gptq":
            words, within = _whole_words(columns, each)
            return _unpacked(stored[words, rows].T, bits)[:, within]
        words, within = _whole_words(rows, each)
        return _in_order(_unpacked(stored[columns, words], bits))[:, within].T

    def _groups(self, module: Module, rows: slice) -> tuple[Tensor, Tensor]:
        """Scales and zero points, fp32 [rows, groups of the module]. Raises CheckpointError for a zero point that tools
        do not agree on, and for one that a symmetric scheme has not.
        """
        scheme, base = self._scheme, self._base
        is_compressed = scheme.order == "compressed"
        scales = base.tensor(module.scales)
        scales = (scales[rows] if is_compressed else scales[:, rows].T).float()
        middle = 1 << scheme.bits - 1
        if module.zeros is None:
            return scales, torch.full_like(scales, middle)
        words, within = _whole_words(rows, 32 // scheme.bits)
        stored = base.tensor(module.zeros)
        zeros = _unpacked(stored[words].T if is_compressed else stored[:, words], scheme.bits)
        zeros = (_in_order(zeros) if scheme.order == "awq" else zeros)[:, within].T
        where, most = f"{base.path(module.zeros)}: {module.zeros}", 2 * middle - 1
        if scheme.less and scheme.has_zeros and bool((zeros == most).any()):
            raise CheckpointError(f"{where} holds {most}, which tools read as a zero point of {most + 1} or of 0",
                                  hint="store it in checkpoint_format gptq_v2")  # fmt: skip
        if not scheme.has_zeros and not bool((zeros == middle - scheme.less).all()):
            raise CheckpointError(f"{where} holds other zeros than {middle - scheme.less}, and config.json says that "
                                  "weights are symmetric")  # fmt: skip
        return scales, zeros.float() + scheme.less


def _packed_names(base: Checkpoint, scheme: Scheme) -> list[str]:
    end = ".weight_packed" if scheme.order == "compressed" else ".qweight"
    return sorted(name.removesuffix(end) for name in base.names if name.endswith(end))


def _module(base: Checkpoint, scheme: Scheme, name: str) -> Module:
    """Raises CheckpointError where its tensors are not what the scheme says."""
    each, is_compressed = 32 // scheme.bits, scheme.order == "compressed"
    parts = ("weight_packed", "weight_scale", "weight_zero_point") if is_compressed else ("qweight", "scales", "qzeros")
    codes, scales, zeros = (f"{name}.{part}" for part in parts)
    stored = base.shape(codes)
    where = f"{base.folder}: {name}"
    if len(stored) != 2:
        raise CheckpointError(f"{where} has codes of the shape {list(stored)}; with zero points, of 8 bits or by row "
                              "matrices are read one by one", hint="experts must be stored apart")  # fmt: skip
    out, columns = {
        "compressed": (stored[0], stored[1] * each), "gptq": (stored[1], stored[0] * each),
        "awq": (stored[1] * each, stored[0]),
    }[scheme.order]  # fmt: skip
    group = scheme.group_size or columns
    if not out or not columns or out % each or columns % group or columns % scheme.packing.group_size:
        raise CheckpointError(f"{where} is {out} x {columns}; its inputs must be a multiple of "
                              f"{scheme.packing.group_size}, and its outputs of {each}")  # fmt: skip
    groups = columns // group
    base.require(codes, stored, ("I32",))
    base.require(scales, (out, groups) if is_compressed else (groups, out), FLOATS)
    used = {codes, scales}
    has_zeros = scheme.has_zeros or (not is_compressed and zeros in base)
    if has_zeros:
        base.require(zeros, (out // each, groups) if is_compressed else (groups, out // each), ("I32",))
        used.add(zeros)
    elif zeros in base:
        raise CheckpointError(f"{where} has {zeros}, and config.json says that weights are symmetric")
    if (order := f"{name}.{'weight_g_idx' if is_compressed else 'g_idx'}") in base:
        require_neighbours(base, order, columns, group)
        used.add(order)
    if is_compressed and (shape := f"{name}.weight_shape") in base:
        base.require(shape, (2,), INTS)
        if (said := base.tensor(shape).tolist()) != [out, columns]:
            raise CheckpointError(f"{base.folder}: {shape} says {said}; {codes} is {out} x {columns}")
        used.add(shape)
    return Module(name, out, columns, group, codes, scales, zeros if has_zeros else None, frozenset(used))


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """uint8 [..., n * 32 / bits] of int32 [..., n], the lowest first."""
    codes = words.contiguous().view(torch.uint8)
    return codes if bits == 8 else torch.stack((codes & 15, codes >> 4), -1).flatten(-2)


def _in_order(codes: Tensor) -> Tensor:
    """What AWQ has in its own order."""
    return codes.unflatten(-1, (-1, 8))[..., _AWQ_ORDER].flatten(-2)


def _whole_words(part: slice, each: int) -> tuple[slice, slice]:
    """The words of `each` elements that have those of `part`, and where in their elements these are."""
    first = part.start // each
    return slice(first, -(-part.stop // each)), slice(part.start - first * each, part.stop - first * each)
