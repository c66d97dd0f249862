"""Reads safetensors files without believing them.

Format (huggingface/safetensors README): 8 bytes little-endian header size, a JSON header {name: {dtype, shape,
data_offsets}}, then the data; tensors fill it without gaps or overlaps. Everything is checked against the file's size
before a byte of data is touched, so that a torn or lying file is one CheckpointError and never a huge allocation.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kerngen.errors import CheckpointError, is_printable_name, printable_name
from kerngen.runtime.config_fields import GET_AGAIN, nothing_there, open_file, read_json, require_content, short
from kerngen.runtime.world import Span

MAX_HEADER_BYTES = 32 * 1024 * 1024  # of 35,000 tensors, the experts of a 26B one by one, there are 5 MB
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
ITEM_BYTES: dict[str, int] = {name: dtype.itemsize for name, dtype in DTYPES.items()} | {
    "U16": 2, "U32": 4, "U64": 8, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip


Box = Sequence[Span]  # part of a tensor: a span of each of its dimensions


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor as the header describes it. start: byte offset in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


class SafetensorsFile:
    """One file, mapped. `entries` is verified; tensors are views of the map until they are copied.

    metadata: what the file says of itself (`__metadata__`), unverified. digest: SHA-256 of the header, in hex.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open_file(path) as f:
                self.stat = os.fstat(f.fileno())
                self.entries, self.metadata, self.digest = _read_header(path, f.read(8), f, self.stat.st_size)
                # Read-only: a private writable map is counted against memory and swap, which a large file may exceed.
                self._map = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
                self._bytes = _read_only_view(self._map)
        except OSError as e:
            raise CheckpointError(f"{path} cannot be read: {e.strerror or e}") from e

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
        step = max(PIECE_BYTES // row_bytes // rows, 1) * rows
        first, last = (box[0].start, box[0].stop) if box else (0, entry.shape[0])
        inside = tuple(span.slice for span in box[1:])
        end = entry.start + last * row_bytes
        for row in range(first, last, step):
            start = entry.start + row * row_bytes
            stop = min(start + step * row_bytes, end)
            self._advise("MADV_WILLNEED", stop, min(stop + step * row_bytes, end))
            yield row - first, self._view(start, stop, dtype).view(-1, *entry.shape[1:])[:, *inside]
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


def _read_header(path: Path, head: bytes, f: Any, size: int) -> tuple[dict[str, Entry], Any, str]:
    """Parse and verify the header of a file of `size` bytes: entries, metadata, digest. Raises CheckpointError."""
    if len(head) < 8:
        raise CheckpointError(f"{path} is truncated: {size} B hold no safetensors header")
    if head == b"version ":
        require_content(path, head + f.read(64))
    length = int.from_bytes(head, "little")
    if length > MAX_HEADER_BYTES or 8 + length > size:
        raise CheckpointError(
            f"{path} is truncated or not safetensors: the header claims {length:,} B, the file has {size:,} B"
        )
    try:
        text = f.read(length)
        header = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as e:
        raise CheckpointError(f"{path}: the header is not JSON: {e}") from e
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the header is not a JSON object")
    metadata = header.pop("__metadata__", None)
    _require_names(path, header)
    entries = {name: _entry(path, name, raw, 8 + length) for name, raw in header.items()}
    end = 8 + length
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].num_bytes)):
        if entry.start != end:
            what = "overlaps its neighbour" if entry.start < end else "leaves a gap before it"
            raise CheckpointError(f"{path}: {name} {what}: it starts at byte {entry.start:,}, not {end:,}")
        end += entry.num_bytes
        if end > size:
            raise CheckpointError(f"{path} is truncated: {name} ends at byte {end:,}, the file has {size:,}")
    if end != size:
        raise CheckpointError(f"{path}: {size - end:,} B follow the last tensor")
    return entries, metadata, hashlib.sha256(text).hexdigest()


def _entry(path: Path, name: str, raw: Any, data_start: int) -> Entry:
    """One header row: known dtype, sane shape, and offsets that span exactly its elements."""
    if not isinstance(raw, dict) or not {"dtype", "shape", "data_offsets"} <= raw.keys():
        raise CheckpointError(f"{path}: {name} lacks one of dtype, shape, data_offsets")
    dtype, shape, offsets = raw["dtype"], raw["shape"], raw["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise CheckpointError(f"{path}: {name} has the unknown dtype {short(dtype)}")
    if not _is_sizes(shape) or len(shape) > 8:
        raise CheckpointError(f"{path}: {name} has the impossible shape {str(shape)[:80]}")
    if not _is_sizes(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{path}: {name} has the impossible data_offsets {str(offsets)[:80]}")
    begin, end = offsets
    need = prod(shape) * ITEM_BYTES[dtype]
    if end - begin != need:
        raise CheckpointError(
            f"{path}: {name} is {dtype} {shape}, which takes {need:,} B, but its data_offsets span {end - begin:,} B"
        )
    return Entry(dtype, tuple(shape), data_start + begin, need)


def _require_names(path: Path, names: Iterable[str]) -> None:
    """Raises CheckpointError for a tensor's name that no message could quote: too long, or not printable."""
    for name in names:
        if not is_printable_name(name):
            raise CheckpointError(f"{path}: '{printable_name(name)}' is no name of a tensor")


def _is_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(v, int) and not isinstance(v, bool) and 0 <= v < 1 << 48 for v in value
    )


def _is_there(path: Path) -> bool:
    """Raises CheckpointError where a file system cannot say: a name of 200 characters may have more than 255 bytes."""
    try:
        return path.exists()
    except OSError as e:
        raise CheckpointError(f"{path} cannot be read: {e.strerror or e}") from e


class Checkpoint:
    """All tensors of a folder: model.safetensors, or the shards that model.safetensors.index.json names."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index = folder / "model.safetensors.index.json"
        single = folder / "model.safetensors"
        self._files: dict[str, SafetensorsFile] = {}
        if index.exists():
            self._open_shards(index)
        elif single.exists():
            file = SafetensorsFile(single)
            self._files = dict.fromkeys(file.entries, file)
        else:
            raise nothing_there(folder, f"no {single.name} and no {index.name}")

    def _open_shards(self, index: Path) -> None:
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index}: weight_map is missing or empty")
        _require_names(index, weight_map)
        shards: dict[str, SafetensorsFile] = {}
        for name, shard in weight_map.items():
            if not is_printable_name(shard) or Path(shard).name != shard or shard == "..":
                raise CheckpointError(f"{index}: {name} lies in {short(shard)}, which is not a file name")
            if shard not in shards:
                if not _is_there(self.folder / shard):
                    raise CheckpointError(
                        f"{self.folder / shard} is missing; {index.name} puts {name} there", hint=GET_AGAIN
                    )
                shards[shard] = SafetensorsFile(self.folder / shard)
            if name not in shards[shard].entries:
                raise CheckpointError(f"{self.folder / shard} lacks {name}, which {index.name} puts there")
            self._files[name] = shards[shard]

    @property
    def names(self) -> set[str]:
        return set(self._files)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def shape(self, name: str) -> tuple[int, ...]:
        return self._files[name].entries[name].shape

    def dtype(self, name: str) -> str:
        """The stored dtype in safetensors' spelling (BF16)."""
        return self._files[name].entries[name].dtype

    def require(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> None:
        """Raise CheckpointError unless `name` is stored with this shape and one of these dtypes. Reads no data."""
        if name not in self._files:
            raise CheckpointError(f"{self.folder} lacks the tensor {name} {list(shape)} that its config.json implies")
        path = self._files[name].path
        if self.shape(name) != shape:
            raise CheckpointError(
                f"{path}: {name} has shape {list(self.shape(name))}; config.json implies {list(shape)}"
            )
        if self.dtype(name) not in dtypes:
            raise CheckpointError(f"{path}: {name} is {self.dtype(name)}; it must be {' or '.join(dtypes)}")

    def num_bytes(self, name: str) -> int:
        return self._files[name].entries[name].num_bytes

    def num_values(self, name: str) -> int:
        return prod(self.shape(name))

    def path(self, name: str) -> Path:
        """Of the file that holds the tensor."""
        return self._files[name].path

    @property
    def files(self) -> list[SafetensorsFile]:
        """Those that hold the tensors, each once."""
        return list(dict.fromkeys(self._files.values()))

    def tensor(self, name: str) -> Tensor:
        """A read-only view on the CPU; copy it before changing anything."""
        return self._files[name].tensor(name)

    def pieces(self, name: str, rows: int = 1, box: Box = ()) -> Iterator[tuple[int, Tensor]]:
        """As SafetensorsFile.pieces."""
        return self._files[name].pieces(name, rows, box)
