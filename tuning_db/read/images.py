"""Machine code as a database keeps it: compressed, and named by the digest of what it is."""

from __future__ import annotations

import hashlib

import zstandard

from kerngen.compiler.compile import Cubin, Ptx
from kerngen.errors import CorruptRecord
from kerngen.tuning_db.read.values import Build

_BYTES_MOST = 1 << 28
_ELF = b"\x7fELF"


def decompress(blob: bytes, codec: str, raw_bytes: int) -> bytes | None:
    """None unless `blob` holds exactly `raw_bytes`: a damaged header must not ask for all memory."""
    try:
        if codec != "zstd" or not 0 < raw_bytes < _BYTES_MOST or zstandard.frame_content_size(blob) != raw_bytes:
            return None
        return zstandard.ZstdDecompressor().decompress(blob)
    except (zstandard.ZstdError, TypeError):
        return None


def image_of(build: Build, blob: bytes, codec: str, raw_bytes: int, where: str) -> Cubin | Ptx:
    """The machine code of `build`. Raises CorruptRecord unless it is what the build's digest says."""
    raw = decompress(blob, codec, raw_bytes)
    if raw is None or hashlib.sha256(raw).hexdigest() != build.image_sha:
        raise CorruptRecord(f"{where}: the image {build.image_sha} of build {build.id} does not match its own digest")
    if raw.startswith(_ELF) and (absent := [name for name in build.entries if f".text.{name}\0".encode() not in raw]):
        raise CorruptRecord(
            f"{where}: the image of build {build.id} has no {', '.join(absent)}: it is of another kernel"
        )
    if build.target.startswith("compute_"):
        return Ptx(build.key, build.arch, build.nvrtc, raw)
    return Cubin(build.key, build.arch, build.nvrtc, raw, build.entries, "")
