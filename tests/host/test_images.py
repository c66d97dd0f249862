"""Images and frames as a model is given them: the bytes that transformers' processors make, whatever the size."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
from image_digests import BUDGETS, FILE, FPS, SIZES, UNIFIED_SIZES, VIDEO, digest, picture

from kerngen.errors import UsageError
from kerngen.runtime.media.images import (
    MAX_FRAMES,
    ImageRule,
    frame_indices,
    image_media,
    scaled_size,
    time_text,
)

RECORDED: dict[str, Any] = json.loads(FILE.read_text())


@pytest.mark.parametrize(("name", "rule", "sizes"), [("images", ImageRule(), SIZES),
                                                     ("unified", ImageRule(48, 1), UNIFIED_SIZES)])  # fmt: skip
def test_patches_are_those_of_transformers(name: str, rule: ImageRule, sizes: tuple[tuple[int, int], ...]) -> None:
    recorded = RECORDED[name]
    assert len(recorded) == len(sizes) * len(BUDGETS)
    for height, width in sizes:
        pixels = picture(height, width)
        for budget in BUDGETS:
            media = image_media(pixels, rule, budget)
            found = [media.num_tokens, *media.grid, digest(media.data)]
            assert found == recorded[f"{height}x{width} at {budget}"], (height, width, budget)


def test_frames_of_a_video_are_those_of_transformers() -> None:
    num_frames, height, width = VIDEO
    video = [picture(height, width, seed=n) for n in range(num_frames)]
    found = [(time_text(i / FPS), image_media(video[i], ImageRule(), kind="video")) for i in frame_indices(num_frames)]
    assert [[time, digest(media.data)] for time, media in found] == RECORDED["video"]
    assert {(media.kind, media.num_tokens <= 70) for _, media in found} == {("video", True)}


def test_sizes_are_those_of_transformers() -> None:
    """100,000 of them, half of which are small or narrow: there the order of floating-point operations shows."""
    from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size as theirs

    draw = random.Random(5)
    for number in range(100_000):
        height, width = draw.randint(1, 600 if number % 2 else 8000), draw.randint(1, 600 if number % 3 else 8000)
        budget = draw.choice(BUDGETS)
        want = theirs(height, width, 16, 9 * budget, 3)
        assert scaled_size(height, width, budget, 48) == want, (height, width, budget)


def test_integers_would_give_another_size() -> None:
    assert scaled_size(22, 385, 70, 48) == (2 * 48, 34 * 48)


def test_an_image_of_the_right_size_is_only_cut() -> None:
    pixels = picture(768, 768)
    media = image_media(pixels, ImageRule(), 280)
    assert (media.grid, media.num_tokens) == ((48, 48), 256)
    patch = media.data[48 * 3 + 5].reshape(16, 16, 3)
    assert np.array_equal(patch, pixels[48:64, 80:96])
    whole = image_media(pixels, ImageRule(48, 1), 280)
    assert whole.grid == (16, 16)
    assert np.array_equal(whole.data[16 + 2].reshape(48, 48, 3), pixels[48:96, 96:144])


def test_the_digest_tells_pixels_and_budgets_apart_and_is_a_frames_too() -> None:
    pixels = picture(480, 640)
    media = image_media(pixels, ImageRule())
    assert media.num_tokens == 266, "the rule's own budget is 280"
    assert image_media(pixels.copy(), ImageRule(), 280).digest == media.digest
    assert image_media(pixels, ImageRule(), 560).digest != media.digest
    other = pixels.copy()
    other[100:110, 100:110] ^= 64
    assert image_media(other, ImageRule()).digest != media.digest
    frame = image_media(pixels, ImageRule(), kind="video")
    assert (frame.kind, frame.num_tokens) == ("video", 63)
    assert frame.digest == image_media(pixels, ImageRule(), 70).digest
    assert not media.data.flags.writeable


def test_views_are_images_too() -> None:
    pixels = picture(60, 100)
    assert image_media(pixels[::-1, ::-1], ImageRule()).digest == image_media(
        np.ascontiguousarray(pixels[::-1, ::-1]), ImageRule()
    ).digest  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((4, 4), np.uint8),
        ((4, 4, 4), np.uint8),
        ((0, 4, 3), np.uint8),
        ((4, 4, 3), np.float32),
        ((1, 4, 4, 3), np.uint8),
    ],
)
def test_what_is_no_image_is_refused(shape: tuple[int, ...], dtype: Any) -> None:
    with pytest.raises(UsageError, match="an image is a uint8 array"):
        image_media(np.zeros(shape, dtype), ImageRule())


@pytest.mark.parametrize("budget", [0, 1, 69, 281, 10**9, -70])
def test_budgets_are_those_that_the_model_knows(budget: int) -> None:
    with pytest.raises(UsageError, match="70, 140, 280, 560, 1120"):
        image_media(picture(4, 4), ImageRule(), budget)
    with pytest.raises(UsageError, match=f"budget of {budget} "):
        ImageRule(default_tokens=budget)


def test_of_a_video_32_frames_are_taken_at_equal_distances() -> None:
    for count in (1, 2, 31, 32):
        assert frame_indices(count) == list(range(count))
    for count in (33, 40, 63, 64, 100, 12_345, 10**6 + 7):
        assert frame_indices(count) == np.arange(0, count, count / MAX_FRAMES).astype(int).tolist(), count


def test_times_are_cut_and_not_rounded() -> None:
    assert [time_text(s) for s in (0, 0.999, 59.999, 60, 3599.9, 4500, 6000)] == [
        "00:00", "00:00", "00:59", "01:00", "59:59", "75:00", "100:00"]  # fmt: skip
