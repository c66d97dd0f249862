"""Which images and sounds a session or a server takes: which towers were asked for, and who decodes for them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from kerngen.errors import UsageError
from kerngen.runtime.media.config import BOTH, MediaConfig, Part
from kerngen.runtime.media.limits import MediaLimits
from kerngen.runtime.media.values import FileKind, Kind, Media, Source
from kerngen.system.cancellation import Cancellation

MEDIA_FLAG, HOST_FLAG = "--media", "--allow-media-host"
_PARTS: dict[str, Part] = {"images": "vision", "audio": "audio"}  # as people call them
WORDS: dict[Part, str] = {"vision": "images", "audio": "sound"}

# Of what this machine's own user has at hand; decoders are bounded all the same.
LOCAL = MediaLimits(image_bytes=1 << 30, audio_bytes=1 << 30, video_bytes=1 << 30, pixels=170_000_000, decode_s=60.0,
                    video_s=300.0, items=256, soft_tokens=1 << 20)  # fmt: skip
# What a model is given of each source, in order, as Decoders.decode_all: fetched, decoded and cut to its tokens; of a
# video file all frames are one item. Until who asked cancels it.
Prepare = Callable[[Sequence[Source], Cancellation], list[Media]]


def flag_for(parts: Collection[Part]) -> str:
    """What asks for `parts`: "--media images,audio"."""
    return f"{MEDIA_FLAG} {','.join(name for name, part in _PARTS.items() if part in parts)}"


def part_of(kind: FileKind) -> Part:
    """The part of a model that embeds it."""
    return "audio" if kind == "audio" else "vision"


@dataclass(frozen=True, slots=True)
class MediaOptions:
    """parts: of the model, that are asked for. at_first_use: they are loaded with the first request that needs them,
    and one that the model lacks is no error; else at the start.
    """

    parts: frozenset[Part] = frozenset()
    at_first_use: bool = False
    limits: MediaLimits = field(default_factory=MediaLimits)

    @staticmethod
    def parse(text: str, limits: MediaLimits | None = None) -> MediaOptions:
        """Of "images", "audio", "images,audio", "auto" (both, at first use) or "none". Raises UsageError."""
        limits = limits or MediaLimits()
        parts = frozenset(BOTH) if text == "auto" else frozenset[Part]()
        if text not in ("auto", "none"):
            names = text.split(",")
            if unknown := [name for name in names if name not in _PARTS]:
                raise UsageError(f"{MEDIA_FLAG} {text}: {unknown[0]!r:.80} is none of images, audio, auto and none",
                                 hint=f"for example {MEDIA_FLAG} images,audio")  # fmt: skip
            parts = frozenset(_PARTS[name] for name in names)
        if limits.hosts and not parts:
            raise UsageError(f"{HOST_FLAG} is for what reads images or sound", hint=f"add {MEDIA_FLAG} images")
        return MediaOptions(parts, text == "auto", limits)


@dataclass(frozen=True, slots=True)
class MediaSupport:
    """What of media goes into prompts. config: what the checkpoint says, None where it reads text alone. prepare: None
    where no part is asked for. fault: why config.json cannot be read for it. placeholders: tokens that stand for items
    of a kind, which come with media alone, whether they are read here or not.
    """

    config: MediaConfig | None = None
    options: MediaOptions = field(default_factory=MediaOptions)
    prepare: Prepare | None = None
    fault: str = ""
    placeholders: Mapping[Kind, int] = field(default_factory=dict)

    def lacks(self, kind: FileKind) -> str:
        """Why `kind` is not read, with what to do; "" where it is."""
        part, config = part_of(kind), self.config
        if self.fault:
            return f"this model's {WORDS[part]} cannot be read: {self.fault}"
        has = () if config is None else config.parts
        if part not in has:
            reads = f"text and {WORDS[has[0]]}" if has else "text alone"
            return f"this model reads {reads}, no {WORDS[part]}: leave it out"
        if part not in self.options.parts or self.prepare is None:
            return f"{WORDS[part]}: not loaded here; start it with {flag_for([part])} (or {MEDIA_FLAG} auto)"
        return ""

    def reads(self, kind: FileKind) -> bool:
        return not self.lacks(kind)

    def require(self, kind: FileKind, where: str) -> None:
        """Raises UsageError where `kind` is not read. where: what names it."""
        if why := self.lacks(kind):
            raise UsageError(f"{where}: {why}")


TEXT_ONLY = MediaSupport()
