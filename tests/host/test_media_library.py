"""Images and sounds that a program has at hand: as arguments of a session's calls, in messages, on the command line."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command import ROOT, Kerngen
from seeing import PNG, FakePrepare, media_config, seeing_codec, shown
from tiny_gemma import CPU

from kerngen.cli.chat import Files
from kerngen.errors import UsageError
from kerngen.runtime.media.decoding import file_pixels
from kerngen.runtime.media.given import source_of
from kerngen.runtime.media.limits import MediaLimits
from kerngen.runtime.media.opening import open_support
from kerngen.runtime.media.options import LOCAL, MediaOptions, MediaSupport
from kerngen.runtime.media.values import Source
from kerngen.runtime.media.wav import read_wav
from kerngen.runtime.ops.eager import TorchOps
from kerngen.runtime.session import Session, open_checkpoint

TINY = ROOT / "examples" / "tiny" / "gemma-4-tiny-w4a16"
IMAGE, SOUND = "<|image><|image|>*8<image|>", "<|audio><|audio|>*3<audio|>"


@pytest.fixture(scope="module")
def loaded() -> Session:
    return open_checkpoint(TINY, TorchOps(CPU, torch.float32))


@pytest.fixture
def session(loaded: Session) -> Session:
    """Text of a model that reads images and sound. Its weights are those of a model that does not."""
    codec = seeing_codec("newer")
    config = media_config(codec)
    loaded.codec, loaded.control_tokens = codec, False
    loaded.config = replace(loaded.config, vocab_size=2048)
    loaded.media = MediaSupport(config, MediaOptions.parse("images,audio", LOCAL), FakePrepare(),
                                placeholders=config.placeholders)  # fmt: skip
    return loaded


def asked(session: Session) -> list[Source]:
    assert isinstance(session.media.prepare, FakePrepare)
    return session.media.prepare.asked[-1]


def test_what_is_at_hand_stands_before_the_words(session: Session, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"png")
    (tmp_path / "b.wav").write_bytes(b"wav")
    images = [tmp_path / "a.png", str(tmp_path / "a.png"), b"bytes", PNG + "AAEC"]
    made = session.encode_media("What?", images=images, audio=[tmp_path / "b.wav"])
    text = f"<bos><|turn>user\n{IMAGE * 4}{SOUND}What?<turn|>\n<|turn>model"
    assert shown(session.codec, made.ids) == text
    assert [s.data for s in asked(session)] == [b"png", b"png", b"bytes", b"\0\1\2", b"wav"]
    ids = (session.media.config.image_id, session.media.config.audio_id)  # type: ignore[union-attr]
    assert [at for p in made.media for at in range(p.start, p.end)] == [i for i, t in enumerate(made.ids) if t in ids]
    assert session.encode("What?") == [i for i in made.ids if i < 1024], "and nothing else"


def test_pictures_and_arrays_are_files_without_loss() -> None:
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed: pip install 'kerngen[media]'")
    support = MediaSupport(
        media_config(seeing_codec("newer")), MediaOptions.parse("images,audio", LOCAL), FakePrepare()
    )
    pixels = np.random.default_rng(1).integers(0, 256, (5, 7, 3), np.uint8)
    for given in (pixels, image.fromarray(pixels)):
        data = source_of(given, "image", "image 1", support).data
        assert data is not None
        assert np.array_equal(np.asarray(image.open(io.BytesIO(data))), pixels)
    samples = np.random.default_rng(2).uniform(-1, 1, 400).astype(np.float32)
    for given in (samples, samples.astype(np.float64), (samples[:, None], 16_000)):
        wav = read_wav(source_of(given, "audio", "audio 1", support).data or b"")
        assert (wav.rate, wav.channels) == (16_000, 1)
        assert np.array_equal(wav.mono(), samples)
    halved = read_wav(source_of((samples * 0.5 * 32768).astype(np.int16), "audio", "audio 1", support).data or b"")
    assert np.allclose(halved.mono(), samples * 0.5, atol=1 / 32768)


def test_messages_have_parts_of_either_form(session: Session, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"png")
    parts: list[dict[str, Any]] = [
        {"type": "text", "text": "See"}, {"type": "image", "image": tmp_path / "a.png"},
        {"type": "image_url", "image_url": {"url": PNG + "AAEC", "detail": "low"}}, {"type": "text", "text": "hear"},
        {"type": "audio", "audio": np.zeros(400, np.float32)},
        {"type": "video", "frames": [tmp_path / "a.png", b"x"], "fps": 0.5},
    ]  # fmt: skip
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}]
    made = session.encode_media(messages)
    frame = "<|image><|video|>*2<image|>"
    said = f"See{IMAGE}<|image><|image|>*2<image|>hear{SOUND}00:00 {frame} 00:02 {frame}"
    assert shown(session.codec, made.ids) == (
        f"<bos><|turn>system\nBe brief.<turn|>\n<|turn>user\n{said}<turn|>\n<|turn>model"
    )
    assert [s.num_tokens for s in asked(session)] == [None, 70, None, 70, 70]
    assert parts[1]["image"] == tmp_path / "a.png", "what was given is as it was"
    session.encode_media(messages, max_soft_tokens=560)
    assert [s.num_tokens for s in asked(session)] == [560, 560, None, 70, 70]


def test_without_the_template_they_take_the_places_in_the_text(session: Session) -> None:
    session.control_tokens = True
    made = session.encode_media("<|image|> and <|audio|>", images=[b"x"], audio=[b"y"], chat=False)
    assert shown(session.codec, made.ids) == f"<bos>{IMAGE} and {SOUND}"
    with pytest.raises(UsageError, match="1 places for 2 images"):
        session.encode_media("<|image|>", images=[b"x", b"x"], chat=False)
    with pytest.raises(UsageError, match="holds a placeholder"):
        session.encode_media("<|image|>", chat=False)
    session.control_tokens = False
    with pytest.raises(UsageError, match="0 places for 1 images"):
        session.encode_media("<|image|>", images=[b"x"], chat=False)


def test_a_typed_placeholder_is_text_here_too(session: Session) -> None:
    made = session.encode_media("a <|image|> b", images=[b"x"])
    assert list(made.ids).count(session.media.config.image_id) == 8  # type: ignore[union-attr]
    assert "a <|image|> b" in session.codec.decode(made.ids)
    assert session.encode_media("a <|image|> b").media == ()


def test_pillows_images_are_what_their_files_are(session: Session) -> None:
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed: pip install 'kerngen[media]'")
    pixels = np.random.default_rng(0).integers(0, 256, (40, 56, 3), np.uint8)
    held = image.Exif()
    held[0x0112] = 6  # a camera that was turned
    for whole, form, options in (
        (image.fromarray(pixels), "JPEG", {"exif": held.tobytes()}),
        (image.fromarray(pixels).convert("CMYK"), "JPEG", {}),
        (image.fromarray(pixels).quantize(8), "PNG", {"transparency": 0}),
    ):
        whole.save(file := io.BytesIO(), form, **options)
        given = source_of(image.open(io.BytesIO(file.getvalue())), "image", "image 1", session.media)
        assert given.data is not None
        assert np.array_equal(file_pixels(given.data), file_pixels(file.getvalue()))
    with pytest.raises(UsageError, match="image 1: an image of 0 x 0 pixels is none"):
        source_of(image.new("RGB", (0, 0)), "image", "image 1", session.media)
    with pytest.raises(UsageError, match="image 1: an image of mode F"):
        source_of(image.new("F", (4, 4)), "image", "image 1", session.media)


def test_numbers_and_frames_of_numpy_are_numbers_and_frames(session: Session) -> None:
    pytest.importorskip("PIL.Image", reason="Pillow is not installed: pip install 'kerngen[media]'")
    samples = np.zeros(8000, np.float32)
    first, second = (
        source_of((samples, rate), "audio", "audio 1", session.media) for rate in (16_000, np.int64(16_000))
    )
    assert first.data == second.data
    video = {"type": "video", "frames": np.zeros((3, 4, 4, 3), np.uint8), "fps": 1}
    assert len(session.encode_media([{"role": "user", "content": [video]}]).media) == 3


@pytest.mark.parametrize(("arguments", "says"), [
    ({"images": b"x"}, "images is a list, also of one"),
    ({"audio": "a.wav"}, "audio is a list, also of one"),
    ({"images": ["/no/such/file.png"]}, "image 1: '/no/such/file.png' cannot be read: No such file"),
    ({"images": ["a\0b"]}, "image 1: 'a\\\\x00b' cannot be read"),
    ({"images": [PNG + "!"]}, "image 1 is no base64"),
    ({"images": ["https://example.org/a.png"]}, "nothing is fetched here"),
    ({"images": [np.zeros((2, 2), np.float32)]}, "uint8"),
    ({"images": np.zeros((2, 2, 3), np.uint8)}, "images is a list, also of one"),
    ({"audio": np.zeros(999, np.float32)}, "audio is a list, also of one"),
    ({"audio": [[[0.0], [1.0, 2.0]]]}, "audio 1 is no array of samples"),
    ({"images": [3]}, "image 1 is no image: a path, bytes, Pillow's image or an array, not int"),
    ({"audio": [(np.zeros(9, np.float32), "fast")]}, "audio 1: 'fast' is no rate of samples in Hz"),
    ({"audio": [np.zeros((2, 2, 2), np.float32)]}, "audio 1: "),
    ({"images": [b"x"], "max_soft_tokens": 100}, "max_soft_tokens 100 is none of 70"),
])  # fmt: skip
def test_what_cannot_be_right_is_said(session: Session, arguments: dict[str, Any], says: str) -> None:
    if "images" in arguments:
        pytest.importorskip("PIL.Image", reason="Pillow is not installed: pip install 'kerngen[media]'")
    with pytest.raises(UsageError) as error:
        session.encode_media("?", **arguments)
    assert says.replace("\\\\x00", "\\x00") in str(error.value)


def test_media_are_the_users_or_of_tools(session: Session) -> None:
    part = {"type": "image", "image": b"x"}
    for role in ("system", "assistant"):
        with pytest.raises(UsageError, match=rf"messages\[0\]: images and sounds are the user's.*'{role}'"):
            session.encode_media([{"role": role, "content": [part]}])
    with pytest.raises(UsageError, match="images and audio are for a prompt of text"):
        session.encode_media([{"role": "user", "content": "?"}], images=[b"x"])
    session.media = replace(session.media, options=MediaOptions.parse("images", replace(LOCAL, items=1)))
    with pytest.raises(UsageError, match="start it with --media audio"):
        session.encode_media("?", audio=[b"x"])
    with pytest.raises(UsageError, match="2 images, frames and sounds; 1 are taken"):
        session.encode_media("?", images=[b"x", b"x"])


# ---- what a folder lets be read --------------------------------------------------------------------------------------


def _folder(place: Path, config: str) -> Path:
    (place / "config.json").write_text(config)
    return place


def test_a_checkpoint_says_what_it_reads(tmp_path: Path) -> None:
    sees = _folder(tmp_path, '{"model_type": "gemma4", "text_config": {"hidden_size": 8}, "vision_config": {}}')
    support = open_support(sees, MediaOptions.parse("images"))
    assert (support.reads("image"), support.reads("video"), support.reads("audio")) == (True, True, False)
    assert "text and images, no sound" in support.lacks("audio")
    with pytest.raises(UsageError, match="reads no sound"):
        open_support(sees, MediaOptions.parse("images,audio"))
    assert open_support(sees, MediaOptions.parse("auto")).reads("image")
    asleep = open_support(sees, MediaOptions())
    assert "start it with --media images (or --media auto)" in asleep.lacks("image")


def test_a_tower_that_is_not_known_is_no_matter_for_text(tmp_path: Path) -> None:
    odd = _folder(tmp_path, '{"model_type": "gemma4", "text_config": {"hidden_size": 8}, "vision_config": '
                  '{"hidden_activation": "relu"}}')  # fmt: skip
    for text in ("none", "auto"):
        support = open_support(odd, MediaOptions.parse(text))
        assert "images cannot be read" in support.lacks("image")
        assert "relu" in support.lacks("image")
    with pytest.raises(Exception, match="relu"):
        open_support(odd, MediaOptions.parse("images"))


def test_a_host_is_a_name() -> None:
    assert MediaOptions.parse("images", MediaLimits(hosts=("images.example.com",))).limits.hosts
    with pytest.raises(UsageError, match="no host's name"):
        MediaLimits(hosts=("https://example.org/",))


# ---- the command line ------------------------------------------------------------------------------------------------


def refused(kerngen: Kerngen, *args: str) -> str:
    code, _, err = kerngen(*args)
    assert (code, "Traceback" in err) == (2, False), err
    return err


def test_run_takes_files(kerngen: Kerngen, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"png")
    image, common = ("--image", str(tmp_path / "a.png")), ("run", str(TINY), "--backend", "torch")
    said = refused(kerngen, *common, *image, "-p", "What is this?")
    assert said.startswith(f"UsageError: {TINY.name} reads no images")
    assert "--image" in said
    (tmp_path / "b.png").write_bytes(b"no image")
    files = ("--image", str(ROOT / "examples" / "tiny" / "cross.png"), "--image", str(tmp_path / "b.png"))
    seeing = ("run", str(TINY.parent / "gemma-4-tiny-unified"), "--backend", "torch")
    assert f"image {tmp_path / 'b.png'}: the image cannot be decoded" in refused(kerngen, *seeing, *files, "-p", "?")
    assert "there is no file /no/such.png" in refused(kerngen, *common, "--image", "/no/such.png", "-p", "?")
    video = ("--video", str(tmp_path / "a.png"))
    assert "there is no file /no/such.mp4" in refused(kerngen, *common, "--video", "/no/such.mp4", "-p", "?")
    assert "reads no images" in refused(kerngen, *common, *video, "-p", "?"), "videos are seen by the same part"
    assert "leave --media and --no-chat out" in refused(kerngen, *common, *video, "--no-chat", "-p", "?")
    for other in (("--media", "auto"), ("--no-chat",)):
        assert "leave --media and --no-chat out" in refused(kerngen, *common, *image, *other, "-p", "?")
    lines = tmp_path / "lines"
    lines.write_text('{"prompt": "?"}\n')
    assert "go with a prompt" in refused(kerngen, *common, *image, "--prompts", str(lines))
    assert "or a chat" in refused(kerngen, *common, "--image-tokens", "70", "--prompts", str(lines))
    assert "none of images, audio, auto and none" in refused(kerngen, *common, "--media", "sight", "-p", "?")
    hosts = ("--media", "none", "--allow-media-host", "example.org")
    assert "add --media images" in refused(kerngen, *common, *hosts, "-p", "?")


@pytest.mark.parametrize(("options", "says"), [
    (("--media", "all"), "none of images, audio, auto and none"),
    (("--allow-media-host", "example.org"), "add --media images"),
    (("--media", "images", "--allow-media-host", "http://x"), "no host's name"),
    (("--media", "images"), f"{TINY.name} reads no images"),
])  # fmt: skip
def test_serve_takes_what_is_to_be_loaded(kerngen: Kerngen, options: tuple[str, ...], says: str) -> None:
    assert says in refused(kerngen, "serve", str(TINY), "--backend", "torch", "--port", "0", *options)


def test_a_chat_gathers_files_for_the_next_message(tmp_path: Path) -> None:
    (tmp_path / "a b.png").write_bytes(b"png")
    files = Files()
    assert files.add("/image", f"{tmp_path}/a b.png") == "with the next message: a b.png"
    assert files.add("/audio", f"'{tmp_path}/a b.png'") == "with the next message: a b.png, a b.png"
    assert files.add("/image", "/no/such.png") == "there is no file /no/such.png"
    assert (len(files.images), len(files.audio)) == (1, 1)
    assert files.add("/image") == "with the next message: a b.png"
    assert files.add("/video", f"{tmp_path}/a b.png") == "with the next message: a b.png, a b.png"
    files.forget()
    assert files.add("/audio") == "nothing goes with the next message"
