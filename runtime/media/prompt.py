"""A chat's messages with images and sounds as the tokens of a prompt, and where in it each of them stands.

Sources: Gemma4Processor of transformers 5.22 for what takes a placeholder's place; chat templates of
Gemma-4 of three generations for where they write one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kerngen.errors import UsageError
from kerngen.runtime.media.config import MediaConfig
from kerngen.runtime.media.images import time_text
from kerngen.runtime.media.options import MediaSupport
from kerngen.runtime.media.parts import Item, Message, items_of, text_in
from kerngen.runtime.media.values import Kind, Media, Placed
from kerngen.system.cancellation import Cancellation

if TYPE_CHECKING:
    from kerngen.runtime.text import TextCodec


_NAMES: dict[Kind, str] = {"image": "images", "video": "frames of videos", "audio": "sounds"}
TOLD = "told"  # a member of a tool's turn of which only images and the like are still to be told


class PlaceholderMismatch(UsageError):
    """The template wrote another number of placeholders than the chat has items."""


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """ids: a placeholder's id at each soft token of `media`, which are in the order in which they stand there."""

    ids: Sequence[int]
    media: tuple[Placed, ...] = ()


def template_form(messages: Sequence[Message]) -> list[Message]:
    """`messages` as a template reads them: with parts of type text, image, audio and video where there are items."""
    return [{**m, "content": _parts(m["content"])} if isinstance(m.get("content"), list) else m for m in messages]


def _parts(content: Sequence[str | Item]) -> list[dict[str, str]]:
    return [{"type": part.kind} if isinstance(part, Item) else {"type": "text", "text": part} for part in content]


def encode_chat(
    codec: TextCodec, messages: Sequence[Message], variables: Mapping[str, Any], config: MediaConfig | None, **how: Any
) -> list[int]:
    """Token ids of `messages`, with one placeholder for each item, and for each frame of a video: of a file once
    `prepared` tells their times. how: as in `TextCodec.encode_chat`.

    A template that drops what tools return beside text gets it in the user's turn behind. Raises PlaceholderMismatch
    where it writes another number of placeholders, else as `TextCodec.encode_chat`.
    """
    if config is None or not (items := items_of(messages)):
        return codec.encode_chat(messages, variables, **how)
    try:
        return _encode(codec, messages, variables, items, config, **how)
    except PlaceholderMismatch:
        moved = behind_tools(messages)
        if moved == list(messages):
            raise
        return _encode(codec, moved, variables, items_of(moved), config, **how)


def _encode(
    codec: TextCodec, messages: Sequence[Message], variables: Mapping[str, Any], items: Sequence[Item],
    config: MediaConfig, **how: Any,
) -> list[int]:  # fmt: skip
    videos = [_frames(codec, item, config) for item in items if item.kind == "video"]
    placeholder = codec.token(config.video_id)
    ids = codec.encode_chat(template_form(messages), variables, in_place_of={placeholder: videos} if videos else {},
                            **how)  # fmt: skip
    require_placeholders(ids, items, config)
    return ids


def _frames(codec: TextCodec, video: Item, config: MediaConfig) -> str:
    """What is written for a video: of each frame when it is seen, and one placeholder for it; of a file that is not
    decoded yet as for one frame.
    """
    frame = "".join(codec.token(i) for i in (config.begin_image, config.video_id, config.end_image))
    return " ".join(f"{time_text(at)} {frame}" for at in video.times or [0.0])


def require_placeholders(ids: Sequence[int], items: Sequence[Item], config: MediaConfig) -> None:
    """Raises PlaceholderMismatch where `ids` have another number of them than `items`, of any kind."""
    wanted = [item.kind for item in items for _ in item.times or item.sources]
    for kind, token in config.placeholders.items():
        count = sum(i == token for i in ids)
        if count != wanted.count(kind):
            raise PlaceholderMismatch(
                f"the chat has {wanted.count(kind)} {_NAMES[kind]}, and the model's chat template makes places for "
                f"{count}: put them into turns of the user, with a chat template that knows them"
            )


def behind_tools(messages: Sequence[Message]) -> list[Message]:
    """`messages` with what tools returned beside text in the user's turn behind them, which is made if there is none.

    A turn with TOLD, whose text is elsewhere, goes.
    """
    told: list[Message] = []
    waiting: list[str | Item] = []
    for message in [*messages, {"role": ""}]:
        content = message.get("content")
        if message["role"] == "tool":
            if isinstance(content, list):
                waiting += [
                    f"{message.get('name', 'The tool')} returned:",
                    *(p for p in content if isinstance(p, Item)),
                ]
                message = {**message, "content": text_in(content)}
            told += [] if TOLD in message else [message]
            continue
        if waiting and message["role"] == "user":
            said = content if isinstance(content, list) else [content] if content else []
            message = {**message, "content": [*waiting, *said]}
        elif waiting:
            told.append({"role": "user", "content": waiting})
        waiting = []
        told.append(message)
    return told[:-1]


def place(ids: Sequence[int], media: Sequence[Media], config: MediaConfig) -> EncodedPrompt:
    """`ids`, whose placeholders are those of `media`, kind by kind in order, with as many of them as each has soft
    tokens, between the tokens that begin and end it; those of a video's frames are in `ids` already.

    Raises PlaceholderMismatch.
    """
    kinds = {token: kind for kind, token in config.placeholders.items()}
    around: dict[Kind, tuple[Sequence[int], Sequence[int]]] = {
        "image": ([config.begin_image], [config.end_image]), "audio": ([config.begin_audio], [config.end_audio]),
        "video": ((), ()),
    }  # fmt: skip
    left = {kind: deque(item for item in media if item.kind == kind) for kind in around}
    made: list[int] = []
    placed: list[Placed] = []
    for token in ids:
        if token not in kinds:
            made.append(token)
            continue
        kind = kinds[token]
        begin, end = around[kind]
        if not left[kind]:
            raise PlaceholderMismatch(f"the prompt has more places for media ({kind}) than there are media")
        item = left[kind].popleft()
        made += begin
        placed.append(Placed(len(made), item))
        made += [token] * item.num_tokens
        made += end
    if any(left.values()):
        raise PlaceholderMismatch(f"the prompt has {len(placed)} places for {len(media)} images, frames and sounds")
    return EncodedPrompt(made, tuple(placed))


def prepared(
    messages: Sequence[Message], num_tokens: int | None, media: MediaSupport, cancellation: Cancellation | None = None
) -> tuple[list[Message], list[Media]]:
    """What a model is given of the items of `messages`, and of each frame of their videos, in order; and `messages`,
    in which video files have the times of their frames. num_tokens: of each image at most, None for its own.

    Raises UsageError; CancelledError where it is cancelled.
    """
    if media.prepare is None:
        raise UsageError("no images and sounds are read here")
    sources = [source for item in items_of(messages) for source in item.within(num_tokens).sources]
    made = media.prepare(sources, cancellation or Cancellation())
    if [m.kind for m in made] != ["video" if s.kind == "video_file" else s.kind for s in sources]:
        raise TypeError(f"{len(made)} media were prepared of {len(sources)} sources, or of other kinds")
    each = iter(made)
    told = [
        {**m, "content": [_timed(p, each) if isinstance(p, Item) else p for p in m["content"]]}
        if isinstance(m.get("content"), list)
        else m
        for m in messages
    ]
    return told, [frame for item in made for frame in item.frames()]


def _timed(item: Item, made: Iterator[Media]) -> Item:
    """With the times of what is `made` of its sources, where a file tells them."""
    times = [at for _ in item.sources for at in next(made).times]
    return replace(item, times=tuple(times)) if times else item
