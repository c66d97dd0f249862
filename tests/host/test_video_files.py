"""Video files: which frames are decoded and when they are shown, and what damaged, lying and foreign files do."""

from __future__ import annotations

import random
import socket
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from seeing import media_config, seeing_codec, shown
from videos import joined, number_of, picture, sound, video

from kerngen.errors import KerngenError, ToolchainError, UsageError
from kerngen.runtime.media.decoders import Decoders
from kerngen.runtime.media.decoding import decode_image
from kerngen.runtime.media.given import said_with, with_items
from kerngen.runtime.media.images import ImageRule, image_media
from kerngen.runtime.media.limits import MediaLimits
from kerngen.runtime.media.options import MediaOptions, MediaSupport
from kerngen.runtime.media.parts import items_of
from kerngen.runtime.media.prompt import encode_chat, place, prepared
from kerngen.runtime.media.values import Source
from kerngen.runtime.media.video import _fps, decode_video, video_frames

RULE = ImageRule()
SHORT = video(5)


@pytest.fixture(scope="module")
def decoders() -> Iterator[Decoders]:
    decode = {"video_file": partial(decode_video, RULE), "image": partial(decode_image, RULE)}
    with Decoders(decode, MediaLimits(decode_bytes=1 << 29, kept_bytes=0), num_processes=1) as found:
        yield found


def file(data: bytes) -> Source:
    return Source("video_file", data, num_tokens=70)


# ---- frames and times ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 5, 32, 33, 200])
@pytest.mark.parametrize(("form", "codec", "options"), [
    ("mp4", "mpeg4", {"bf": "2"}), ("mov", "mpeg4", {}), ("matroska", "mpeg4", {"bf": "2"}),
    ("webm", "libvpx", {"auto-alt-ref": "1", "lag-in-frames": "16"}), ("webm", "libvpx-vp9", {}),
    ("mp4", "libx264", {"x264-params": "open-gop=1:bframes=3"}),
], ids=["mp4", "mov", "mkv", "vp8", "vp9", "h264"])  # fmt: skip
def test_the_frames_of_the_rule_are_decoded(form: str, codec: str, options: dict[str, str], count: int) -> None:
    found = list(video_frames(video(count, form=form, codec=codec, fps=12.5, options=options)))
    wanted = (
        [int(i * count / 32) for i in range(32)] if count > 32 else list(range(count))
    )  # torch.arange(0, T, T / 32)
    assert [number_of(pixels) for _, pixels in found] == wanted
    assert [at for at, _ in found] == pytest.approx([n / 12.5 for n in wanted], rel=1e-3)
    assert {pixels.shape for _, pixels in found} == {(48, 64, 3)}


def test_one_key_frame_is_enough() -> None:
    found = list(video_frames(video(200, gop=300, options={"sc_threshold": "1000000000"})))
    assert [number_of(pixels) for _, pixels in found] == [int(i * 200 / 32) for i in range(32)]


def test_colours_are_those_that_were_filmed() -> None:
    ((_, pixels),) = video_frames(video(1))
    assert np.abs(pixels.astype(int) - picture(0)).mean() < 6


@pytest.mark.parametrize("degrees", [90, 180, 270])
def test_a_camera_that_was_turned_is_turned_back(degrees: int) -> None:
    """By the rotation of the file, which is counterclockwise, as np.rot90 is."""
    ((_, upright),) = video_frames(video(1, rotation=degrees))
    ((_, stored),) = video_frames(video(1))
    assert np.array_equal(upright, np.rot90(stored, degrees // 90))


def test_another_angle_is_refused() -> None:
    with pytest.raises(UsageError, match=r"turned by -?45 degrees"):
        list(video_frames(video(1, rotation=45)))


def test_a_rate_that_is_not_known_is_24() -> None:
    assert (_fps(None), _fps(Fraction(0)), _fps(Fraction(30_000, 1001))) == (24.0, 24.0, 30_000 / 1001)
    for mean in (Fraction(1, 20_000), Fraction(90_000)):
        with pytest.raises(UsageError, match="frames a second"):
            _fps(mean)


# ---- in a process, and in a prompt -----------------------------------------------------------------------------------


def test_each_frame_is_an_item_as_if_it_were_sent_alone(decoders: Decoders) -> None:
    (found,) = decoders.decode_all([file(SHORT)])
    assert (found.kind, found.times) == ("video", tuple(n / 24 for n in range(5)))
    wanted = [image_media(pixels, RULE, kind="video") for _, pixels in video_frames(SHORT)]
    frames = found.frames()
    assert [(m.kind, m.grid, m.num_tokens, m.digest) for m in frames] == [
        (m.kind, m.grid, m.num_tokens, m.digest) for m in wanted
    ]
    assert found.num_tokens == sum(m.num_tokens for m in wanted)
    assert all(np.array_equal(ours.data, theirs.data) for ours, theirs in zip(frames, wanted, strict=True))
    assert wanted[0].frames() == [wanted[0]], "any other item is one"


def test_its_times_stand_in_the_prompt(decoders: Decoders, tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_bytes(video(3, fps=0.4))
    codec = seeing_codec("newer")
    config = media_config(codec)
    support = MediaSupport(config, MediaOptions.parse("images"), decoders.decode_all)
    parts = [{"type": "text", "text": "What"}, {"type": "video", "video": tmp_path / "a.mp4"},
             {"type": "video", "video": SHORT}, {"type": "text", "text": "?"}]  # fmt: skip
    messages = with_items([{"role": "user", "content": parts}], support)
    told, media = prepared(messages, None, support)
    made = place(encode_chat(codec, told, {}, config), media, config)
    frame = f"<|image><|video|>*{media[0].num_tokens}<image|>"
    first = " ".join(f"{at} {frame}" for at in ("00:00", "00:02", "00:05"))
    assert f"What{first}{' '.join([f'00:00 {frame}'] * 5)}?" in shown(codec, made.ids)
    assert [p.media.digest for p in made.media[:3]] == [p.media.digest for p in made.media[3:6]], "the same pictures"
    assert len({p.media.digest for p in made.media}) == 5
    (turn,) = said_with("?", {"video": [tmp_path / "a.mp4"], "audio": []}, support)
    assert [item.sources for item in items_of([turn])] == [items_of(messages)[0].sources], "as /video has it in a chat"
    for wrong in (np.zeros((2, 4, 4, 3), np.uint8), 3):
        with pytest.raises(UsageError, match="is no video: a path, a file's bytes or a URL"):
            with_items([{"role": "user", "content": [{"type": "video", "video": wrong}]}], support)
    with pytest.raises(UsageError, match="start it with --media images"):
        with_items([{"role": "user", "content": parts}], replace(support, prepare=None))


def test_without_pyav_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ToolchainError) as found:
        list(video_frames(SHORT))
    assert "pip install 'kerngen[video]'" in str(found.value.hint)


# ---- limits ----------------------------------------------------------------------------------------------------------


def test_a_file_has_limits_of_its_own(decoders: Decoders) -> None:
    whole = decoders.limits
    large = video(250, codec="libx264", size=(720, 1280), gop=300, options={"preset": "ultrafast"})
    for limits, says in (
        ({"video_bytes": len(SHORT) - 1}, "video: the file has"),
        ({"pixels": 64 * 48 - 1}, "video: the video has frames of 64 x 48 pixels; 3,071 are the most"),
        ({"video_s": 0.05}, "video: the file takes more than 0.05 s to decode"),
        ({"decode_bytes": 1 << 21}, "video: the file takes more than 2 MB to decode"),
    ):  # fmt: skip
        decoders.limits = replace(whole, **limits)
        with pytest.raises(UsageError, match=says):
            decoders.decode_all([file(large if limits.keys() & {"video_s", "decode_bytes"} else SHORT)])
    decoders.limits = replace(whole, image_bytes=1, decode_s=0.001)
    assert len(decoders.decode_all([file(SHORT)])[0].times) == 5, "those of images are not a video's"
    decoders.limits = whole


def test_what_is_not_needed_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a long film with key frames the packets between the chosen frames are counted and passed over."""
    from av.video.frame import VideoFrame

    from kerngen.runtime.media import video as module

    long = video(4000, gop=10, options={"g": "10"})
    made = Counter[str]()
    whole = module._decoded

    class Counting:
        def __init__(self, codec: object) -> None:
            self._codec = codec

        def flush_buffers(self) -> None:
            self._codec.flush_buffers()  # type: ignore[attr-defined]

        def decode(self, packet: object) -> list[VideoFrame]:
            made["packets"] += 1
            return self._codec.decode(packet)  # type: ignore[attr-defined, no-any-return]

    monkeypatch.setattr(module, "_decoded", lambda codec, *rest: whole(Counting(codec), *rest))  # type: ignore[arg-type]
    found = list(video_frames(long))
    assert [number_of(p) for _, p in found] == [i * 125 % 256 for i in range(32)]
    assert 32 <= made["packets"] <= 32 * 12


# ---- files that are not what they say --------------------------------------------------------------------------------


def _with(data: bytes, atom: bytes, offset: int, value: int) -> bytes:
    """With four bytes of an atom's body changed."""
    at = data.index(atom) + 4 + offset
    return data[:at] + value.to_bytes(4, "big") + data[at + 4 :]


@pytest.mark.parametrize("value", [0, 1, 1 << 20, 0x7FFFFFFF, 0xFFFFFFFF])
@pytest.mark.parametrize(("atom", "offset"), [
    (b"mdhd", 12), (b"mdhd", 16), (b"mvhd", 16), (b"stsz", 8), (b"stts", 4), (b"stts", 8), (b"stts", 12),
    (b"stsc", 4), (b"stsc", 12), (b"stco", 4), (b"elst", 8),
], ids=lambda value: value.decode() if isinstance(value, bytes) else str(value))  # fmt: skip
def test_a_file_that_lies_ends_soon(decoders: Decoders, atom: bytes, offset: int, value: int) -> None:
    """About its length, its times, its number of samples: it gives what is there, or is refused, in bounded time."""
    data = _with(video(100), atom, offset, value)
    decoders.limits = replace(decoders.limits, video_s=5.0)
    says = "read"
    try:
        (found,) = decoders.decode_all([file(data)])
        assert 1 <= len(found.times) <= 32
    except UsageError as e:
        says = e.message
    assert "more than 5 s" not in says


def test_a_length_that_a_webm_claims_counts_for_nothing() -> None:
    data = video(40, form="webm", codec="libvpx")
    at = data.index(b"\x44\x89\x88") + 3  # Duration, a float of 8 bytes, in ms
    for length in (np.float64(1e12), np.float64(1.0), np.float64("nan")):
        lying = data[:at] + length.astype(">f8").tobytes() + data[at + 8 :]
        found = list(video_frames(lying))
        assert [number_of(pixels) for _, pixels in found] == [int(i * 40 / 32) for i in range(32)]
        assert found[-1][0] == pytest.approx(38 / 24)


def test_a_truncated_file_is_refused_or_ends_there() -> None:
    """An mp4's index is at its end; a webm has none and is read as far as it goes, as of a recording that was cut."""
    mp4, webm = video(100), video(100, form="webm", codec="libvpx")
    for count in (0, 7, 40, 300, len(mp4) // 2):
        with pytest.raises(UsageError, match="the video cannot be decoded"):
            list(video_frames(mp4[:count]))
    for count in (3, 40, 200):
        with pytest.raises(UsageError, match="the video cannot be decoded"):
            list(video_frames(webm[:count]))
    assert 1 < max(number_of(p) for _, p in video_frames(webm[: len(webm) // 2])) < 99


@pytest.mark.parametrize("seed", range(4))
def test_damage_is_an_error_of_the_request_or_does_not_matter(seed: int) -> None:
    draw = random.Random(seed)
    files = [video(40), video(40, form="webm", codec="libvpx"), video(40, codec="libx264")]
    found = Counter[str]()
    for _ in range(60):
        data = bytearray(draw.choice(files))
        for _ in range(draw.choice((1, 3, 20))):
            data[draw.randrange(len(data))] = draw.randrange(256)
        try:
            assert 1 <= len(list(video_frames(bytes(data)))) <= 32
            found["read"] += 1
        except UsageError:
            found["refused"] += 1
        except MemoryError:
            found["memory"] += 1
    assert min(found["read"], found["refused"]) > 0, "damage neither always matters nor never"


def test_a_file_whose_frames_change_their_size_is_refused() -> None:
    both = joined([video(3, form="matroska", codec="mjpeg", size=size) for size in ((48, 64), (96, 64))])
    with pytest.raises(UsageError, match="several sizes, such as 64 x 48 and 64 x 96"):
        list(video_frames(both))
    with pytest.raises(UsageError, match="damaged or truncated"):  # before there is memory for the larger ones
        list(video_frames(both, 64 * 48))


# ---- other formats ---------------------------------------------------------------------------------------------------


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """That nobody should connect to."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield server


@pytest.mark.parametrize("first", [b"", b"\0\0\0\x10ftypisom\0\0\0\0", b"\x1aE\xdf\xa3"], ids=["plain", "mp4", "webm"])
def test_playlists_and_scripts_are_refused_and_name_nothing_that_is_opened(
    listener: socket.socket, tmp_path: Path, first: bytes
) -> None:
    """Also behind the first bytes of a file that is read."""
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/a.ts"
    (tmp_path / "a.mp4").write_bytes(SHORT)
    named = [url, str(tmp_path / "a.mp4")]
    scripts = [s for name in named for s in (
        f"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{name}\n#EXT-X-ENDLIST\n",
        f"ffconcat version 1.0\nfile '{name}'\n",
        f'<MPD xmlns="urn:mpeg:dash:schema:mpd:2011" type="static"><Period><AdaptationSet><Representation id="0">'
        f"<BaseURL>{name}</BaseURL></Representation></AdaptationSet></Period></MPD>",
        f"v=0\no=- 0 0 IN IP4 127.0.0.1\nm=video {listener.getsockname()[1]} RTP/AVP 96\n",
    )]  # fmt: skip
    for script in scripts:
        with pytest.raises(UsageError, match="the video cannot be decoded"):
            list(video_frames(first + script.encode()))
    with pytest.raises(BlockingIOError):
        listener.accept()


@pytest.mark.parametrize(
    ("form", "codec"), [("avi", "mpeg4"), ("mpegts", "mpeg4"), ("flv", "flv"), ("mpeg", "mpeg1video")]
)
def test_other_formats_are_refused(form: str, codec: str) -> None:
    with pytest.raises(UsageError, match="it is no mp4, mov, webm or mkv file") as found:
        list(video_frames(video(3, form=form, codec=codec)))
    assert found.value.hint == "ffmpeg -i FILE video.mp4 makes one"


def test_other_codecs_are_refused() -> None:
    with pytest.raises(UsageError, match=r"not decoded here: H\.264"):
        list(video_frames(video(3, form="matroska", codec="ffv1")))


def test_a_file_without_video_is_refused() -> None:
    with pytest.raises(KerngenError, match="no video"):
        list(video_frames(sound()))
