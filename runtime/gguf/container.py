"""Reads the header of a GGUF file without believing it.

Format (ggml-org/ggml, docs/gguf.md), little endian: "GGUF", version u32, number of tensors u64, number of keys u64;
each key a string, the type of its value u32, and the value; each tensor a name, the number of its dimensions u32, these
u64 with the contiguous one first, a type u32, and an offset u64 into the data, which begin at the next multiple of
general.alignment. A string is its length u64 and bytes of UTF-8, an array its elements' type u32, their number u64 and
they themselves.

All of it is walked within the bounds of the file before a byte of a tensor is touched, and nothing is made in memory
but the keys, the tensors' names and where values lie: a file that claims 2^60 strings is refused at the first that is
not there. Values are read when they are asked for. The file is mapped, which costs addresses and no memory.

Why not the package gguf: its reader (0.19, gguf_reader.py) slices a numpy map, where what lies behind the end is
silently shorter, loops as often as a count says, follows arrays in arrays as deep as they go, multiplies dimensions in
64 bits, and looks for no overlaps; a key that is there twice, as in files that people have, ends it.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import re
import struct
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

from kerngen.errors import CheckpointError, is_printable_name, printable_name
from kerngen.runtime.config_fields import GET_AGAIN, open_file, require_content, short
from kerngen.runtime.gguf.ggml_types import GGML_TYPES, GgmlType

MAGIC = b"GGUF"
VERSIONS = (2, 3)  # they differ in the byte order that the second allows
# Bounds far above any model's: Gemma-4's tokenizer takes 12 MB of 777,020 strings, the 31B has 833 tensors.
MAX_HEADER_BYTES = 256 * 1024 * 1024
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 17
MAX_STRINGS = 1 << 23  # in all arrays together
MAX_NUMBERS, MAX_TEXTS = 1 << 22, 1 << 21  # of one array that is asked for
MAX_DEPTH = 4  # of arrays in arrays
MAX_DIMS = 4  # ggml's own
MAX_SIZE = 1 << 48
MAX_ALIGNMENT = 1 << 20
MAX_TEXT_BYTES = 16 * 1024 * 1024  # of one string that is asked for
DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY, _BOOL, _FLOAT32 = 8, 9, 7, 6
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_NOT_WHOLE = (6, 7, 12)
_BYTES = {kind: struct.calcsize(f"<{code}") for kind, code in _SCALARS.items()}
_PART = re.compile(r"(?P<stem>.*)-(?P<index>\d{5})-of-(?P<count>\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class Value:
    """Where the value of a key lies: `count` elements of type `kind` from byte `start` on; count is -1 of a single."""

    kind: int
    start: int
    count: int = -1


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor as the header describes it, shape as torch has it: the contiguous dimension last. start: byte in the
    file.
    """

    type: GgmlType
    shape: tuple[int, ...]
    start: int
    num_bytes: int


class GgufFile:
    """The header of one file. Raises CheckpointError for what cannot be read, is torn, or lies about its sizes.

    tensors: by their names. stat: of the file when it was opened. digest: SHA-256 of the header, in hex.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open_file(path) as f:
                self.stat = os.fstat(f.fileno())
                head = f.read(64)
                require_content(path, head)
                if len(head) < 24 or head[:4] != MAGIC:
                    what = "is truncated" if MAGIC.startswith(head[:4]) else "is no GGUF file"
                    raise CheckpointError(f"{path} {what}: it has {self.stat.st_size:,} B and begins with {head[:4]!r}")
                self.map = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as e:
            raise CheckpointError(f"{path} cannot be read: {e.strerror or e}") from e
        walk = _Walk(path, self.map, min(self.stat.st_size, len(self.map)))
        self.values, self.tensors, end = walk.header()
        self.digest = hashlib.sha256(memoryview(self.map)[:end]).hexdigest()

    # ---- keys --------------------------------------------------------------------------------------------------------

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def error(self, message: str, *, hint: str | None = None) -> CheckpointError:
        return CheckpointError(f"{self.path}: {message}", hint=hint)

    def get(self, key: str) -> Any:
        """A single number, truth or text. float32 is taken for the shortest decimal that it may stand for: 1e-06, not
        9.99999997e-07. Raises CheckpointError where the key is missing, or has an array.
        """
        value = self._value(key)
        if value.count >= 0:
            raise self.error(f"{key} is an array; it must be a single value")
        if value.kind == _STRING:
            return self._text(key, value.start)[0]
        found = self._numbers(value, 1)[0]
        return _shortest(found) if value.kind == _FLOAT32 else found

    def integer(self, key: str, default: int | None = None, *, low: int = 0, high: int = 1 << 31) -> int:
        if default is not None and key not in self.values:
            return default
        return self._checked(key, self.get(key), low, high)

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number."""
        if default is not None and key not in self.values:
            return default
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
            raise self.error(f"{key} is {short(value)}; it must be a positive number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        if key not in self.values:
            return default
        value = self.get(key)
        if not isinstance(value, bool):
            raise self.error(f"{key} is {short(value)}; it must be true or false")
        return value

    def text(self, key: str) -> str:
        value = self.get(key)
        if not isinstance(value, str):
            raise self.error(f"{key} is {short(value)}; it must be a text")
        return value

    def is_array(self, key: str) -> bool:
        return self._value(key).count >= 0

    def integers(self, key: str, *, high: int = 1 << 31) -> list[int]:
        """An array of whole numbers from 0 on."""
        found = self._array(key)
        for value in (min(found, default=0), max(found, default=0)):
            self._checked(key, value, 0, high)
        if self.values[key].kind in _NOT_WHOLE:
            raise self.error(f"{key} is no array of whole numbers")
        return found

    def flags(self, key: str) -> list[bool]:
        found = self._array(key)
        if not all(isinstance(value, bool) for value in found):
            raise self.error(f"{key} is no array of truths")
        return found

    def texts(self, key: str) -> list[str]:
        """An array of texts."""
        value = self._value(key)
        if value.count < 0 or value.kind != _STRING:
            raise self.error(f"{key} is no array of texts")
        if value.count > MAX_TEXTS:
            raise self.error(f"{key} has {value.count:,} texts; at most {MAX_TEXTS:,} are read")
        found, at, data, unpack = [], value.start, self.map, struct.Struct("<Q").unpack_from
        try:
            for _ in range(value.count):
                (size,) = unpack(data, at)
                found.append(str(data[at + 8 : at + 8 + size], "utf-8"))
                at += 8 + size
        except UnicodeDecodeError as e:
            raise self.error(f"{key} is not UTF-8: {e}") from e
        return found

    def _value(self, key: str) -> Value:
        if key not in self.values:
            raise self.error(f"the key {key} is missing")
        return self.values[key]

    def _array(self, key: str) -> list[Any]:
        value = self._value(key)
        if value.count < 0 or value.kind not in _SCALARS:
            raise self.error(f"{key} is no array of numbers")
        if value.count > MAX_NUMBERS:
            raise self.error(f"{key} has {value.count:,} elements; at most {MAX_NUMBERS:,} are read")
        return list(self._numbers(value, value.count))

    def _checked(self, key: str, value: Any, low: int, high: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.error(f"{key} is {short(value)}; it must be a whole number from {low} to {high:,}")
        return value

    def _numbers(self, value: Value, count: int) -> tuple[Any, ...]:
        return struct.unpack_from(f"<{count}{_SCALARS[value.kind]}", self.map, value.start)

    def _text(self, key: str, at: int) -> tuple[str, int]:
        """The string at byte `at`, and where it ends."""
        (size,) = struct.unpack_from("<Q", self.map, at)
        if size > MAX_TEXT_BYTES:
            raise self.error(f"{key} has a text of {size:,} B; at most {MAX_TEXT_BYTES:,} are read")
        try:
            return self.map[at + 8 : at + 8 + size].decode("utf-8"), at + 8 + size
        except UnicodeDecodeError as e:
            raise self.error(f"{key} is not UTF-8: {e}") from e

    def floats(self, name: str) -> list[float]:
        """A small tensor of float32, as numbers. Raises CheckpointError where it is missing, or another."""
        info = self.tensors.get(name)
        if info is None or info.type.name != "F32" or prod(info.shape) > 1 << 16:
            raise self.error(f"it has no small tensor {name} of F32")
        return list(struct.unpack_from(f"<{prod(info.shape)}f", self.map, info.start))


def _shortest(value: float) -> float:
    """The decimal of the fewest digits that rounds to the float32 `value`."""
    for digits in range(1, 10):
        if struct.pack("<f", short_one := float(f"{value:.{digits}g}")) == struct.pack("<f", value):
            return short_one
    return value


class _Walk:
    """Goes through a header once, within its bounds."""

    def __init__(self, path: Path, data: mmap.mmap, size: int) -> None:
        self._path, self._data, self._size = path, data, size
        self._end = min(size, MAX_HEADER_BYTES)
        self._at = len(MAGIC)
        self._strings = 0

    def header(self) -> tuple[dict[str, Value], dict[str, TensorInfo], int]:
        """Values by their keys, tensors by their names, and where the header ends."""
        version = self._unpack("I", "the version")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "big"), "little") in VERSIONS
            raise self._error(
                "its bytes are in big-endian order, which is not implemented" if swapped
                else f"it is GGUF version {version}; {' and '.join(map(str, VERSIONS))} are read"
            )  # fmt: skip
        num_tensors, num_keys = self._unpack("Q", "the number of tensors"), self._unpack("Q", "the number of keys")
        for count, most, what in ((num_keys, MAX_KEYS, "keys"), (num_tensors, MAX_TENSORS, "tensors")):
            if count > most:
                raise self._error(f"it claims {count:,} {what}; at most {most:,} are read")
        values: dict[str, Value] = {}
        for _ in range(num_keys):
            key = self._name("key")
            values[key] = self._skip(key)  # of a key that is there twice the last is taken, as llama.cpp does
        alignment = self._alignment(values)
        raw = [self._tensor() for _ in range(num_tensors)]
        end = self._at
        return values, self._placed(raw, -(-end // alignment) * alignment, alignment), end

    def _alignment(self, values: dict[str, Value]) -> int:
        value = values.get("general.alignment")
        if value is None:
            return DEFAULT_ALIGNMENT
        found = 0
        if value.kind == 4 and value.count < 0:
            (found,) = struct.unpack_from("<I", self._data, value.start)
        if not 8 <= found <= MAX_ALIGNMENT or found & (found - 1):
            raise self._error(f"general.alignment is {found:,}; it must be a power of two from 8 to {MAX_ALIGNMENT:,}")
        return found

    def _tensor(self) -> tuple[str, tuple[int, ...], GgmlType, int, int]:
        """name, shape, type, offset into the data, bytes."""
        name = self._name("tensor")
        num_dims = self._unpack("I", f"the dimensions of {name}")
        if not 1 <= num_dims <= MAX_DIMS:
            raise self._error(f"{name} has {num_dims} dimensions; there are 1 to {MAX_DIMS}")
        shape = tuple(self._unpack("Q", f"the dimensions of {name}") for _ in range(num_dims))[::-1]
        number, offset = self._unpack("I", f"the type of {name}"), self._unpack("Q", f"the place of {name}")
        if (found := GGML_TYPES.get(number)) is None:
            raise self._error(f"{name} has the unknown type {number}")
        if not all(0 < size < MAX_SIZE for size in shape) or prod(shape) >= MAX_SIZE:
            raise self._error(f"{name} has the impossible shape {list(shape)}")
        if shape[-1] % found.block:
            raise self._error(
                f"{name} has rows of {shape[-1]}, which are no whole blocks of {found.block} as {found.name} has them"
            )
        return name, shape, found, offset, prod(shape) // found.block * found.block_bytes

    def _placed(
        self, raw: list[tuple[str, tuple[int, ...], GgmlType, int, int]], begin: int, alignment: int
    ) -> dict[str, TensorInfo]:
        """Where tensors lie in the file; none overlaps another, and all are within it."""
        found: dict[str, TensorInfo] = {}
        for name, shape, kind, offset, num_bytes in raw:
            if name in found:
                raise self._error(f"the tensor {name} is there twice")
            if offset % alignment:
                raise self._error(f"{name} starts at byte {offset:,} of the data, no multiple of {alignment}")
            if begin + offset + num_bytes > self._size:
                raise CheckpointError(
                    f"{self._path} is truncated: {name} ends at byte {begin + offset + num_bytes:,}, the file has "
                    f"{self._size:,}",
                    hint=GET_AGAIN,
                )
            found[name] = TensorInfo(kind, shape, begin + offset, num_bytes)
        end = begin
        for name, info in sorted(found.items(), key=lambda item: item[1].start):
            if info.start < end:
                raise self._error(f"{name} overlaps its neighbour: it starts at byte {info.start:,}, not {end:,}")
            end = info.start + info.num_bytes
        return found

    def _skip(self, key: str) -> Value:
        """The value of `key`, which begins here, walked over."""
        kind = self._unpack("I", f"the type of {key}")
        if kind != _ARRAY:
            start = self._at
            self._over(kind, 1, key)
            return Value(kind, start)
        return self._array(key, 1)

    def _array(self, key: str, depth: int) -> Value:
        if depth > MAX_DEPTH:
            raise self._error(f"{key} has arrays in arrays, more than {MAX_DEPTH} deep")
        kind, count = self._unpack("I", f"the type of {key}"), self._unpack("Q", f"the size of {key}")
        if kind == _ARRAY:
            start = self._at
            self._count(key, count)
            for _ in range(count):
                self._array(key, depth + 1)
            return Value(kind, start, count)
        start = self._at
        self._over(kind, count, key)
        return Value(kind, start, count)

    def _over(self, kind: int, count: int, key: str) -> None:
        """Step over `count` values of a kind that is not an array."""
        if kind in _SCALARS:
            self._require(count * _BYTES[kind], f"{count:,} values of {key}")
            self._at += count * _BYTES[kind]
            return
        if kind != _STRING:
            raise self._error(f"{key} has the unknown type {kind}")
        self._count(key, count)
        at, end, data, unpack = self._at, self._end, self._data, struct.Struct("<Q").unpack_from
        for _ in range(count):
            if at + 8 > end or (size := unpack(data, at)[0]) > end - at - 8:
                raise self._short(f"a text of {key}")
            at += 8 + size
        self._at = at

    def _count(self, key: str, count: int) -> None:
        self._strings += count
        if self._strings > MAX_STRINGS:
            raise self._error(f"{key} claims {count:,} elements; {MAX_STRINGS:,} are read in all")
        self._require(count * 8, f"{count:,} elements of {key}")

    def _name(self, what: str) -> str:
        """A key's or a tensor's."""
        size = self._unpack("Q", f"a {what}")
        self._require(size, f"the name of a {what}, of {size:,} B")
        raw = self._data[self._at : self._at + min(size, 1024)]
        self._at += size
        name = raw.decode("utf-8", "replace")
        if size > 1024 or "\ufffd" in name or not is_printable_name(name):
            raise self._error(f"'{printable_name(name)}' is no name of a {what}")
        return name

    def _unpack(self, code: str, what: str) -> int:
        size = struct.calcsize(f"<{code}")
        self._require(size, what)
        (found,) = struct.unpack_from(f"<{code}", self._data, self._at)
        self._at += size
        return int(found)

    def _require(self, num_bytes: int, what: str) -> None:
        if num_bytes > self._end - self._at:
            raise self._short(what)

    def _short(self, what: str) -> CheckpointError:
        if self._end < self._size:
            return self._error(f"its header has more than {MAX_HEADER_BYTES:,} B, which is all that is read")
        return CheckpointError(
            f"{self._path} is truncated: {what} would end behind its {self._size:,} B (read up to byte {self._at:,})",
            hint=GET_AGAIN,
        )

    def _error(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: {message}")


class GgufModel:
    """A model's file, or all of those that it is split in; keys are the first's.

    path: any of its parts. Raises CheckpointError where one is missing, or they do not belong together.
    """

    def __init__(self, path: Path) -> None:
        self.files = [GgufFile(part) for part in parts_of(path)]
        self.head = self.files[0]
        count = len(self.files)
        for index, file in enumerate(self.files):
            if file.integer("split.count", 1, high=1 << 16) != count:
                said = file.integer("split.count", 1, high=1 << 16)
                raise file.error(f"split.count is {said}; its name says {count}", hint=_NAMES)
            if count > 1 and file.integer("split.no", high=1 << 16) != index:
                raise file.error(f"split.no is {file.get('split.no')}; its name says {index}", hint=_NAMES)
        self.places: dict[str, GgufFile] = {}
        for file in self.files:
            for name in file.tensors:
                if name in self.places:
                    raise file.error(f"the tensor {name} is in {self.places[name].path.name}, too")
                self.places[name] = file
        want = self.head.integer("split.tensors.count", len(self.places))
        if count > 1 and want != len(self.places):
            raise self.head.error(f"split.tensors.count is {want}; its {count} parts have {len(self.places)} tensors")

    def info(self, name: str) -> TensorInfo:
        """Raises KeyError where there is no such tensor."""
        return self.places[name].tensors[name]

    @property
    def digest(self) -> str:
        """Of all headers, in hex."""
        return hashlib.sha256("".join(file.digest for file in self.files).encode()).hexdigest()


def open_gguf(path: Path) -> GgufModel:
    """The model at `path`, whose header is walked once: what asks for its keys, tokenizer and weights shares it."""
    try:
        found = path.stat()
    except OSError as e:
        raise CheckpointError(f"{path} cannot be read: {e.strerror or e}") from e
    return _opened(path, found.st_size, found.st_mtime_ns, found.st_ino)


@lru_cache(maxsize=2)
def _opened(path: Path, *of_file: int) -> GgufModel:
    return GgufModel(path)


_NAMES = "parts of one model are called NAME-00001-of-00003.gguf, and keep the names that they were made with"


def parts_of(path: Path) -> list[Path]:
    """The files that belong to the one at `path`, itself among them, in order. Raises CheckpointError for a missing
    one.
    """
    if (found := _PART.fullmatch(path.name)) is None:
        return [path]
    count = int(found["count"])
    if not 1 <= int(found["index"]) <= count:
        raise CheckpointError(f"{path}: part {int(found['index'])} of {count} cannot be", hint=_NAMES)
    parts = [path.with_name(f"{found['stem']}-{index + 1:05}-of-{count:05}.gguf") for index in range(count)]
    for part in parts:
        if not part.is_file():
            raise CheckpointError(f"{part} is missing; {path.name} is one of {count} parts", hint=GET_AGAIN)
    return parts
