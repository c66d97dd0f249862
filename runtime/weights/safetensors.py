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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kerngen.errors import CheckpointError, is_printable_name, printable_name
from kerngen.runtime.config_fields import (
    GET_AGAIN,
    MAX_JSON_BYTES,
    nothing_there,
    open_file,
    read_file,
    read_json,
    require_content,
    short,
)
from kerngen.runtime.weights.mapped import DTYPES, Box, Decode, Entry, Made, MappedFile

MAX_HEADER_BYTES = 32 * 1024 * 1024  # of 35,000 tensors, the experts of a 26B one by one, there are 5 MB
ITEM_BYTES: dict[str, int] = {name: dtype.itemsize for name, dtype in DTYPES.items()} | {
    "U16": 2, "U32": 4, "U64": 8, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip


class SafetensorsFile(MappedFile):
    """One file, verified and mapped. metadata: what it says of itself (`__metadata__`), unverified."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open_file(path) as f:
                self.stat = os.fstat(f.fileno())
                self.entries, self.metadata, self.digest = _read_header(path, f.read(8), f, self.stat.st_size)
                # Read-only: a private writable map is counted against memory and swap, which a large file may exceed.
                self._keep(mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ))
        except OSError as e:
            raise CheckpointError(f"{path} cannot be read: {e.strerror or e}") from e


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
    """All tensors of a folder: model.safetensors, or the shards that model.safetensors.index.json names.

    said_by: what implies which tensors there are, in words.
    """

    said_by = "config.json"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index = folder / "model.safetensors.index.json"
        single = folder / "model.safetensors"
        self._files: dict[str, MappedFile] = {}
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
    def files_by_name(self) -> Mapping[str, MappedFile]:
        """The file that holds each tensor."""
        return self._files

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
            raise CheckpointError(
                f"{self.folder} lacks the tensor {name} {list(shape)} that its {self.said_by} implies"
            )
        path = self._files[name].path
        if self.shape(name) != shape:
            raise CheckpointError(
                f"{path}: {name} has shape {list(self.shape(name))}; {self.said_by} implies {list(shape)}"
            )
        if self.dtype(name) not in dtypes:
            raise CheckpointError(f"{path}: {name} is {self.dtype(name)}; it must be {' or '.join(dtypes)}")

    def num_bytes(self, name: str) -> int:
        """That it takes in the file."""
        return self._files[name].entries[name].num_bytes

    def num_values(self, name: str) -> int:
        return prod(self.shape(name))

    def path(self, name: str) -> Path:
        """Of the file that holds the tensor."""
        return self._files[name].path

    @property
    def files(self) -> list[MappedFile]:
        """Those that hold the tensors, each once."""
        return list(dict.fromkeys(self._files.values()))

    def tensor(self, name: str) -> Tensor:
        """A read-only view on the CPU; copy it before changing anything."""
        return self._files[name].tensor(name)

    def pieces(self, name: str, rows: int = 1, box: Box = ()) -> Iterator[tuple[int, Tensor]]:
        """As MappedFile.pieces."""
        return self._files[name].pieces(name, rows, box)

    def stored_pieces(self, name: str, box: Box = ()) -> Iterator[tuple[int, Tensor, Decode | None]]:
        """As MappedFile.stored_pieces."""
        return self._files[name].stored_pieces(name, box)

    def stored_together(self, wanted: Sequence[tuple[str, Box]]) -> Iterator[tuple[int, Tensor, Made]]:
        """stored_pieces of several tensors, and which of them a piece is made into: more than one where they lie in the
        same bytes, which are then read once.
        """
        for index, (name, box) in enumerate(wanted):
            for row, piece, decode in self.stored_pieces(name, box):
                yield row, piece, ((index, decode),)

    @property
    def config_digest(self) -> str:
        """Of what says how the model is built, in hex."""
        return hashlib.sha256(read_file(self.folder / "config.json", MAX_JSON_BYTES)).hexdigest()

    def beside(self, name: str) -> Path:
        """Where a file `name` lies that is made of this checkpoint."""
        return self.folder / name

    def has_repacked(self) -> bool:
        """Whether repacked weights of it were kept (repacked.py)."""
        like = self.beside("repacked-")
        return any(p.name.startswith(like.name) and p.suffix == ".kerngen" for p in like.parent.iterdir())

    def is_decoded(self, name: str) -> bool:
        """Whether the tensor is stored in a quantised form that loading makes floats of."""
        return False

    def said(self, used: Iterable[str], dtype: torch.dtype) -> list[str]:
        """What loading made of the tensors called so, in `dtype`, that people should hear of, in lines."""
        return []
