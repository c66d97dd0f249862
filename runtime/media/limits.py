"""What a request's media may take: bytes, pixels, time, memory and tokens; and which hosts are asked for them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kerngen.errors import UsageError
from kerngen.runtime.media.values import FileKind

MAX_URL_CHARS = 4096  # of an http or https URL
MAX_PIXELS = 50_000_000  # of an image: six pages at 300 dots an inch
_HOST = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?|\[[0-9a-f:.]+\]", re.ASCII)


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """Of one item where nothing else is said. Raises UsageError for a number below 1, or a host that is no name."""

    image_bytes: int = 20_000_000  # of a file, as it is stored
    audio_bytes: int = 25_000_000
    video_bytes: int = 100_000_000
    pixels: int = MAX_PIXELS  # of an image, or of a frame, by its header
    decode_s: float = 10.0  # in which a file is decoded and made ready
    video_s: float = 30.0  # the same of a video file
    decode_bytes: int = 3 << 29  # of memory that a process takes for that, besides what it started with
    fetch_s: float = 10.0  # from the name's resolution to the last byte
    items: int = 32  # of a request
    soft_tokens: int = 16_384  # of all items of a request
    kept_bytes: int = 1 << 28  # of what files were decoded to, which is kept for the next turn of a chat; 0: none is
    hosts: tuple[str, ...] = ()  # whose http and https URLs may be fetched

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if name not in ("hosts", "kept_bytes") and not getattr(self, name) > 0:
                raise UsageError(f"MediaLimits.{name} is {getattr(self, name)}, which leaves nothing")
        for host in self.hosts:
            if not _HOST.fullmatch(host):
                raise UsageError(
                    f"{host!r} is no host's name",
                    hint="in lower case, without scheme, user, port or path: images.example.com",
                )

    def file_bytes(self, kind: FileKind) -> int:
        """Of a file of that kind."""
        return {"audio": self.audio_bytes, "video_file": self.video_bytes}.get(kind, self.image_bytes)

    def seconds(self, kind: FileKind) -> float:
        """In which a file of that kind is decoded."""
        return self.video_s if kind == "video_file" else self.decode_s
