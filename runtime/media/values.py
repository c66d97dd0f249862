"""Media as a request names them, as a model is given them, and where they stand in a prompt."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Kind = Literal["image", "video", "audio"]  # video: one of its frames
FileKind = Kind | Literal["video_file"]  # with all frames of a video
DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class Source:
    """What a request names. data: an encoded file's bytes; url: where it is, if data is None.

    num_tokens: the most soft tokens of an image, of `images.BUDGETS`; None for the model's own. path: of a file that
    was read here, by which errors call it.
    """

    kind: FileKind
    data: bytes | None = None
    url: str | None = None
    num_tokens: int | None = None
    path: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True, eq=False)
class Media:
    """What a model is given of one item, read only. grid: (rows, columns) of an image's patches, (frames, 1) of sound.

    data: of an image uint8 patches [rows * columns, patch * patch * 3], row-major, channel fastest; of sound float32
    [frames, features]: log-mel frames for a conformer, samples for a model without an encoder.
    num_tokens: soft tokens, which is how many places it takes in a prompt. digest: of all that decides its embeddings.
    times: of all frames of a video file, in seconds; data has them one by one in front then, [frames, ...], and
    `frames` are what a model is given.
    """

    kind: Kind
    data: NDArray[Any]
    grid: tuple[int, int]
    num_tokens: int
    digest: bytes
    times: tuple[float, ...] = ()

    @staticmethod
    def of(kind: Kind, data: NDArray[Any], grid: tuple[int, int], num_tokens: int) -> Media:
        """The same, with its digest: blake2b of kind, type, shape, grid and bytes. A frame of a video is an image."""
        data = np.ascontiguousarray(data)
        data.flags.writeable = False
        seen = "audio" if kind == "audio" else "image"
        about = f"{seen} {data.dtype.str} {data.shape} {grid} {num_tokens}".encode()
        digest = blake2b(about, digest_size=DIGEST_BYTES)
        digest.update(data.data)
        return Media(kind, data, grid, num_tokens, digest.digest())

    def frames(self) -> list[Media]:
        """Of a video file each frame as an item of its own, any other item as it is."""
        if not self.times:
            return [self]
        return [Media.of(self.kind, data, self.grid, self.num_tokens // len(self.times)) for data in self.data]


@dataclass(frozen=True, slots=True)
class Placed:
    """An item in a prompt: its soft tokens are at `start` up to, not including, `end`."""

    start: int
    media: Media

    @property
    def end(self) -> int:
        return self.start + self.media.num_tokens

    @property
    def sees_itself(self) -> bool:
        """Whether its tokens see each other both ways in sliding layers, where the model has that: not of sound."""
        return self.media.kind != "audio"
