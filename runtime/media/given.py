"""Images, sounds and videos that a program has at hand: files, arrays, Pillow's images; as the sources of a prompt."""

from __future__ import annotations

import io
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kerngen.errors import ToolchainError, UsageError
from kerngen.runtime.media.images import FRAME_BUDGET
from kerngen.runtime.media.options import MediaSupport
from kerngen.runtime.media.parts import KINDS, Item, Message, item_of, require_place, source_of_url, video_of
from kerngen.runtime.media.sound import SAMPLE_RATE, from_samples
from kerngen.runtime.media.values import FileKind, Kind, Source

# A path, an encoded file's bytes, a data: or https:// URL, Pillow's image, or an array: of an image uint8 [height,
# width, 3], of sound floats or int16 [n] or [n, channels] at 16 kHz, or with its rate in Hz: (samples, 44100).
Given = Any
_FLOAT_WAV = 3
_LIBRARY_FIELDS = {"image": ("image", "url", "path"), "audio": ("audio", "url", "path")}  # as transformers names them
_VIDEO_FIELDS = ("video", "url", "path")


def require_list(name: str, found: Any) -> None:
    """Raises UsageError unless `found`, which argument `name` gave, is a list or the like; an array is one image."""
    if isinstance(found, str | bytes | bytearray | memoryview) or not isinstance(found, Sequence):
        raise UsageError(f"{name} is a list, also of one")


def said_with(prompt: str, files: Mapping[Kind, Sequence[Given]], media: MediaSupport) -> list[Message]:
    """The user's turn: `files` in their order, then what is said; text where that is all. Raises UsageError for what
    cannot be read.
    """
    for kind, found in files.items():
        require_list("audio" if kind == "audio" else f"{kind}s", found)
    items: list[str | Item] = [
        Item(kind, (source_of(given, "video_file" if kind == "video" else kind, f"{kind} {at}", media),))
        for kind, found in files.items()
        for at, given in enumerate(found, 1)
    ]
    return [{"role": "user", "content": [*items, prompt] if items else prompt}]


def with_items(messages: Sequence[Mapping[str, Any]], media: MediaSupport) -> list[Message]:
    """`messages`, where parts of a content are images and the like with these as Items; others are as they were.

    A part is one of OpenAI's, as a server takes it, or has what it is at hand: {"type": "image", "image": …},
    {"type": "audio", "audio": …}, {"type": "video", "video": …} with a file, or its frames, {"type": "video", "frames":
    […], "fps": 24}.
    """
    told: list[Message] = []
    for at, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list | tuple) or not any(map(_is_media, content)):
            told.append(message)  # type: ignore[arg-type]  # what is no message is refused as such later
            continue
        where = f"messages[{at}]"
        require_place(message.get("role"), where)
        parts = [_part(part, f"{where}.content[{n}]", media) for n, part in enumerate(content)]
        told.append({**message, "content": parts})
    return told


def _is_media(part: Any) -> bool:
    return isinstance(part, Item) or (isinstance(part, Mapping) and part.get("type") in KINDS)


def _part(part: Any, where: str, media: MediaSupport) -> str | Item:
    if isinstance(part, str | Item):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    if kind in _LIBRARY_FIELDS and (name := next((n for n in _LIBRARY_FIELDS[kind] if n in part), None)):
        return Item(KINDS[kind], (source_of(part[name], KINDS[kind], where, media),))
    if kind == "video" and "frames" not in part and (name := next((n for n in _VIDEO_FIELDS if n in part), None)):
        return Item("video", (source_of(part[name], "video_file", where, media),))
    if kind == "video":
        if isinstance(frames := part.get("frames"), np.ndarray) and frames.ndim == 4:
            part = {**part, "frames": list(frames)}
        return video_of(part, where, lambda frame, at: source_of(frame, "video", at, media))
    if isinstance(part, Mapping) and (item := item_of(part, where, media)) is not None:
        return item
    raise UsageError(f"{where} is neither text nor an image, a sound or a video")


def source_of(given: Given, kind: FileKind, where: str, media: MediaSupport) -> Source:
    """What `given` is. Raises UsageError for what it cannot be, ToolchainError where Pillow is not installed."""
    media.require(kind, where)
    num_tokens = FRAME_BUDGET if kind in ("video", "video_file") else None
    limits = media.options.limits
    if isinstance(given, bytes | bytearray | memoryview):
        return Source(kind, bytes(given), num_tokens=num_tokens)
    if isinstance(given, str) and given[:8].lower().startswith(("data:", "http://", "https://")):
        return source_of_url(given, kind, num_tokens, where, limits)
    if isinstance(given, str | os.PathLike):
        try:
            with Path(given).open("rb") as file:
                data = file.read(limits.file_bytes(kind) + 1)
        except (OSError, ValueError) as e:
            raise UsageError(f"{where}: {os.fspath(given)!r:.200} cannot be read: {getattr(e, 'strerror', e)}") from e
        if len(data) > limits.file_bytes(kind):
            raise UsageError(f"{where}: {os.fspath(given)!r:.200} has more than {limits.file_bytes(kind):,} bytes")
        return Source(kind, data, num_tokens=num_tokens, path=os.fsdecode(given))
    if kind == "video_file":
        raise UsageError(f"{where} is no video: a path, a file's bytes or a URL, not {type(given).__name__}",
                         hint='frames are {"type": "video", "frames": […], "fps": 24}')  # fmt: skip
    return Source(kind, _wav(given, where) if kind == "audio" else _png(given, where), num_tokens=num_tokens)


def _png(given: Any, where: str) -> bytes:
    """Without loss, and quickly: it is decoded again at once."""
    try:
        from PIL import Image
    except ImportError as e:
        raise ToolchainError(f"images need Pillow: {e}", hint="pip install 'kerngen[media]'") from e
    from kerngen.runtime.media.decoding import image_pixels

    if not isinstance(given, np.ndarray | Image.Image):
        raise UsageError(f"{where} is no image: a path, bytes, Pillow's image or an array, not {type(given).__name__}")
    into = io.BytesIO()
    try:
        # as RGB: a PNG of Pillow's loses how the camera was held
        Image.fromarray(image_pixels(given)).save(into, "PNG", compress_level=1)
    except UsageError as e:
        raise UsageError(f"{where}: {e.message}", hint=e.hint) from e
    except (OSError, ValueError) as e:  # of a file that is damaged, or was closed
        raise UsageError(f"{where} cannot be read: {e}") from e
    return into.getvalue()


def _wav(given: Any, where: str) -> bytes:
    """Of samples at 16 kHz, or with their rate beside them: a WAV file of float32 at 16 kHz, one channel."""
    samples, rate = given if isinstance(given, tuple) and len(given) == 2 else (given, SAMPLE_RATE)
    if isinstance(rate, bool) or not isinstance(rate, int | np.integer):
        raise UsageError(f"{where}: {rate!r:.80} is no rate of samples in Hz")
    try:
        array = np.asarray(samples)
    except (TypeError, ValueError) as e:  # lists of several lengths, a tensor on a GPU
        raise UsageError(f"{where} is no array of samples: {e}") from e
    try:
        data = from_samples(array, int(rate)).astype("<f4").tobytes()
    except UsageError as e:
        raise UsageError(f"{where}: {e.message}", hint=e.hint) from e
    about = struct.pack("<HHIIHH", _FLOAT_WAV, 1, SAMPLE_RATE, SAMPLE_RATE * 4, 4, 32)
    body = b"WAVEfmt " + struct.pack("<I", len(about)) + about + b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body
