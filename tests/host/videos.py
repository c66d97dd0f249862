"""Small video files, whose frames say which they are."""

from __future__ import annotations

import io
from fractions import Fraction
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray

BITS = 8  # of a frame's number, as bars


def picture(number: int, height: int = 48, width: int = 64) -> NDArray[np.uint8]:
    """Grey, white in the top left quarter; below, from the left, the bits of `number` as bars, lowest first."""
    pixels = np.full((height, width, 3), 90, np.uint8)
    pixels[: height // 2, : width // 2] = 255
    for bit in range(BITS):
        pixels[height // 2 :, width * bit // BITS : width * (bit + 1) // BITS] = 255 * (number >> bit & 1)
    return pixels


def number_of(pixels: NDArray[np.uint8]) -> int:
    """Of a picture, which compression may have changed a little."""
    height, width = pixels.shape[:2]
    middles = [width * (2 * bit + 1) // (2 * BITS) for bit in range(BITS)]
    return sum(int(pixels[height * 3 // 4, middle].mean() > 127) << bit for bit, middle in enumerate(middles))


def video(
    count: int, *, form: str = "mp4", codec: str = "mpeg4", fps: float = 24, size: tuple[int, int] = (48, 64),
    rotation: int = 0, gop: int = 12, options: dict[str, str] | None = None,
) -> bytes:  # fmt: skip
    """A file with `count` of `picture`."""
    into = io.BytesIO()
    with av.open(into, "w", format=form) as container:
        stream: Any = container.add_stream(codec, rate=Fraction(fps).limit_denominator(1000), options=options or {})
        stream.height, stream.width = size
        stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        stream.bit_rate = 4_000_000
        stream.codec_context.gop_size = gop
        if rotation:
            stream.set_display_rotation(rotation)
        for number in range(count):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture(number, *size), format="rgb24")))
        container.mux(stream.encode(None))
    return into.getvalue()


def joined(files: list[bytes]) -> bytes:
    """A Matroska file with the packets of others one behind the other, under the header of the first."""
    into = io.BytesIO()
    with av.open(into, "w", format="matroska") as container:
        stream: Any = None
        shift = 0
        for data in files:
            with av.open(io.BytesIO(data)) as source:
                stream = stream or container.add_stream_from_template(source.streams.video[0])
                for packet in source.demux(video=0):
                    if packet.size:
                        packet.pts, packet.dts, packet.stream = packet.pts + shift, packet.dts + shift, stream
                        container.mux(packet)
            shift += 1000
    return into.getvalue()


def sound() -> bytes:
    """A file of a second of silence, without video."""
    into = io.BytesIO()
    with av.open(into, "w", format="mp4") as container:
        stream: Any = container.add_stream("aac", rate=16_000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 16_000), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 16_000
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return into.getvalue()
