"""Image files for tests: of any format and mode, truncated, lying about their size, or damaged at random."""

from __future__ import annotations

import io
import random
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from PIL import Image

WIDTH, HEIGHT = 40, 30


def image(mode: str = "RGB", width: int = WIDTH, height: int = HEIGHT) -> Image.Image:
    """A ramp to the right in red, downwards in green; alpha runs from 0 to 255."""
    across = np.broadcast_to(np.linspace(0, 255, width).astype(np.uint8), (height, width))
    down = np.broadcast_to(np.linspace(0, 255, height).astype(np.uint8)[:, None], (height, width))
    rgba = Image.fromarray(np.stack([across, down, across ^ down, 255 - across], 2), "RGBA")
    return rgba if mode == "RGBA" else rgba.convert("RGB").convert(mode)


def encoded(picture: Image.Image, format: str, **options: Any) -> bytes:
    file = io.BytesIO()
    picture.save(file, format, **options)
    return file.getvalue()


def png(width: int, height: int, depth: int, colour: int, rows: bytes, *more: tuple[bytes, bytes]) -> bytes:
    """A PNG whose header says what it is told to; rows: each after its filter's byte; more: chunks before them."""
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)), *more,
              (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]  # fmt: skip
    parts = [
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)) for name, body in chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def with_size(data: bytes, width: int, height: int) -> bytes:
    """A JPEG, GIF or lossless WebP whose header says that it has another size."""
    if data.startswith(b"GIF"):
        return data[:6] + struct.pack("<HH", width, height) + data[10:]
    if data.startswith(b"RIFF"):
        bits = (width - 1) | (height - 1) << 14 | int.from_bytes(data[21:25], "little") & 0xF000_0000
        return data[:21] + struct.pack("<I", bits) + data[25:]
    start = data.index(b"\xff\xc0") + 5
    return data[:start] + struct.pack(">HH", height, width) + data[start + 4 :]


def seeds() -> list[bytes]:
    """A file of each format and of several modes."""
    return [
        encoded(image(), "PNG"),
        encoded(image("RGBA"), "PNG"),
        encoded(image("P"), "PNG", transparency=3),
        png(WIDTH, HEIGHT, 16, 0, b"".join(b"\0" + bytes(range(2 * WIDTH)) for _ in range(HEIGHT))),
        encoded(image(), "JPEG", exif=_exif(6)),
        encoded(image(), "JPEG", progressive=True),
        encoded(image("CMYK"), "JPEG"),
        encoded(image("RGBA"), "WEBP"),
        encoded(image(), "WEBP", lossless=True),
        encoded(image("P"), "GIF", save_all=True, append_images=[image("P").rotate(180)], duration=50),
    ]


def _exif(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def with_orientation(orientation: int, format: str = "JPEG") -> bytes:
    return encoded(image(), format, exif=_exif(orientation), **({"quality": 95} if format == "JPEG" else {}))


def mutated(count: int, seed: int = 0) -> Iterator[bytes]:
    """Files with some bytes changed, cut out, doubled or cut off: most of them near the start, where headers are."""
    draw, files = random.Random(seed), seeds()
    for _ in range(count):
        data = bytearray(draw.choice(files))
        for _ in range(draw.choice((1, 1, 2, 5, 20))):
            where = draw.randrange(min(len(data), draw.choice((64, 64, len(data)))))
            match draw.randrange(5):
                case 0 | 1:
                    data[where] = draw.randrange(256)
                case 2:
                    data[where : where + 4] = draw.choice((b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\0\0\0\0"))
                case 3:
                    del data[where : where + draw.randrange(8)]
                case _:
                    data[where:where] = data[where : where + draw.randrange(32)]
            if len(data) < 2:
                break
        yield bytes(data[: draw.randrange(len(data))] if draw.random() < 0.1 and data else data)
