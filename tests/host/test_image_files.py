"""Image files, Pillow's images and arrays to RGB: what is seen, what is refused, and in which words."""

from __future__ import annotations

import io
import struct
import subprocess
import sys
from contextlib import suppress
from typing import Any

import numpy as np
import pictures
import pytest
from pictures import HEIGHT, WIDTH, encoded, png, with_orientation, with_size
from PIL import Image, ImageOps

from kerngen.errors import UsageError
from kerngen.runtime.media.decoding import file_pixels, image_pixels

RGB = np.asarray(pictures.image())


def rows_of(array: np.ndarray[Any, Any]) -> bytes:
    """Of a PNG: each after a byte that says that it is not filtered."""
    return b"".join(b"\0" + row.tobytes() for row in array)


@pytest.mark.parametrize(("format", "options"), [("PNG", {}), ("WEBP", {"lossless": True})])
def test_what_is_stored_without_loss_comes_back(format: str, options: dict[str, Any]) -> None:
    data = encoded(pictures.image(), format, **options)
    assert np.array_equal(file_pixels(data), RGB)
    pixels = image_pixels(pictures.image())
    assert np.array_equal(pixels, RGB)
    assert (pixels.dtype, pixels.flags.c_contiguous) == (np.uint8, True)


@pytest.mark.parametrize("mode", ["1", "L", "P", "CMYK", "YCbCr"])
def test_other_colours_become_rgb(mode: str) -> None:
    image = pictures.image(mode)
    want = np.asarray(image.convert("RGB"))
    assert np.array_equal(image_pixels(image), want)
    if mode != "YCbCr":
        data = encoded(image, "JPEG", quality=100) if mode == "CMYK" else encoded(image, "PNG")
        assert np.abs(file_pixels(data).astype(int) - want).max() <= (4 if mode == "CMYK" else 0)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA", "P", "L", "RGB", "1"])
def test_what_is_transparent_is_seen_on_white(mode: str) -> None:
    """Whichever way it is stored; the colours are those of transformers' own conversion."""
    from transformers.image_transforms import convert_to_rgb

    image = pictures.image("RGBA")
    if mode in ("LA", "PA"):
        image = image.convert("LA") if mode == "LA" else image.convert("RGBA").convert("PA")
    elif mode != "RGBA":
        image = pictures.image(mode)
        image.info["transparency"] = {"P": 0, "L": 0, "1": 0, "RGB": (0, 0, 0)}[mode]
    assert np.array_equal(image_pixels(image), convert_to_rgb(image, return_numpy=True))
    if mode != "PA":
        stored = file_pixels(encoded(image, "PNG"))
        assert np.array_equal(stored, image_pixels(image))
        through = np.asarray(image.convert("RGBA"))[..., 3] == 0
        assert through.any()
        assert (stored[through] == 255).all(), "white, and not the black that lies below"


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
def test_cameras_are_held_in_eight_ways(orientation: int, format: str) -> None:
    data = with_orientation(orientation, format)
    with Image.open(io.BytesIO(data)) as image:
        want = np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
        assert np.array_equal(image_pixels(image), want)
    found = file_pixels(data)
    assert found.shape == ((WIDTH, HEIGHT, 3) if orientation >= 5 else (HEIGHT, WIDTH, 3))
    assert np.array_equal(found, want)
    if orientation == 6:  # turned to the right: what was at the left is on top
        assert found[0].mean(0)[0] < 30 < 220 < found[-1].mean(0)[0]


def test_broken_exif_is_no_reason_to_refuse_an_image() -> None:
    data = encoded(pictures.image(), "JPEG", quality=95, exif=b"Exif\0\0MM\0\x2a\xff\xff\xff\xff")
    assert np.array_equal(file_pixels(data), file_pixels(encoded(pictures.image(), "JPEG", quality=95)))


def test_16_bits_are_scaled_to_8() -> None:
    grey = (np.arange(WIDTH * HEIGHT).reshape(HEIGHT, WIDTH) * 54).astype(">u2")
    want = np.repeat((grey.astype(int) // 256).astype(np.uint8)[..., None], 3, 2)
    assert want.max() > 250
    data = png(WIDTH, HEIGHT, 16, 0, rows_of(grey))
    assert np.array_equal(file_pixels(data), want)
    colour = np.stack([grey, grey[::-1], grey[:, ::-1]], 2).astype(">u2")  # stack takes the machine's own order
    assert np.array_equal(file_pixels(png(WIDTH, HEIGHT, 16, 2, rows_of(colour)))[..., 0], want[..., 0])
    see_through = int(grey[3, 5])
    found = file_pixels(png(WIDTH, HEIGHT, 16, 0, rows_of(grey), (b"tRNS", struct.pack(">H", see_through))))
    want[grey == see_through] = 255
    assert np.array_equal(found, want)


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG"])
def test_of_an_animation_the_first_image_is_taken(format: str) -> None:
    first, second = pictures.image("P"), pictures.image("P").rotate(180)
    options = {"lossless": True} if format == "WEBP" else {}
    data = encoded(first, format, save_all=True, append_images=[second], duration=50, **options)
    assert np.array_equal(file_pixels(data), np.asarray(first.convert("RGB")))


def test_arrays_are_grey_rgb_or_rgba() -> None:
    assert np.array_equal(image_pixels(RGB[..., 0]), np.repeat(RGB[..., :1], 3, 2))
    assert np.array_equal(image_pixels(RGB[..., :1]), np.repeat(RGB[..., :1], 3, 2))
    assert np.array_equal(image_pixels(RGB[:, ::-1]), RGB[:, ::-1])
    rgba = pictures.image("RGBA")
    assert np.array_equal(image_pixels(np.asarray(rgba)), image_pixels(rgba))


@pytest.mark.parametrize("what", [RGB.astype(np.float32), RGB[None], np.moveaxis(RGB, 2, 0), RGB[:0], "cat.png", b"x",
                                  Image.new("F", (4, 4)), Image.new("I", (4, 4))],
                         ids=["float", "batch", "channels first", "empty", "path", "bytes", "F", "I"])  # fmt: skip
def test_what_is_no_image_is_refused(what: Any) -> None:
    with pytest.raises(UsageError, match="an image"):
        image_pixels(what)


BIG = 60_000
HUGE = {
    "PNG": png(BIG, BIG, 8, 2, b"\0"),
    "JPEG": with_size(encoded(pictures.image(), "JPEG"), BIG, BIG),
    "GIF": with_size(encoded(pictures.image("P"), "GIF"), BIG, BIG),
    "WEBP": with_size(encoded(pictures.image(), "WEBP", lossless=True), 16_383, 16_383),
    "just too large": png(8_000, 6_251, 8, 0, b"\0"),
}


@pytest.mark.parametrize("name", HUGE)
def test_a_header_that_says_too_much_is_enough(name: str) -> None:
    """A few hundred bytes that would be gigabytes: refused before anything is decoded."""
    assert len(HUGE[name]) < 5000
    with pytest.raises(UsageError, match="more than 50,000,000"):
        file_pixels(HUGE[name])


def test_as_many_pixels_as_may_be_are_decoded() -> None:
    data = png(500, 400, 8, 0, (b"\0" + bytes(500)) * 400)
    assert file_pixels(data, 200_000).shape == (400, 500, 3)
    with pytest.raises(UsageError, match="500 x 400 pixels: more than 199,999"):
        file_pixels(data, 199_999)


SEEDS = dict(enumerate(pictures.seeds()))


@pytest.mark.parametrize("number", SEEDS)
def test_a_file_that_is_cut_off_is_no_image(number: int) -> None:
    data = SEEDS[number]
    assert file_pixels(data).ndim == 3
    for size in (0, 1, 8, 12, 30, len(data) // 4, len(data) // 2):
        with pytest.raises(UsageError, match="cannot be decoded"):
            file_pixels(data[:size])


def test_a_damaged_file_is_an_image_or_an_error() -> None:
    count, decoded = 500, 0
    for data in pictures.mutated(count):
        with suppress(UsageError):
            decoded += file_pixels(data, 1_000_000).ndim == 3
    assert 0.1 * count < decoded < 0.9 * count


@pytest.mark.parametrize("format", ["BMP", "TIFF", "PPM", "ICO", "TGA", "PCX", "EPS", "PDF", "JPEG2000"])
def test_other_formats_are_refused(format: str) -> None:
    """Also those that Pillow reads: each decoder is one more that strangers can reach."""
    with pytest.raises(UsageError, match="no PNG, JPEG, WebP or GIF"):
        file_pixels(encoded(pictures.image(), format))


@pytest.mark.parametrize("data", [b"", b"\x89PNG\r\n\x1a\n", b"GIF89a", b"RIFF\0\0\0\0WEBP", b"\xff\xd8\xff",
                                  b"<svg/>" * 9, b"%!PS-Adobe", bytes(range(256))],
                         ids=lambda d: repr(d[:10]))  # fmt: skip
def test_what_only_looks_like_an_image_is_refused(data: bytes) -> None:
    with pytest.raises(UsageError, match="the image cannot be decoded"):
        file_pixels(data)


def test_no_plug_in_is_looked_for() -> None:
    """Nor is one loaded for a file that none of the four formats has."""
    code = (
        "import sys; from kerngen.errors import UsageError; from kerngen.runtime.media.decoding import file_pixels\n"
        "try: file_pixels(b'%!PS-Adobe-3.0 EPSF-3.0')\n"
        "except UsageError: print(*sorted(m for m in sys.modules if m.startswith('PIL.') and m.endswith('Plugin')))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "PIL.PngImagePlugin" in out
    assert not {"PIL.EpsImagePlugin", "PIL.PsdImagePlugin", "PIL.IcoImagePlugin"} & set(out.split())


def test_where_pillow_is_missing_it_is_said_what_to_install() -> None:
    code = (
        "import sys; sys.modules['PIL'] = None; from kerngen.runtime.media.decoding import file_pixels\n"
        "try: file_pixels(b'')\n"
        "except Exception as e: print(type(e).__name__, e)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.startswith("ToolchainError images need Pillow")
    assert "pip install 'kerngen[media]'" in out
