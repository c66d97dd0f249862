"""Images and frames of a video as Gemma-4 is given them: scaled to a budget of soft tokens, and cut into patches.

The rules are those of transformers' Gemma4ImageProcessor and Gemma4VideoProcessor with torchvision, bit for bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from kerngen.errors import UsageError
from kerngen.runtime.media.values import Media

BUDGETS = (70, 140, 280, 560, 1120)  # soft tokens that an image may have at most
FRAME_BUDGET, MAX_FRAMES = 70, 32  # of a frame of a video; of a video
DEFAULT_FPS, MAX_FPS = 24.0, 10_000  # of a video that does not say; at 1 / MAX_FPS or less a frame lasts for hours


@dataclass(frozen=True, slots=True)
class ImageRule:
    """What a model takes of an image: patches of patch_size x patch_size pixels, pooling x pooling of which are pooled
    to one soft token; default_tokens, of BUDGETS, where a request names no other.

    A model without an encoder takes patches that are a soft token each, ImageRule(48, 1).
    """

    patch_size: int = 16
    pooling: int = 3
    default_tokens: int = 280

    def __post_init__(self) -> None:
        if self.patch_size < 1 or self.pooling < 1:
            raise UsageError(f"patches of {self.patch_size} pixels, pooled by {self.pooling}: both are at least 1")
        check_budget(self.default_tokens)

    @property
    def token_size(self) -> int:
        """Pixels of a side of the square that is one soft token."""
        return self.patch_size * self.pooling


def check_budget(num_tokens: int) -> None:
    """Raise UsageError for a number of soft tokens that is not of BUDGETS."""
    if num_tokens not in BUDGETS:
        raise UsageError(
            f"an image cannot have a budget of {num_tokens} soft tokens", hint=f"one of {', '.join(map(str, BUDGETS))}"
        )


def scaled_size(height: int, width: int, num_tokens: int, token_size: int) -> tuple[int, int]:
    """(height, width) in pixels that an image is scaled to, up as well as down: its aspect ratio, as nearly as
    multiples of `token_size` have it, and at most `num_tokens` squares of that size.

    In float64 and in this order: integers give other sizes, of 22x385 for one. Source: transformers'
    get_aspect_ratio_preserving_size.
    """
    factor = math.sqrt(num_tokens * token_size**2 / (height * width))
    rows, columns = math.floor(factor * height / token_size), math.floor(factor * width / token_size)
    if rows == 0:
        rows, columns = 1, min(math.floor(width / height), num_tokens)
    elif columns == 0:
        rows, columns = min(math.floor(height / width), num_tokens), 1
    return rows * token_size, columns * token_size


def image_media(
    pixels: NDArray[np.uint8],
    rule: ImageRule,
    num_tokens: int | None = None,
    kind: Literal["image", "video"] = "image",
) -> Media:
    """What a model is given of an image: uint8 patches, as Media has them. They stay uint8; towers cast them.

    pixels: uint8 [height, width, 3], RGB. num_tokens: its budget of soft tokens; None for the rule's, and of a frame of
    a video for FRAME_BUDGET.
    Raises UsageError for another array or budget.
    """
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or pixels.size == 0:
        raise UsageError(f"an image is a uint8 array [height, width, 3], not {pixels.dtype} {list(pixels.shape)}")
    default = FRAME_BUDGET if kind == "video" else rule.default_tokens
    check_budget(budget := default if num_tokens is None else num_tokens)
    height, width = scaled_size(pixels.shape[0], pixels.shape[1], budget, rule.token_size)
    size, scaled = rule.patch_size, _scaled(pixels, height, width)
    rows, columns = height // size, width // size
    patches = scaled.reshape(rows, size, columns, size, 3).transpose(0, 2, 1, 3, 4)  # [rows, columns, size, size, 3]
    patches = patches.reshape(rows * columns, size * size * 3)
    return Media.of(kind, patches, (rows, columns), rows * columns // rule.pooling**2)


def _scaled(pixels: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
    """Bicubic with antialias, of uint8 on the CPU: what torchvision's resize calls, and so the same bytes."""
    if pixels.shape[:2] == (height, width):
        return pixels
    copy = torch.from_numpy(pixels.copy())  # an array may be read only, or have negative strides
    scaled = torch.nn.functional.interpolate(
        copy.permute(2, 0, 1)[None], (height, width), mode="bicubic", antialias=True, align_corners=False
    )
    array: NDArray[np.uint8] = scaled[0].permute(1, 2, 0).numpy()
    return array


def frame_indices(num_frames: int) -> list[int]:
    """Of the frames that a model is given of T: int(arange(0, T, T / MAX_FRAMES)), and all of MAX_FRAMES or fewer.

    T / 32 is exact, and so integers give the same. transformers refuses to sample fewer than 32.
    """
    if num_frames <= MAX_FRAMES:
        return list(range(num_frames))
    return [number * num_frames // MAX_FRAMES for number in range(MAX_FRAMES)]


def time_text(seconds: float) -> str:
    """ "MM:SS", cut and not rounded; of an hour and more with the minutes that it has, "75:00"."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes:02d}:{rest:02d}"
