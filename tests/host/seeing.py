"""A service whose checkpoint has tokens for images and sounds, and a template of each generation that writes them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import numpy as np
from played_engine import TINY, PlayedEngine, played_service
from starlette.testclient import TestClient
from tokenizers import AddedToken, Tokenizer

from kerngen.runtime.media.config import MediaConfig, read_media_config
from kerngen.runtime.media.limits import MediaLimits
from kerngen.runtime.media.options import MediaOptions, MediaSupport
from kerngen.runtime.media.values import Media, Placed, Source
from kerngen.runtime.serve.app import make_app
from kerngen.runtime.serve.service import Service
from kerngen.runtime.text import TextCodec
from kerngen.system.cancellation import Cancellation

NAMES = ("<|image>", "<|image|>", "<image|>", "<|audio>", "<|audio|>", "<audio|>", "<|video|>")
MAX_LEN = 1024
PNG = "data:image/png;base64,"

_TURNS = """{{ bos_token }}{% for m in messages %}{% if m.role != 'tool' %}<|turn>{{ m.role }}
{% if m.content is string %}{{ m.content | trim }}{% else %}{% for p in m.content %}PART{% endfor %}{% endif %}
{%- for c in m.tool_calls or [] %}<|tool_call>call:{{ c.function.name }}{}<tool_call|>{% endfor %}RESULTS<turn|>
{% endif %}{% endfor %}<|turn>model
"""
_OF_TOOLS = """{% for t in messages[loop.index0 + 1:] %}{% if t.role != 'tool' %}{% break %}{% endif -%}
<|tool_response>response:{{ t.name }}{ {%- if t.content is string %}{{ t.content }}{% else %}{% for p in t.content if \
p.type == 'text' %}{{ p.text }}{% endfor %}{% endif -%} }<tool_response|>MEDIA{% endfor %}"""
_KNOWN = "{% if p.type == 'image' %}IMAGE{% elif p.type == 'audio' %}<|audio|>{% elif p.type == 'video' %}<|video|>"
_PART = _KNOWN + "{% elif p.type == 'text' %}TEXT{% endif %}"


def _template(image: str, text: str, results: str) -> str:
    part = _PART.replace("IMAGE", image).replace("TEXT", text)
    media = "{% if t.content is not string %}{% for p in t.content %}" + _KNOWN.replace("IMAGE", "<|image|>")
    media += "{% endif %}{% endfor %}{% endif %}"
    return _TURNS.replace("RESULTS", results).replace("PART", part).replace("MEDIA", media)


# What each generation does with images, text parts and results of tools: their own words are not needed for that.
TEMPLATES = {
    "april": _template(
        "{{ '\\n\\n<|image|>\\n\\n' }}", "{{ p.text }}",
        "{% for t in m.tool_responses or [] %}<|tool_response>response:{{ t.name }}{ {{- t.response -}} }"
        "<tool_response|>{% endfor %}",
    ),
    "may": _template("<|image|>", "{{ p.text | trim }}", _OF_TOOLS.replace("MEDIA", "")),
    "newer": _template("<|image|>", "{{ p.text | trim }}", _OF_TOOLS),
}  # fmt: skip


@cache
def _folder() -> Path:
    """The tiny checkpoint's text with tokens for media; it is there until this process ends."""
    folder = Path(_KEPT.name)
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in NAMES])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text((TINY / "tokenizer_config.json").read_text())
    return folder


_KEPT = tempfile.TemporaryDirectory(prefix="kg-seeing-")


def seeing_codec(generation: str) -> TextCodec:
    (_folder() / "chat_template.jinja").write_text(TEMPLATES[generation])
    codec = TextCodec(_folder(), 2)
    assert codec.has_template
    return codec


def media_config(codec: TextCodec, **sections: object) -> MediaConfig:
    """Of a model that sees and hears, unless `sections` say None."""
    ids = [codec._tokenizer.token_to_id(name) for name in NAMES]
    begin_image, image, end_image, begin_audio, audio, end_audio, video = ids
    found = read_media_config({
        "model_type": "gemma4", "text_config": {"hidden_size": 64}, "vision_config": {}, "audio_config": {},
        "image_token_id": image, "audio_token_id": audio, "video_token_id": video, "boi_token_id": begin_image,
        "eoi_token_id": end_image, "boa_token_id": begin_audio, "eoa_token_index": end_audio, **sections,
    })  # fmt: skip
    assert found is not None
    return found


TIMES = (0.0, 25.9, 61.0)  # of the frames that the fake sees in any video file


def places(source: Source) -> int:
    """Soft tokens that the fake makes of a source: few, and others for each budget."""
    return 3 if source.kind == "audio" else (source.num_tokens or 280) // 35


@dataclass
class FakePrepare:
    """Takes any bytes for an image or a sound; remembers what it was given."""

    asked: list[list[Source]] = field(default_factory=list)
    fails: Exception | None = None

    def __call__(self, sources: Sequence[Source], cancellation: Cancellation) -> list[Media]:
        self.asked.append(list(sources))
        if self.fails is not None:
            raise self.fails
        return [self._media(source) for source in sources]

    def _media(self, source: Source) -> Media:
        if source.kind == "video_file":
            frames = np.arange(1, len(TIMES) + 1, dtype=np.uint8)[:, None, None].repeat(64, 2)
            return replace(Media.of("video", frames, (1, 1), 2 * len(TIMES)), times=TIMES)
        data = np.frombuffer((source.data or str(source.url).encode())[:64].ljust(64, b"\0"), np.uint8)
        return Media.of(source.kind, data.reshape(1, 64), (1, 1), places(source))


@dataclass
class Seeing:
    client: TestClient
    service: Service
    engine: PlayedEngine
    prepare: FakePrepare
    config: MediaConfig

    @property
    def sources(self) -> list[Source]:
        """Of the last request."""
        return self.prepare.asked[-1]

    @property
    def placed(self) -> tuple[Placed, ...]:
        return self.engine.media[-1]

    def prompt(self) -> str:
        """What the model read last, each run of placeholders as one with its length: <|image|>*8."""
        return shown(self.service.codec, self.engine.asked[-1][0])


def shown(codec: TextCodec, ids: Sequence[int]) -> str:
    """Tokens as text, runs of one placeholder as <|image|>*8."""
    parts: list[tuple[str, int]] = []
    for token in ids:
        text = codec.token_text(token)
        if parts and parts[-1][0] == text and text in NAMES:
            parts[-1] = text, parts[-1][1] + 1
        else:
            parts.append((text, 1))
    return "".join(f"{text}*{count}" if text in NAMES and text.endswith("|>") and text.startswith("<|") else text
                   for text, count in parts)  # fmt: skip


@contextmanager
def seeing(
    generation: str = "newer",
    *,
    options: str = "images,audio",
    limits: MediaLimits | None = None,
    script: Callable[[Sequence[int]], list[list[int]]] | None = None,
    **sections: object,
) -> Iterator[Seeing]:
    """A client of such a service. sections: of config.json, None for a tower that the model has not."""
    codec = seeing_codec(generation)
    config, prepare = media_config(codec, **sections), FakePrepare()
    service, engine = played_service(script)
    service.codec = codec
    service.config = replace(service.config, vocab_size=2048)
    service.ready = replace(service.ready, max_len=MAX_LEN)
    chosen = MediaOptions.parse(options, limits)
    service.media = MediaSupport(config, chosen, prepare if chosen.parts else None,
                                 placeholders=config.placeholders)  # fmt: skip
    with TestClient(make_app(service), raise_server_exceptions=False) as client:
        yield Seeing(client, service, engine, prepare, config)


def events(text: str) -> list[dict[str, object]]:
    """Of an OpenAI stream."""
    return [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line.startswith("data: {")]
