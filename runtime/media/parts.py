"""Content parts of requests: which are images, sounds and videos, in the forms that clients send them.

Sources: OpenAI's API reference (image_url, input_audio, input_image); Anthropic's (image); vLLM 0.26 (audio_url,
video_url, mm_processor_kwargs). A video as its frames is kerngen's own.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kerngen.errors import UsageError
from kerngen.runtime.media.images import BUDGETS, DEFAULT_FPS, FRAME_BUDGET, MAX_FPS, frame_indices
from kerngen.runtime.media.limits import MAX_URL_CHARS, MediaLimits
from kerngen.runtime.media.options import HOST_FLAG, TEXT_ONLY, MediaSupport
from kerngen.runtime.media.values import FileKind, Kind, Source

DETAILS: dict[str, int | None] = {"low": 70, "auto": None, "high": 1120}  # soft tokens; None: the model's own
KINDS: dict[str, Kind] = {
    "image_url": "image", "input_image": "image", "image": "image", "video": "video", "video_url": "video",
    "input_audio": "audio", "audio_url": "audio", "audio": "audio",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Item:
    """What one placeholder of a chat template stands for. times: of a video's frames, in seconds; of a file with them,
    which is one source, none before it is decoded.
    """

    kind: Kind
    sources: tuple[Source, ...]
    times: tuple[float, ...] = ()

    def within(self, num_tokens: int | None) -> Item:
        """The same with so many soft tokens at most, if it is an image; None for as it was asked for."""
        if num_tokens is None or self.kind != "image":
            return self
        return replace(self, sources=tuple(replace(source, num_tokens=num_tokens) for source in self.sources))


Content = str | list[str | Item]  # of a message: a text, or texts and items in order
Message = dict[str, Any]  # role, content, and what else a template reads


def items_of(messages: Sequence[Mapping[str, Any]]) -> list[Item]:
    """The items of `messages`, in order."""
    return [
        part
        for message in messages
        if isinstance(message.get("content"), list)
        for part in message["content"]
        if isinstance(part, Item)
    ]


def text_in(content: Content) -> str:
    """What `content` says in words."""
    return content if isinstance(content, str) else "".join(part for part in content if isinstance(part, str))


def joined(parts: Sequence[str | Item], between: str = "") -> Content:
    """`parts` as content, texts that follow each other as one, with `between` in between."""
    made: list[str | Item] = []
    for part in parts:
        if isinstance(part, str) and made and isinstance(made[-1], str):
            made[-1] += between + part
        else:
            made.append(part)
    return made if any(isinstance(part, Item) for part in made) else "".join(map(str, made))


def item_of(part: Mapping[str, Any], where: str, media: MediaSupport = TEXT_ONLY) -> Item | None:
    """The item that `part` names, None where it names none. where: what errors call it.

    Raises UsageError for an item that is not read here (`media`), has another form, or is too large.
    """
    named = part.get("type")
    kind = KINDS.get(named) if isinstance(named, str) else None
    if kind is None:
        return None
    media.require(kind, where)
    limits = media.options.limits
    if named == "video_url":
        given = part.get("video_url")
        url = given.get("url") if isinstance(given, Mapping) else given
        return Item("video", (source_of_url(url, "video_file", FRAME_BUDGET, where, limits),))
    if named == "video":
        return video_of(part, where, lambda frame, at: source_of_url(frame, "video", FRAME_BUDGET, at, limits))
    if named == "input_audio":
        given = part.get("input_audio")
        data = given.get("data") if isinstance(given, Mapping) else None
        if not isinstance(data, str):
            raise UsageError(f'{where}: a sound is {{"input_audio": {{"data": base64, "format": "wav"}}}}')
        return Item("audio", (_of_base64(data, "audio", None, where, limits),))
    if named == "image" and isinstance(source := part.get("source"), Mapping):
        return Item("image", (_of_anthropic(source, where, limits),))
    if named in ("image_url", "input_image", "audio_url"):
        given = part.get("audio_url" if kind == "audio" else "image_url")
        url, detail = (given.get("url"), given.get("detail")) if isinstance(given, Mapping) else (given, None)
        return Item(kind, (source_of_url(url, kind, _budget(detail or part.get("detail"), where), where, limits),))
    raise UsageError(f"{where} is of type {named!r} and has no form that is read here: an image is "
                     '{"type": "image_url", "image_url": {"url": "data:image/png;base64,…"}}, a sound '
                     '{"type": "input_audio", "input_audio": {"data": base64, "format": "wav"}}')  # fmt: skip


def max_soft_tokens(given: Mapping[str, Any] | None) -> int | None:
    """Of a request's mm_processor_kwargs; None where they do not say. Raises UsageError."""
    for name, value in (given or {}).items():
        if name != "max_soft_tokens":
            raise UsageError(f"mm_processor_kwargs.{name!s:.80} is not there: max_soft_tokens is")
        if isinstance(value, bool) or value not in BUDGETS:
            raise UsageError(f"mm_processor_kwargs.max_soft_tokens {value!r:.80} is none of "
                             f"{', '.join(map(str, BUDGETS))}")  # fmt: skip
    return (given or {}).get("max_soft_tokens")


def require_few(items: Sequence[Item], limits: MediaLimits) -> None:
    """Raises UsageError for more items than a request may have."""
    if (count := sum(len(item.sources) for item in items)) > limits.items:
        raise UsageError(f"the request has {count:,} images, frames and sounds; {limits.items} are taken: "
                         "leave the oldest out")  # fmt: skip


def require_place(role: Any, where: str) -> None:
    """Raises UsageError for a message, which `where` names, that can have no images and sounds: templates drop them."""
    if role not in ("user", "tool"):
        raise UsageError(f"{where}: images and sounds are the user's, or what tools return; "
                         f"the turn of {role!r:.80} is text")  # fmt: skip


def _budget(detail: Any, where: str) -> int | None:
    if detail is None:
        return None
    if not isinstance(detail, str) or detail not in DETAILS:
        raise UsageError(f"{where}: detail {detail!r:.80} is none of {', '.join(DETAILS)}; "
                         "mm_processor_kwargs.max_soft_tokens says it in tokens")  # fmt: skip
    return DETAILS[detail]


def _of_anthropic(source: Mapping[str, Any], where: str, limits: MediaLimits) -> Source:
    if source.get("type") == "base64" and isinstance(source.get("data"), str):
        return _of_base64(source["data"], "image", None, where, limits)
    if source.get("type") == "url":
        return source_of_url(source.get("url"), "image", None, where, limits)
    raise UsageError(f"{where}.source is of type {source.get('type')!r:.80}; read here: base64, with data, and url")


def source_of_url(url: Any, kind: FileKind, num_tokens: int | None, where: str, limits: MediaLimits) -> Source:
    if not isinstance(url, str):
        raise UsageError(f"{where} has no url: data:image/png;base64,… or the like (files that were uploaded before "
                         "are not kept here)")  # fmt: skip
    scheme = url[:5].lower()
    if scheme == "data:":
        about, comma, data = url.partition(",")
        if not comma or not about.lower().endswith(";base64"):
            raise UsageError(f"{where}: a data: URL is data:TYPE;base64,DATA")
        return _of_base64(data, kind, num_tokens, where, limits)
    if not url.lower().startswith(("http://", "https://")):
        raise UsageError(f"{where}: only data: URLs are read, and https:// ones of hosts that are allowed; files of "
                         "the server are not")  # fmt: skip
    if not limits.hosts:
        raise UsageError(f"{where}: nothing is fetched here: send it as data:TYPE;base64,DATA, or start the server "
                         f"with {HOST_FLAG} HOST")  # fmt: skip
    if len(url) > MAX_URL_CHARS:
        raise UsageError(f"{where}: the URL has {len(url):,} characters; {MAX_URL_CHARS:,} are taken")
    return Source(kind, url=url, num_tokens=num_tokens)


def _of_base64(data: str, kind: FileKind, num_tokens: int | None, where: str, limits: MediaLimits) -> Source:
    if (size := len(data) * 3 // 4 - data[-2:].count("=")) > (most := limits.file_bytes(kind)):
        what = {"audio": "a sound", "video_file": "a video"}.get(kind, "an image")
        raise UsageError(f"{where} has {size:,} bytes; {what} of at most {most:,} is taken: send a smaller one")
    try:
        decoded = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as e:
        raise UsageError(f"{where} is no base64: {e}") from None
    if not decoded:
        raise UsageError(f"{where} is empty")
    return Source(kind, decoded, num_tokens=num_tokens)


def video_of(part: Mapping[str, Any], where: str, source: Callable[[Any, str], Source]) -> Item:
    """Of a part with frames in order, and how many of them are a second's. source: of a frame, and what names it."""
    frames, fps = part.get("frames"), part.get("fps", DEFAULT_FPS)
    if not isinstance(frames, Sequence) or isinstance(frames, str | bytes) or not len(frames):
        raise UsageError(f'{where}: a video is {{"type": "video", "frames": [data: URLs of images], "fps": 24}}, or '
                         'a file, {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,…"}}')  # fmt: skip
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not 1 / MAX_FPS <= fps <= MAX_FPS:
        raise UsageError(
            f"{where}.fps {fps!r:.80} is no number of frames a second, between {1 / MAX_FPS} and {MAX_FPS}"
        )
    chosen = frame_indices(len(frames))
    sources = [source(frames[i], f"{where}.frames[{i}]") for i in chosen]
    return Item("video", tuple(sources), tuple(i / fps for i in chosen))
