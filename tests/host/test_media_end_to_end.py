"""From files to tokens: a tiny checkpoint that sees and hears, opened as users open it, beside transformers."""

from __future__ import annotations

import base64
import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from served import served
from tiny_gemma import BASE, scramble
from tiny_towers import AUDIO, VISION
from tokenizers import AddedToken, Tokenizer
from tokens import write_tokenizer
from transformers import Gemma4AudioConfig, Gemma4Config, Gemma4ForConditionalGeneration, Gemma4TextConfig
from transformers import Gemma4VisionConfig as HfVisionConfig
from videos import video

import kerngen
from kerngen.errors import DeviceError, UsageError
from kerngen.runtime.chat import render_chat
from kerngen.runtime.conversation import Conversation
from kerngen.runtime.footprint import _bytes
from kerngen.runtime.media.config import MediaConfig
from kerngen.runtime.media.opening import open_input
from kerngen.runtime.media.options import LOCAL, MediaOptions
from kerngen.runtime.media.prompt import EncodedPrompt
from kerngen.runtime.media.towers.dispatch import Towers
from kerngen.runtime.session import Completion, Session
from kerngen.runtime.text import MEDIA_TOKENS
from kerngen.workload.generated_session import TEMPLATE as GENERATED_TEMPLATE
from kerngen.workload.generated_session import generated_tokenizer, load_generated

pytest.importorskip("PIL.Image", reason="Pillow is not installed: pip install 'kerngen[media]'")

NAMES = ("<|image>", "<|image|>", "<image|>", "<|audio>", "<|audio|>", "<audio|>", "<|video|>")
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|turn>{{ m.role }}\n{% if m.content is string %}{{ m.content | trim }}"
    "{% else %}{% for p in m.content %}{{ p.text if p.type == 'text' else '<|' + p.type + '|>' }}{% endfor %}"
    "{% endif %}<turn|>\n{% endfor %}{% if add_generation_prompt %}<|turn>model\n{% endif %}"
)
TYPES = {"image": 1, "video": 2, "audio": 3}  # mm_token_type_ids


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sees-and-hears")


@pytest.fixture(scope="module")
def model(folder: Path) -> Gemma4ForConditionalGeneration:
    write_tokenizer(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in NAMES])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    begin_image, image, end_image, begin_audio, audio, end_audio, video = (tokenizer.token_to_id(n) for n in NAMES)
    text = BASE | {"max_position_embeddings": 2048, "use_bidirectional_attention": "vision", "sliding_window": 16}
    config = Gemma4Config(
        text_config=Gemma4TextConfig(**text), vision_config=HfVisionConfig(**VISION),
        audio_config=Gemma4AudioConfig(**AUDIO), image_token_id=image, audio_token_id=audio, video_token_id=video,
        boi_token_id=begin_image, eoi_token_id=end_image, boa_token_id=begin_audio, eoa_token_index=end_audio,
    )  # fmt: skip
    config._attn_implementation = "eager"
    made = Gemma4ForConditionalGeneration(config).eval()
    scramble(made, seed=7)
    made.save_pretrained(folder)
    return made


@pytest.fixture(scope="module")
def session(folder: Path, model: Gemma4ForConditionalGeneration) -> Session:
    return kerngen.load(folder, draft=False, device="cpu", dtype="fp32", media="images,audio", max_len=1024)


def pixels(seed: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, (40, 56, 3), np.uint8)


def png(seed: int) -> bytes:
    from PIL import Image

    into = io.BytesIO()
    Image.fromarray(pixels(seed)).save(into, "PNG")
    return into.getvalue()


def hf_tokens(model: Gemma4ForConditionalGeneration, said: EncodedPrompt, count: int) -> list[int]:
    """What transformers says greedily, without placeholders, where it is given the same patches and frames."""
    ids, given = list(said.ids), dict[str, Any]()
    types = torch.zeros(1, len(ids) + count, dtype=torch.long)
    images, sounds = ([p.media for p in said.media if p.media.kind == kind] for kind in ("image", "audio"))
    for placed in said.media:
        types[0, placed.start : placed.end] = TYPES[placed.media.kind]
    if images:
        most = max(len(item.data) for item in images)
        patches = torch.zeros(len(images), most, images[0].data.shape[1])
        positions = torch.full((len(images), most, 2), -1)
        for i, item in enumerate(images):
            patches[i, : len(item.data)] = torch.tensor(item.data).float() / 255
            y, x = torch.meshgrid(torch.arange(item.grid[0]), torch.arange(item.grid[1]), indexing="ij")
            positions[i, : len(item.data)] = torch.stack((x, y), -1).view(-1, 2)
        given |= {"pixel_values": patches, "image_position_ids": positions}
    if sounds:
        (sound,) = sounds
        given["input_features"] = torch.tensor(sound.data)[None]
        given["input_features_mask"] = torch.ones(given["input_features"].shape[:2], dtype=torch.bool)
    placeholders = [model.config.image_token_id, model.config.audio_token_id, model.config.video_token_id]
    made: list[int] = []
    for _ in range(count):
        with torch.no_grad():
            out = model(torch.tensor([ids]), mm_token_type_ids=types[:, : len(ids)], **given).logits[0, -1]
        out[placeholders] = -torch.inf
        made.append(int(out.argmax()))
        ids.append(made[-1])
        if made[-1] in (1, 5):
            break
    return made


@pytest.mark.parametrize("number", [0, 1, 2])
def test_files_become_the_tokens_that_transformers_says(
    session: Session, model: Gemma4ForConditionalGeneration, number: int
) -> None:
    sound = np.random.default_rng(5).uniform(-0.5, 0.5, 8000).astype(np.float32)
    given: dict[str, Any] = [
        {"images": [png(1)], "max_soft_tokens": 70},
        {"images": [png(2), pixels(3)], "max_soft_tokens": 70, "audio": [sound]},
        {"audio": [sound]},
    ][number]  # type: ignore[assignment]
    said = session.encode_media("abc", **given)
    assert session.generate("abc", **given, max_new_tokens=6).tokens == hf_tokens(model, said, 6)


def test_another_image_is_another_answer_and_the_same_one_is_the_same(session: Session) -> None:
    def logprobs(seed: int) -> list[float]:
        made = session.generate("abc", images=[png(seed)], max_soft_tokens=70, max_new_tokens=3, logprobs=1)
        return [found.logprob for found in made.logprobs]

    assert logprobs(1) == pytest.approx(logprobs(1), abs=1e-5)
    assert logprobs(1) != pytest.approx(logprobs(2), abs=1e-3)


def test_text_is_what_it_is_without_towers(folder: Path, session: Session) -> None:
    alone = kerngen.load(folder, draft=False, device="cpu", dtype="fp32", media="none")
    assert alone.generate("abc", max_new_tokens=6).tokens == session.generate("abc", max_new_tokens=6).tokens
    with pytest.raises(UsageError, match="start it with --media images"):
        alone.generate("abc", images=[png(1)])


def test_what_is_needed_first_is_loaded_then(folder: Path, session: Session) -> None:
    """And has its room until then: what is told is what the tensors take once they are there."""
    later = kerngen.load(folder, draft=False, device="cpu", dtype="fp32")
    media, loaded = later.model.media, session.model.media
    assert media is not None
    assert loaded is not None
    expected = session.generate("abc", images=[png(1)], max_soft_tokens=70, max_new_tokens=4).tokens
    wanted = media.unloaded_bytes()
    assert loaded.unloaded_bytes() == 0
    assert later.generate("abc", images=[png(1)], max_soft_tokens=70, max_new_tokens=4).tokens == expected
    assert media.unloaded_bytes() == 0
    towers = cast(Any, media.embed).__self__.load()
    assert 1.0 <= wanted / _bytes(towers.weights) < 1.05, "bounds that are infinite are not kept"


def test_no_memory_for_what_is_needed_later_is_told_with_the_way_on(session: Session) -> None:
    def full(config: MediaConfig) -> Towers:
        raise torch.OutOfMemoryError("CUDA out of memory")

    support = replace(session.media, options=MediaOptions.parse("auto"))
    media = open_input(support, full, lambda config: 90_000_000)
    assert media is not None
    with pytest.raises(DeviceError, match=r"no memory left for the 90 MB of what embeds images and sound") as told:
        media.embed([])
    assert told.value.hint == "--media images,audio loads it at the start"


def test_a_server_reads_them_in_processes_of_its_own(folder: Path, session: Session) -> None:
    url = "data:image/png;base64," + base64.b64encode(png(1)).decode()
    part = {"type": "image_url", "image_url": {"url": url, "detail": "low"}}
    asked = {"messages": [{"role": "user", "content": [part, {"type": "text", "text": "abc"}]}], "max_tokens": 6,
             "temperature": 0}  # fmt: skip
    wanted = session.generate("abc", images=[png(1)], max_soft_tokens=70, max_new_tokens=6)
    with served("--media", "images", "--no-draft", "--context", "1024", "--dtype", "fp32", model=str(folder)) as server:
        media = server.http.get(f"{server.url}/v1/models").json()["data"][0]["media"]
        assert (media["image"], media["audio"], media["max_image_bytes"]) == (True, False, 20_000_000)
        answer = server.http.post(f"{server.url}/v1/chat/completions", json=asked)
        assert answer.status_code == 200, answer.text
        told = answer.json()
        assert told["choices"][0]["message"]["content"] == wanted.text
        assert told["usage"]["prompt_tokens"] == wanted.stats.num_prompt_tokens
        again = server.http.post(f"{server.url}/v1/chat/completions", json=asked).json()
        assert again["choices"][0]["message"]["content"] == wanted.text
        film = video(3)
        seen = [{"role": "user", "content": [{"type": "video", "video": film}, {"type": "text", "text": "abc"}]}]
        url = "data:video/mp4;base64," + base64.b64encode(film).decode()
        content = [{"type": "video_url", "video_url": {"url": url}}, {"type": "text", "text": "abc"}]
        said = {**asked, "messages": [{"role": "user", "content": content}]}
        answer = server.http.post(f"{server.url}/v1/chat/completions", json=said).json()
        watched = session.generate(seen, max_new_tokens=6)
        assert answer["choices"][0]["message"]["content"] == watched.text
        assert answer["usage"]["prompt_tokens"] == watched.stats.num_prompt_tokens > 3 * 60
        part["image_url"]["url"] = "data:image/png;base64," + base64.b64encode(png(1)[:200]).decode()  # type: ignore[index]
        answer = server.http.post(f"{server.url}/v1/chat/completions", json=asked)
        assert answer.status_code == 400
        assert "damaged or truncated" in json.dumps(answer.json())
        sound = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
        answer = server.http.post(
            f"{server.url}/v1/chat/completions", json={"messages": [{"role": "user", "content": [sound]}]}
        )
        assert (answer.status_code, "start it with --media audio" in answer.text) == (400, True)


def test_what_stands_for_media_is_never_said(folder: Path, session: Session) -> None:
    sees = kerngen.load(folder, draft=False, device="cpu", dtype="fp32", media="images")
    assert session.model.suppressed_ids == sees.model.suppressed_ids >= set(session.media.placeholders.values())
    alone = kerngen.load(folder, draft=False, device="cpu", dtype="fp32", media="none")
    assert not alone.model.suppressed_ids


def test_generated_weights_have_towers_too(folder: Path, session: Session) -> None:
    made = load_generated(
        folder, name=str(folder), draft=False, draft_weights="stored", kv_cache_dtype="auto", kv_cache_layout="apart",
        sparse_prefill=None, num_draft_tokens=None, backend="torch", dtype="fp32", device="cpu", db=None, bundle=None,
        media=MediaOptions.parse("images,audio", LOCAL),
    )  # fmt: skip

    def logprobs(seed: int) -> list[float]:
        answer = made.generate("abc", images=[png(seed)], max_soft_tokens=70, max_new_tokens=3, logprobs=1)
        return [found.logprob for found in answer.logprobs]

    assert logprobs(1) == pytest.approx(logprobs(1), abs=1e-5)
    assert logprobs(1) != pytest.approx(logprobs(2), abs=1e-5)


def test_generated_text_has_tokens_for_media() -> None:
    tokenizer = generated_tokenizer(max(MEDIA_TOKENS) + 1)
    assert {i: tokenizer.token_to_id(text) for i, text in MEDIA_TOKENS.items()} == {i: i for i in MEDIA_TOKENS}
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "da"}, {"type": "audio"}]}]
    rendered = render_chat(GENERATED_TEMPLATE, {"messages": messages, "bos_token": "<bos>"})
    ids = tokenizer.encode(rendered, add_special_tokens=False).ids
    assert [i for i in ids if i in MEDIA_TOKENS] == [258_880, 258_881]


def test_a_chat_sees_what_was_shown_before(session: Session) -> None:
    def said(seed: int) -> Completion:
        return session.generate("abc", images=[png(seed)], max_soft_tokens=70, max_new_tokens=4)

    seed = next(seed for seed in range(20) if said(seed).text)  # an answer without text is no turn of a chat
    chat = Conversation(session, max_new_tokens=4, context=1024, max_soft_tokens=70)
    first = chat.say("abc", images=[png(seed)])
    assert list(first)
    assert first.completion is not None
    assert first.completion.tokens == said(seed).tokens
    list(chat.say("def"))
    told = session.encode_media(chat.messages, max_soft_tokens=70)
    assert [placed.media.kind for placed in told.media] == ["image"]
    with pytest.raises(UsageError, match="is no image"):
        chat.say("ghi", images=[3])


def test_a_server_that_could_read_no_image_does_not_start(folder: Path, model: object) -> None:
    code = "import importlib.util as u, runpy\nfound = u.find_spec\n"
    code += "u.find_spec = lambda name, *more: None if name == 'PIL' else found(name, *more)\n"
    code += "runpy.run_module('kerngen', run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", code, "serve", str(folder), "--port", "0", "--backend", "torch", "--media", "images"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert "images need Pillow, which is not installed" in done.stderr, done.stderr
    assert "pip install 'kerngen[media]'" in done.stderr
    assert done.returncode == 1


@pytest.mark.parametrize("more", [(), ("--tensor-parallel", "2")], ids=["whole", "divided"])
def test_an_image_that_a_model_cannot_embed_ends_no_server(folder: Path, model: object, more: tuple[str, ...]) -> None:
    """The tiny checkpoint has places for 48 patches of a side, and an image's own budget takes more."""
    url = "data:image/png;base64," + base64.b64encode(png(1)).decode()

    def asked(detail: str) -> dict[str, Any]:
        parts = [{"type": "image_url", "image_url": {"url": url, "detail": detail}}, {"type": "text", "text": "abc"}]
        return {"messages": [{"role": "user", "content": parts}], "max_tokens": 4, "temperature": 0}

    options = ("--media", "images", "--no-draft", "--context", "1024", "--dtype", "fp32")
    with served(*options, *more, model=str(folder)) as server:
        where = f"{server.url}/v1/chat/completions"
        before = server.http.post(where, json=asked("low"))
        for _ in range(2):
            wrong = server.http.post(where, json=asked("auto"))
            assert (wrong.status_code, "the model knows 48 of a side" in wrong.text) == (400, True), wrong.text
        after = server.http.post(where, json=asked("low"))
        assert (before.status_code, after.status_code) == (200, 200)
        assert after.json()["choices"] == before.json()["choices"]
