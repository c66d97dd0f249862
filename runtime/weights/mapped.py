"""Tensors that lie in a memory-mapped file, whatever its format: views of it, and pieces on their way to the device."""

from __future__ import annotations

import mmap
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kerngen.errors import CheckpointError
from kerngen.runtime.world import Span

PIECE_BYTES = 32 * 1024 * 1024  # of a tensor on its way to the device
DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

Box = Sequence[Span]  # part of a tensor: a span of each of its dimensions
Decode = Callable[[Tensor], Tensor]  # values of what is stored, on the device where that lies; as many rows
Made = Sequence[tuple[int, Decode | None]]  # of a piece: numbers of tensors, and what makes their values of it


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor as it is asked for. start: byte offset in the file; num_bytes: of its values in `dtype`."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


class MappedFile:
    """One file, mapped. `entries` is verified; tensors are views of the map until they are copied.

    digest: SHA-256 of the header, in hex. stat: of the file when it was opened.
    """

    path: Path
    stat: os.stat_result
    digest: str
    entries: Mapping[str, Entry]

    def _keep(self, mapped: mmap.mmap) -> None:
        self._map = mapped
        self._bytes = _read_only_view(mapped)

    def tensor(self, name: str) -> Tensor:
        """A view of the file's bytes, on the CPU. Writing to it ends the process: the map is read-only."""
        entry = self.entries[name]
        if entry.dtype not in DTYPES:
            raise CheckpointError(f"{self.path}: {name} is stored as {entry.dtype}; known: {', '.join(DTYPES)}")
        dtype = DTYPES[entry.dtype]
        if entry.num_bytes == 0:
            return torch.empty(entry.shape, dtype=dtype)
        return self._view(entry.start, entry.start + entry.num_bytes, dtype).view(entry.shape)

    def pieces(self, name: str, rows: int = 1, box: Box = ()) -> Iterator[tuple[int, Tensor]]:
        """The tensor [n, ...] in order, at most PIECE_BYTES at a time but at least `rows` rows: (first row, view).

        box: of each dimension the part that is wanted, () for all; rows are then counted from its beginning, and no
        byte beside it is looked at. The next piece is asked of the disk while one is used, and what was used leaves
        this process's memory: however large the file, little of it is resident. The disk is asked for whole rows: what
        lies beside the box is another rank's, which shares the pages. The views must not be kept.
        """
        entry = self.entries[name]
        if not entry.shape or entry.num_bytes == 0:
            yield 0, self.tensor(name)
            return
        dtype, row_bytes = DTYPES[entry.dtype], entry.num_bytes // entry.shape[0]
        inside = tuple(span.slice for span in box[1:])
        for row, start, stop in self._steps(entry, row_bytes, row_bytes, rows, box):
            yield row, self._view(start, stop, dtype).view(-1, *entry.shape[1:])[:, *inside]

    def stored_pieces(self, name: str, box: Box = ()) -> Iterator[tuple[int, Tensor, Decode | None]]:
        """As `pieces`, of what the file has, and what makes the tensor's values of it, None where it has them."""
        for row, piece in self.pieces(name, box=box):
            yield row, piece, None

    def _steps(
        self, entry: Entry, stored_bytes: int, made_bytes: int, rows: int, box: Box
    ) -> Iterator[tuple[int, int, int]]:
        """(first row, start, stop): bytes of the file that a piece is made of. stored_bytes: of a row there;
        made_bytes: of one in memory.
        """
        step = max(PIECE_BYTES // made_bytes // rows, 1) * rows
        first, last = (box[0].start, box[0].stop) if box else (0, entry.shape[0])
        end = entry.start + last * stored_bytes
        for row in range(first, last, step):
            start = entry.start + row * stored_bytes
            stop = min(start + step * stored_bytes, end)
            self._advise("MADV_WILLNEED", stop, min(stop + step * stored_bytes, end))
            yield row - first, start, stop
            self._advise("MADV_DONTNEED", start, stop)

    def _view(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        flat = self._bytes[start:stop]
        if start % dtype.itemsize:  # the format does not promise alignment
            flat = flat.clone()
        return flat.view(dtype)

    def _advise(self, name: str, start: int, stop: int) -> None:
        """Tell the kernel what is needed next or no more; the map is read-only, so nothing can be lost."""
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        if (advice := getattr(mmap, name, None)) is not None and stop > first:
            self._map.madvise(advice, first, stop - first)


def _read_only_view(mapped: mmap.mmap) -> Tensor:
    """The mapped bytes, uint8, without a copy; the tensor keeps the map alive."""
    with warnings.catch_warnings():
        # torch has no read-only tensors and warns that this one looks writable. Nothing here writes to it.
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
        return torch.frombuffer(mapped, dtype=torch.uint8)
