"""The tensors of a GGUF file as a checkpoint's: by transformers' names, in the dtypes and orders that loading takes.

A matrix that kernels multiply as it is packed is a `weight_packed`, a `weight_scale` and, where its groups have minima,
a `weight_minimum`, made of the blocks as they are read (ggml_types.PACKINGS): 4 bits in compressed-tensors' order, 8
as int8. What kernels multiply with is several of these, as q, k and v; where one of them is of floats all are dense.
So is the embedding, which is the output head, too.
Whatever else is quantised is dense fp32, of which loading makes the run's dtype. Blocks go to the device as they are
stored, and are decoded there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from kerngen.runtime.gguf.blocks import FLOAT_TYPES, decode, q4_0_words, take_apart
from kerngen.runtime.gguf.container import GgufFile, TensorInfo, open_gguf
from kerngen.runtime.gguf.ggml_types import PACKINGS
from kerngen.runtime.gguf.names import EMBEDDING, Place, packings, placed
from kerngen.runtime.weights.mapped import DTYPES, Box, Decode, Entry, Made, MappedFile
from kerngen.runtime.weights.packed import codes_layout
from kerngen.runtime.weights.safetensors import Checkpoint
from kerngen.runtime.world import Span
from kerngen.templates.common.w4.pack import pack_nibbles, rounded_scales

MAX_EXPERTS = 4096
_PIECES = 8  # of PIECE_BYTES: what is decoded at a time stays in a core's cache
_VALUES, _CODES, _SCALES, _MINIMA = "values", "codes", "scales", "minima"
_AS_STORED = {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL"}  # blocks begin with fp16: a scale, and a minimum


@dataclass(frozen=True, slots=True)
class Stored(Entry):
    """A tensor, or a part of one, that blocks of `info` are made into. start: byte in the file. scales_in: what its
    scales and minima are kept in, at least where activations are in bf16.
    """

    info: TensorInfo
    part: str
    scales_in: torch.dtype

    @property
    def unit(self) -> int:
        """Elements of a row that are one of the tensor's."""
        return _unit(self.info.type.name, self.part)


class GgufTensors(MappedFile):
    """The tensors of one file."""

    def __init__(self, file: GgufFile, entries: dict[str, Entry]) -> None:
        self.path, self.stat, self.digest = file.path, file.stat, file.digest
        self.entries = entries
        # Of what was read, scales and minima: of Q4_0's matrices, and how many bf16 would round; of others, and fp16.
        # Counts stay where they were made until they are told: waiting for each would stop what is on its way there.
        self.num_scales = [0, 0]
        self._inexact: tuple[list[Tensor], list[Tensor]] = ([], [])
        self._keep(file.map)

    def tensor(self, name: str) -> Tensor:
        if not isinstance(self.entries[name], Stored):
            return super().tensor(name)
        return torch.cat([piece for _, piece in self.pieces(name)])

    def pieces(self, name: str, rows: int = 1, box: Box = ()) -> Iterator[tuple[int, Tensor]]:
        if not isinstance(self.entries[name], Stored):
            yield from super().pieces(name, rows, box)
            return
        for row, raw, made_of in self.stored_pieces(name, box, rows):
            yield row, raw if made_of is None else made_of(raw)

    def stored_pieces(self, name: str, box: Box = (), rows: int = 1) -> Iterator[tuple[int, Tensor, Decode | None]]:
        """Blocks [rows, ..., blocks, bytes], all that the box has a part of, and what decodes them."""
        entry = self.entries[name]
        if not isinstance(entry, Stored):
            yield from super().stored_pieces(name, box)
            return
        for row, raw in self._blocks(entry, box, rows):
            yield row, raw, partial(self._made, entry, _within(entry, box))

    def parts_of_blocks(self, wanted: Sequence[tuple[str, Box]]) -> Iterator[tuple[int, Tensor, Made]] | None:
        """As Checkpoint.stored_together, where all are codes, scales and minima of the same blocks; else None."""
        stored = [entry for name, _ in wanted if isinstance(entry := self.entries.get(name), Stored)]
        if len(stored) < len(wanted) or len({(entry.start, entry.info.start) for entry in stored}) > 1:
            return None
        made = [
            (index, partial(self._made, entry, _within(entry, box)))
            for index, (entry, (_, box)) in enumerate(zip(stored, wanted, strict=True))
        ]
        largest = max(range(len(stored)), key=lambda index: stored[index].num_bytes)
        return ((row, raw, made) for row, raw in self._blocks(stored[largest], wanted[largest][1]))

    def _blocks(self, entry: Stored, box: Box, rows: int = 1) -> Iterator[tuple[int, Tensor]]:
        """(first row, blocks [rows, ..., blocks, bytes]), all that the box has a part of."""
        kind, inner = entry.info.type, entry.shape[1:-1]
        row_blocks = entry.shape[-1] * entry.unit // kind.block
        first, last = _span_of_blocks(entry, box)
        inside = (*(span.slice for span in box[1:-1]), slice(first, last)) if box else (..., slice(first, last))
        stored_bytes = prod(inner) * row_blocks * kind.block_bytes
        made_bytes = max(entry.num_bytes // entry.shape[0], stored_bytes) * _PIECES
        for row, start, stop in self._steps(entry, stored_bytes, made_bytes, rows, box):
            yield row, self._bytes[start:stop].view(-1, *inner, row_blocks, kind.block_bytes)[:, *inside, :]

    def _made(self, entry: Stored, within: slice, raw: Tensor) -> Tensor:
        kind, part = entry.info.type.name, entry.part
        if part == _VALUES:
            return decode(kind, raw)[..., within]
        if part == _CODES:
            return _codes(kind, raw)[..., within]
        if kind in _AS_STORED:
            found = raw.contiguous().view(torch.float16)[..., int(part == _MINIMA)]
        else:
            found = getattr(take_apart(kind, raw), part)
        found, which = found[..., within], entry.scales_in == torch.float16
        self.num_scales[which] += found.numel()
        self._inexact[which].append(rounded_scales(found, entry.scales_in)[1])
        return found

    @property
    def num_inexact(self) -> list[int]:
        return [int(torch.stack(counts).sum()) if counts else 0 for counts in self._inexact]


class GgufCheckpoint(Checkpoint):
    """All tensors of a GGUF model. Raises CheckpointError for a tensor that Gemma-4 has not, and for a type that is not
    read.
    """

    said_by = "metadata"

    def __init__(self, place: Path) -> None:
        self.folder = place
        self._model = open_gguf(place)
        found = placed(self._model)
        packed = packings(self._model, found)
        self._files: dict[str, MappedFile] = {}
        for file in self._model.files:
            entries: dict[str, Entry] = {}
            for name, info in file.tensors.items():
                if (where := found.get(name)) is not None:
                    for made, entry in _entries(file, name, where, info, where.module in packed):
                        if made in entries or made in self._files:
                            raise file.error(f"{name} is there under another name, too, as {made}")
                        entries[made] = entry
            self._files |= dict.fromkeys(entries, GgufTensors(file, entries))

    @property
    def config_digest(self) -> str:
        return self._model.digest

    def stored_together(self, wanted: Sequence[tuple[str, Box]]) -> Iterator[tuple[int, Tensor, Made]]:
        file = self._files[wanted[0][0]]
        found = file.parts_of_blocks(wanted) if isinstance(file, GgufTensors) else None
        return super().stored_together(wanted) if found is None else found

    def num_bytes(self, name: str) -> int:
        """In the file: codes have all of their blocks', scales and minima none."""
        entry = self._files[name].entries[name]
        if not isinstance(entry, Stored):
            return entry.num_bytes
        kind, num_values = entry.info.type, prod(entry.shape) * entry.unit
        return num_values // kind.block * kind.block_bytes if entry.part in (_VALUES, _CODES) else 0

    def beside(self, name: str) -> Path:
        return self.folder.with_name(f"{self.folder.stem}.{name}")

    def is_decoded(self, name: str) -> bool:
        entry = self._files[name].entries[name]
        return isinstance(entry, Stored) and entry.part == _VALUES

    def said(self, used: Iterable[str], dtype: torch.dtype) -> list[str]:
        """What became of the file's quantised tensors, in lines for people: which were decoded and take how many bytes
        in `dtype`, which stay packed, and how many scales and minima are rounded. used: names of what was loaded.
        """
        kept: dict[tuple[Path, int], str] = {}  # by where a tensor lies: experts are parts of one
        made: dict[tuple[Path, int], str] = {}
        made_bytes = 0
        for name in used:
            file = self._files[name]
            entry = file.entries[name]
            if isinstance(entry, Stored):
                (made if entry.part == _VALUES else kept)[file.path, entry.info.start] = entry.info.type.name
                made_bytes += prod(entry.shape) * dtype.itemsize if entry.part == _VALUES else 0
        kind, words, lines = str(dtype).removeprefix("torch."), [], []
        if made:
            words.append(f"decoded to {kind}, which takes {made_bytes / 1e9:.2f} GB: {_counted(made.values())}")
        if kept:
            words.append(f"kept as they are: {_counted(kept.values())}")
        if words:
            lines.append(f"{self.folder.name}: {'; '.join(words)}")
        files = [file for file in self.files if isinstance(file, GgufTensors)]
        for which, (kinds, whom, way_on) in enumerate((
            ((torch.bfloat16,), "scales of Q4_0 are no bfloat16", "; --dtype fp16 keeps them"),
            ((torch.bfloat16, torch.float16), "scales and minima are no float16", ""),
        )):  # fmt: skip
            inexact, count = (sum(n[which] for n in each) for each in
                              ((f.num_inexact for f in files), (f.num_scales for f in files)))  # fmt: skip
            if inexact and dtype in kinds:
                lines.append(f"{self.folder.name}: {inexact:,} of {count:,} {whom} and were rounded{way_on}")
        return lines


def _span_of_blocks(entry: Stored, box: Box) -> tuple[int, int]:
    """The blocks of a row that the box has a part of: first, and behind the last."""
    cols, unit, block = box[-1] if box else Span.of(entry.shape[-1]), entry.unit, entry.info.type.block
    return cols.start * unit // block, -(-cols.stop * unit // block)


def _within(entry: Stored, box: Box) -> slice:
    """The elements of those blocks that are in the box."""
    cols = box[-1] if box else Span.of(entry.shape[-1])
    before = _span_of_blocks(entry, box)[0] * entry.info.type.block // entry.unit
    return slice(cols.start - before, cols.stop - before)


def _codes(kind: str, raw: Tensor) -> Tensor:
    """As `take_apart` and kernels have them: int8 [..., K], or int32 [..., K / 8] with eight of 4 bits."""
    if kind == "Q4_0":
        return q4_0_words(raw)
    codes = take_apart(kind, raw).codes
    return codes if PACKINGS[kind].bits == 8 else pack_nibbles(codes.view(torch.uint8))


def _unit(kind: str, part: str) -> int:
    """Elements of a row that are one of the tensor's."""
    if part == _VALUES:
        return 1
    return codes_layout(PACKINGS[kind])[1] if part == _CODES else PACKINGS[kind].group_size


def _counted(types: Iterable[str]) -> str:
    """ "tensors 30 of Q4_K, 1 of Q6_K"."""
    each = [f"{count} of {name}" for name, count in sorted(Counter(types).items(), key=lambda t: (-t[1], t[0]))]
    return f"tensors {', '.join(each)}"


def _entries(file: GgufFile, name: str, where: Place, info: TensorInfo, is_packed: bool) -> Iterator[tuple[str, Entry]]:
    """What is there in place of a tensor, by name."""
    if "*" not in where.name:
        yield from _stored(file, name, where.name, info, info.shape, info.start, is_packed)
        return
    if len(info.shape) != 3 or info.shape[0] > MAX_EXPERTS:
        raise file.error(
            f"{name} has the shape {list(info.shape)}; experts have 3 dimensions, the first up to {MAX_EXPERTS:,}"
        )
    each = info.num_bytes // info.shape[0]
    for expert in range(info.shape[0]):
        named = where.name.replace("*", str(expert))
        yield from _stored(file, name, named, info, info.shape[1:], info.start + expert * each, is_packed)


def _stored(
    file: GgufFile, name: str, named: str, info: TensorInfo, shape: tuple[int, ...], start: int, is_packed: bool
) -> Iterator[tuple[str, Entry]]:
    if info.type.name in FLOAT_TYPES:
        yield named, Entry(info.type.name, shape, start, prod(shape) * info.type.block_bytes)
        return
    if len(shape) < 2:
        raise file.error(f"{name} is {info.type.name} of one dimension; only matrices are read quantised")
    module = named.removesuffix(".weight")
    kind = info.type.name
    scales_in = torch.bfloat16 if kind == "Q4_0" and named != EMBEDDING else torch.float16
    parts = [(named, _VALUES)]
    if is_packed:
        parts = [(f"{module}.weight_packed", _CODES), (f"{module}.weight_scale", _SCALES)]
        parts += [(f"{module}.weight_minimum", _MINIMA)] * PACKINGS[kind].has_minima
    for what, part in parts:
        made = (*shape[:-1], shape[-1] // _unit(kind, part))
        dtype = "F32"
        if part == _CODES:
            dtype, _ = codes_layout(PACKINGS[kind])
        elif part != _VALUES and kind in _AS_STORED:
            dtype = "F16"
        yield what, Stored(dtype, made, start, prod(made) * DTYPES[dtype].itemsize, info, part, scales_in)
