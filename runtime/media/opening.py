"""What of media a checkpoint's folder lets a session or a server read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kerngen.errors import CheckpointError, DeviceError, UsageError
from kerngen.runtime.config_fields import config_path, read_config
from kerngen.runtime.media.config import BOTH, MediaConfig, read_media_config, read_placeholders
from kerngen.runtime.media.input import MediaInput
from kerngen.runtime.media.limits import MediaLimits
from kerngen.runtime.media.options import MEDIA_FLAG, WORDS, MediaOptions, MediaSupport, flag_for, part_of
from kerngen.runtime.media.towers.dispatch import Towers, require_fits
from kerngen.runtime.media.values import FileKind, Media, Source
from kerngen.system.cancellation import Cancellation

if TYPE_CHECKING:
    from kerngen.runtime.media.decoders import Decode, Decoders


def open_support(folder: Path, options: MediaOptions) -> MediaSupport:
    """What the checkpoint in `folder` reads of what `options` ask for. No process is started before there is something
    to decode, or `prepare` is called with nothing.

    Raises UsageError where a part is asked for that the model has not, CheckpointError where config.json does not say
    how it is built; with at_first_use, and where nothing is asked for, requests are told instead.
    """
    path = config_path(folder)
    is_needed = bool(options.parts) and not options.at_first_use
    found = read_config(folder)
    placeholders = read_placeholders(found, str(path))
    try:
        config = read_media_config(found, str(path))
    except CheckpointError as e:
        if is_needed:
            raise
        return MediaSupport(None, options, fault=e.message, placeholders=placeholders)
    has = () if config is None else config.parts
    lacking = [part for part in BOTH if part in options.parts and part not in has]
    if lacking and is_needed:
        raise UsageError(f"{folder.name} reads no {WORDS[lacking[0]]}",
                         hint=f"leave out what asks for it: {MEDIA_FLAG}, or --image and --audio of kerngen run; "
                              f"{MEDIA_FLAG} auto takes what there is")  # fmt: skip
    if config is None or (asked := config.only(options.parts)) is None:
        return MediaSupport(config, options, placeholders=placeholders)
    return MediaSupport(config, options, _Prepare(asked, options.limits), placeholders=placeholders)


def open_input(
    support: MediaSupport, load: Callable[[MediaConfig], Towers], size: Callable[[MediaConfig], int]
) -> MediaInput | None:
    """What a model has beside its text part, None where nothing is asked for. load: gives the towers of the parts of a
    config; it is called here, or at_first_use with the first item that is embedded. size: bytes that these take.
    """
    config = None if support.config is None else support.config.only(support.options.parts)
    if config is None:
        return None
    placeholders = {kind: token for kind, token in config.placeholders.items() if part_of(kind) in config.parts}
    towers = _LoadedOnce(config, load, size)
    if not support.options.at_first_use:
        towers.load()
    return MediaInput(towers.embed, placeholders, config.images_see_themselves, partial(require_fits, config),
                      towers.unloaded_bytes, towers.warm_up)  # fmt: skip


class _LoadedOnce:
    """Towers that are loaded now, or by the first items that they embed."""

    def __init__(
        self, config: MediaConfig, load: Callable[[MediaConfig], Towers], size: Callable[[MediaConfig], int]
    ) -> None:
        self._config, self._load, self._size = config, load, cache(size)
        self._towers: Towers | None = None

    def load(self) -> Towers:
        if self._towers is None:
            self._towers = self._load(self._config)
        return self._towers

    def embed(self, items: Sequence[Media]) -> list[Tensor]:
        try:
            towers = self.load()
        except torch.OutOfMemoryError as e:
            raise DeviceError(f"the device has no memory left for the {self.unloaded_bytes() / 1e6:,.0f} MB of what "
                              f"embeds {' and '.join(WORDS[part] for part in self._config.parts)}",
                              hint=f"{flag_for(self._config.parts)} loads it at the start") from e  # fmt: skip
        return towers.embed(items)

    def warm_up(self) -> None:
        if self._towers is not None:
            self._towers.warm_up()

    def unloaded_bytes(self) -> int:
        return 0 if self._towers is not None else self._size(self._config)


class _Prepare:
    """Decodes in processes, which the first call starts."""

    def __init__(self, config: MediaConfig, limits: MediaLimits) -> None:
        self._config, self._limits = config, limits
        self._decoders: Decoders | None = None
        self._starting = threading.Lock()

    def __call__(self, sources: Sequence[Source], cancellation: Cancellation) -> list[Media]:
        """As `Decoders.decode_all`."""
        with self._starting:
            if self._decoders is None:
                self._decoders = _decoders(self._config, self._limits)
        return self._decoders.decode_all(sources, cancellation)


def _decoders(config: MediaConfig, limits: MediaLimits) -> Decoders:
    from kerngen.runtime.media.decoders import Decoders
    from kerngen.runtime.media.decoding import decode_image
    from kerngen.runtime.media.images import ImageRule
    from kerngen.runtime.media.sound import SoundRule, decode_sound
    from kerngen.runtime.media.video import decode_video

    decode: dict[FileKind, Decode] = {}
    if (vision := config.vision) is not None:
        rule = ImageRule(vision.patch_size, vision.pooling, vision.default_tokens)
        decode |= {"image": partial(decode_image, rule), "video": partial(decode_image, rule),
                   "video_file": partial(decode_video, rule)}  # fmt: skip
    if config.audio is not None:
        decode["audio"] = partial(decode_sound, SoundRule.of(config.audio))
    return Decoders(decode, limits)
