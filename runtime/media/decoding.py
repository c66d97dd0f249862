"""Image files, Pillow's images and arrays to RGB, as a model is given it.

Transparent pixels are seen on white, cameras' orientation is applied, 16 bits are cut to 8, and of an animation the
first image is taken. Files may be anyone's, and so are decoded in processes where they can do no harm.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kerngen.errors import KerngenError, ToolchainError, UsageError
from kerngen.runtime.media.images import ImageRule, image_media
from kerngen.runtime.media.limits import MAX_PIXELS, MediaLimits
from kerngen.runtime.media.values import Media, Source

if TYPE_CHECKING:
    from PIL import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_NAMES = "PNG, JPEG, WebP or GIF"
_ORIENTATION = 0x0112  # EXIF's tag, whose value says how the camera was held
_UPRIGHT: dict[int, Callable[[NDArray[np.uint8]], NDArray[np.uint8]]] = {
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: a[::-1].swapaxes(0, 1),
    7: lambda a: a[::-1, ::-1].swapaxes(0, 1),
    8: lambda a: a.swapaxes(0, 1)[::-1],
}
# What "P", "L" and the like have 8 bits for; "I" and "F" have a range that nobody says.
_8_BITS = {"1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "HSV"}


def decode_image(rule: ImageRule, source: Source, limits: MediaLimits) -> Media:
    """What a model is given of an image's or a frame's encoded bytes. Raises as `image_pixels`."""
    if source.data is None or source.kind == "audio" or source.kind == "video_file":
        raise ValueError("no image's bytes")
    return image_media(file_pixels(source.data, limits.pixels), rule, source.num_tokens, source.kind)


def file_pixels(data: bytes, max_pixels: int = MAX_PIXELS) -> NDArray[np.uint8]:
    """uint8 [height, width, 3], RGB, of a file of FORMATS, whatever its name or sender says that it is.

    Raises UsageError for another format, a damaged or truncated file, and for more than `max_pixels`, which its header
    tells before anything is decoded; ToolchainError where Pillow is not installed.
    """
    pil = _pillow()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a size that is refused below, and of damage that does not matter
            with pil.open(io.BytesIO(data), formats=FORMATS) as image:
                _check_size(image.size, max_pixels)
                image.load()
                return _rgb(image)
    except (KerngenError, MemoryError):
        raise
    except pil.DecompressionBombError as e:
        raise UsageError(f"the image has more than {min(max_pixels, 2 * pil.MAX_IMAGE_PIXELS):,} pixels") from e
    except pil.UnidentifiedImageError as e:
        raise UsageError(f"the image cannot be decoded: it is no {_NAMES} file") from e
    except Exception as e:  # what a damaged file makes a decoder raise is any of a dozen types
        raise UsageError("the image cannot be decoded: the file is damaged or truncated") from e


def image_pixels(image: Image.Image | NDArray[Any]) -> NDArray[np.uint8]:
    """uint8 [height, width, 3], RGB, of Pillow's image, or of an array [height, width], [height, width, 1, 3 or 4].

    Raises UsageError for another array, or for an image of a mode whose range is not known, such as "F".
    """
    if not isinstance(image, np.ndarray):
        if not isinstance(image, _pillow().Image):
            raise UsageError(f"an image is Pillow's or an array, not {type(image).__name__}")
        if not all(image.size):
            raise UsageError(f"an image of {image.width} x {image.height} pixels is none")
        return _rgb(image)
    array = image[..., None] if image.ndim == 2 else image
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] not in (1, 3, 4) or array.size == 0:
        raise UsageError(
            f"an image is a uint8 array [height, width, 3], not {image.dtype} {list(image.shape)}",
            hint="channels come last; grey may have one or no channel, and RGBA has four",
        )
    if array.shape[2] == 4:
        return _rgb(_pillow().fromarray(array))
    return np.ascontiguousarray(np.broadcast_to(array, (*array.shape[:2], 3)))


@cache
def _pillow() -> ModuleType:
    """Pillow's Image, with the plug-ins of FORMATS and none that it would look for."""
    try:
        from PIL import GifImagePlugin, Image, JpegImagePlugin, PngImagePlugin, WebPImagePlugin  # noqa: F401
    except ImportError as e:
        raise ToolchainError(f"images need Pillow: {e}", hint="pip install 'kerngen[media]'") from e
    return Image


def _rgb(image: Image.Image) -> NDArray[np.uint8]:
    orientation = _orientation(image)
    if image.mode.startswith("I;16"):
        array = _grey_of_16_bits(image)
    elif image.mode not in _8_BITS:
        raise UsageError(
            f"an image of mode {image.mode} cannot be taken: its range is not known",
            hint='convert it first: image.convert("RGB")',
        )
    elif image.has_transparency_data:
        over = image if image.mode == "RGBA" else image.convert("RGBA")
        white = _pillow().new("RGBA", image.size, (255, 255, 255, 255))
        array = np.asarray(_pillow().alpha_composite(white, over))[..., :3]
    else:
        array = np.asarray(image if image.mode == "RGB" else image.convert("RGB"))
    if (upright := _UPRIGHT.get(orientation)) is not None:
        array = upright(array)
    return np.ascontiguousarray(array)


def _grey_of_16_bits(image: Image.Image) -> NDArray[np.uint8]:
    """Its high byte, which is also what Pillow takes of 16-bit colours."""
    array = np.asarray(image)
    grey = (array >> 8).astype(np.uint8)
    if isinstance(see_through := image.info.get("transparency"), int):
        grey[array == see_through] = 255
    return np.repeat(grey[..., None], 3, axis=2)


def _orientation(image: Image.Image) -> int:
    """As EXIF has it; 1, upright, where it has none or cannot be read: viewers show such an image as it is stored."""
    try:
        value = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # as of a damaged file
        return 1
    return value if isinstance(value, int) else 1


def _check_size(size: tuple[int, int], max_pixels: int) -> None:
    width, height = size
    if width * height > max_pixels:
        raise UsageError(f"the image has {width} x {height} pixels: more than {max_pixels:,}")
