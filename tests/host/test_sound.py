"""Sound files and samples: what is read of them, what a model is given, and what is refused."""

from __future__ import annotations

import io
import random
import struct
import sys
import tracemalloc
import wave
from typing import Any

import numpy as np
import pytest
import soundfile
from numpy.typing import NDArray
from transformers import Gemma4AudioFeatureExtractor, Gemma4UnifiedAudioFeatureExtractor

from kerngen.errors import ToolchainError, UsageError
from kerngen.runtime.media.sound import (
    CONFORMER_SAMPLES,
    SoundRule,
    decode_sound,
    from_samples,
    read_sound,
    sound_media,
)
from kerngen.runtime.media.values import Source

MEL, RAW = SoundRule("mel", 128, CONFORMER_SAMPLES), SoundRule("samples", 640)
PCM, FLOAT, EXTENSIBLE = 1, 3, 0xFFFE
GUID_TAIL = bytes.fromhex("000000001000800000aa00389b71")
Floats = NDArray[np.float32]


def noise(samples: int, channels: int | None = None, seed: int = 0) -> Floats:
    shape = (samples,) if channels is None else (samples, channels)
    return np.random.default_rng(seed).uniform(-0.9, 0.9, shape).astype(np.float32)


def tone(seconds: float, rate: int, hertz: float = 440.0, level: float = 0.5) -> Floats:
    return (level * np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)).astype(np.float32)


def chunk(name: bytes, body: bytes, size: int | None = None) -> bytes:
    return name + struct.pack("<I", len(body) if size is None else size) + body + b"\0" * (len(body) % 2)


def fmt(tag: int, channels: int, rate: int, bits: int, *, frame: int | None = None, sub: int | None = None,
        valid: int | None = None, tail: bytes = GUID_TAIL, extra: int = 22) -> bytes:  # fmt: skip
    frame = channels * bits // 8 if frame is None else frame
    body = struct.pack("<HHIIHH", tag, channels, rate, rate * frame % 2**32, frame, bits)
    if sub is not None:
        body += struct.pack("<HHIH", extra, bits if valid is None else valid, 0, sub) + tail
    return chunk(b"fmt ", body)


def riff(*chunks: bytes, size: int | None = None) -> bytes:
    body = b"WAVE" + b"".join(chunks)
    return b"RIFF" + struct.pack("<I", len(body) if size is None else size) + body


def encoded(x: Floats, tag: int, bits: int) -> bytes:
    """Samples as a WAV holds them."""
    if tag == FLOAT:
        return x.astype(f"<f{bits // 8}").tobytes()
    whole = np.round(x.astype(np.float64) * 2 ** (bits - 1)).astype("<i4")
    if bits == 8:
        return (whole + 128).astype(np.uint8).tobytes()
    return np.ascontiguousarray(whole.reshape(-1, 1).view(np.uint8)[:, : bits // 8]).tobytes()


def wav(x: Floats, rate: int = 16_000, tag: int = PCM, bits: int = 16, **more: Any) -> bytes:
    return riff(fmt(tag, x.shape[1] if x.ndim == 2 else 1, rate, bits, **more), chunk(b"data", encoded(x, tag, bits)))


def packed(x: Floats, rate: int, form: str, subtype: str | None = None) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, x, rate, format=form, subtype=subtype)
    return file.getvalue()


# What a model is given


@pytest.fixture(scope="module")
def extractor() -> Any:
    return Gemma4AudioFeatureExtractor()


@pytest.mark.parametrize(
    "samples", [161, 320, 321, 400, 481, 1_000, 2_047, 2_048, 7_777, 16_000, 16_001, 123_456, 479_999, 480_000]
)
def test_log_mel_equals_transformers(extractor: Any, samples: int) -> None:
    x = noise(samples, seed=samples)
    made = extractor([x], return_tensors="np")
    want = made["input_features"][0][made["input_features_mask"][0]]
    media = sound_media(x, MEL)
    assert media.kind == "audio"
    assert media.data.dtype == np.float32
    assert media.data.shape == want.shape
    assert media.grid == (len(want), 1)
    assert np.abs(media.data - want).max() <= 1e-5
    assert (media.data[:, 0] == np.float32(np.log(0.001))).all(), "the first filter lies between two bins"


def test_silence_and_full_scale_equal_transformers(extractor: Any) -> None:
    for x in (np.zeros(2000, np.float32), np.ones(2000, np.float32), tone(1, 16_000, 1000, 1.0)):
        made = extractor([x], return_tensors="np")
        want = made["input_features"][0][made["input_features_mask"][0]]
        assert np.abs(sound_media(x, MEL).data - want).max() <= 1e-5


def test_token_counts_follow_the_mask_of_transformers(extractor: Any) -> None:
    """Every length: its frames' mask (each frame's 321st sample is sound), and every second of them, twice."""
    for samples in range(161, 4001):
        length = -(-samples // 128) * 128
        mask = np.pad(np.arange(length) < samples, (160, 0))
        mask[:160] = False
        frames = np.arange((length + 160 - 321) // 160 + 1)
        valid = mask[frames * 160 + 320]
        assert MEL.num_frames(samples) == valid.sum(), samples
        assert MEL.num_tokens(samples) == valid[::2][::2].sum(), samples
    for samples in (161, 1000, 1760, 1761, 3999):  # that this is its rule
        mask = extractor([noise(samples)], return_tensors="np")["input_features_mask"][0]
        assert mask.sum() == MEL.num_frames(samples)
    assert [MEL.num_frames(n) for n in (0, 1, 160, 161)] == [0, 0, 0, 1]
    assert (MEL.num_tokens(16_000), MEL.num_tokens(480_000)) == (25, 750)


@pytest.mark.parametrize("samples", [1, 639, 640, 641, 1_280, 16_001, 640_000])
def test_raw_frames_equal_transformers(samples: int) -> None:
    x = noise(samples, seed=samples)
    want = Gemma4UnifiedAudioFeatureExtractor()([x], return_tensors="np")["input_features"][0]
    media = sound_media(x, RAW)
    assert media.num_tokens == len(want) == -(-samples // 640) == RAW.num_tokens(samples)
    assert np.array_equal(media.data, want)


def test_the_digest_is_of_the_sound() -> None:
    x = noise(1_000)
    louder = x.copy()
    louder[999] += 0.25
    assert sound_media(x, RAW).digest == sound_media(x.copy(), RAW).digest
    assert sound_media(x, RAW).digest != sound_media(louder, RAW).digest
    assert sound_media(x, RAW).digest != sound_media(x, MEL).digest


def test_longer_sound_is_refused_or_cut_where_that_is_asked() -> None:
    x = noise(480_001)
    with pytest.raises(UsageError, match=r"30\.00 s long, and this model hears 30 s"):
        sound_media(x, MEL)
    assert sound_media(x, MEL, cut=True).digest == sound_media(x[:480_000], MEL).digest
    assert sound_media(x, RAW).num_tokens == 751
    assert sound_media(x, RAW, cut=True).num_tokens == 751


def test_what_an_encoder_adds_to_a_file_of_full_length_is_cut() -> None:
    padded = decode_sound(MEL, Source("audio", wav(noise(480_000 + 1_600))), None)
    assert padded.digest == decode_sound(MEL, Source("audio", wav(noise(480_000 + 1_600)[:480_000])), None).digest
    with pytest.raises(UsageError, match=r"30\.10 s long"):
        decode_sound(MEL, Source("audio", wav(noise(480_000 + 1_601))), None)


@pytest.mark.parametrize(("samples", "rule"), [(0, MEL), (1, MEL), (160, MEL), (0, RAW)])
def test_sound_without_a_token_is_refused(samples: int, rule: SoundRule) -> None:
    with pytest.raises(UsageError, match=f"a sound of {samples} samples gives no token"):
        sound_media(noise(samples), rule)


def test_what_is_no_sound_is_refused() -> None:
    for bad in (np.nan, np.inf, -32768.0):
        x = noise(500)
        x[17] = bad
        with pytest.raises(UsageError, match="samples reach"):
            sound_media(x, MEL)
        with pytest.raises(UsageError, match="samples reach"):
            read_sound(wav(x, tag=FLOAT, bits=32))
    with pytest.raises(UsageError, match="samples reach inf"):
        read_sound(riff(fmt(FLOAT, 1, 16_000, 64), chunk(b"data", struct.pack("<d", 1e300))))
    with pytest.raises(UsageError, match="float64"):
        sound_media(noise(500).astype(np.float64), MEL)  # type: ignore[arg-type]


def test_a_source_becomes_what_the_model_is_given() -> None:
    x = noise(1_000)
    source = Source("audio", wav(x, tag=FLOAT, bits=32))
    assert decode_sound(MEL, source, None).digest == sound_media(x, MEL).digest
    with pytest.raises(UsageError, match=r"31\.00 s long"):
        decode_sound(MEL, Source("audio", wav(noise(31 * 16_000))), None)
    for other in (Source("image", b"x"), Source("audio", url="https://example.com/a.wav")):
        with pytest.raises(ValueError, match="no sound's bytes"):
            decode_sound(MEL, other, None)


# WAV

FORMS = [(PCM, 8), (PCM, 16), (PCM, 24), (PCM, 32), (FLOAT, 32), (FLOAT, 64)]


@pytest.mark.parametrize(("tag", "bits"), FORMS)
@pytest.mark.parametrize("channels", [1, 2, 6])
@pytest.mark.parametrize("extensible", [False, True])
def test_every_form_of_wav_round_trips(tag: int, bits: int, channels: int, extensible: bool) -> None:
    x = noise(70_001, channels, seed=bits)  # more than is converted at a time
    made = riff(
        chunk(b"LIST", b"odd"),
        fmt(EXTENSIBLE, channels, 16_000, bits, sub=tag) if extensible else fmt(tag, channels, 16_000, bits),
        chunk(b"fact", b"\0\0\0\0"),
        chunk(b"data", encoded(x, tag, bits)),
        chunk(b"junk", b"behind the data"),
    )
    got = read_sound(made)
    assert got.dtype == np.float32
    assert np.abs(got - x.mean(axis=1)).max() <= (2.0**-bits if tag == PCM and bits < 24 else 2.0**-23)


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_what_pythons_wave_writes_is_read_exactly(width: int) -> None:
    x = noise(999, seed=width)
    raw = encoded(x, PCM, 8 * width)
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(width)
        out.setframerate(16_000)
        out.writeframes(raw)
    whole = [int.from_bytes(raw[i : i + width], "little", signed=width > 1) for i in range(0, len(raw), width)]
    full = 2 ** (8 * width - 1)
    want = np.array([(v - 128 if width == 1 else v) / full for v in whole]).astype(np.float32)
    assert np.array_equal(read_sound(file.getvalue()), want)


@pytest.mark.parametrize("subtype", ["PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE"])
@pytest.mark.parametrize("form", ["WAV", "WAVEX"])
def test_wav_is_read_as_libsndfile_reads_it(subtype: str, form: str) -> None:
    x = noise(1_000, 2)
    made = packed(x, 16_000, form, subtype)
    want = soundfile.read(io.BytesIO(made), dtype="float64", always_2d=True)[0].mean(axis=1)
    assert np.array_equal(read_sound(made), want.astype(np.float32))


def test_a_piped_wav_goes_on_to_its_end() -> None:
    """ffmpeg and speech services write 2^32 - 1 for a length that they do not know yet."""
    x = noise(500)
    body = fmt(PCM, 1, 16_000, 16) + chunk(b"data", encoded(x, PCM, 16), 0xFFFFFFFF)
    for size in (0xFFFFFFFF, 0):
        assert len(read_sound(riff(body, size=size))) == 500
    assert len(read_sound(riff(body + b"\1", size=0xFFFFFFFF))) == 500


GOOD = fmt(PCM, 1, 16_000, 16)
DATA = chunk(b"data", b"\0\0" * 100)
BAD_WAVS = {
    "empty": (riff(), "no data chunk"),
    "not wave": (b"RIFF\4\0\0\0AVI ", "RIFF and WAVE"),
    "torn header": (b"RIFF\4\0", "RIFF and WAVE"),
    "lying riff": (riff(GOOD, DATA, size=10_000), r"says 10,008 bytes and \d+ are there"),
    "lying data": (riff(GOOD, chunk(b"data", b"\0\0", 2**31)), "says 2,147,483,648 bytes and 2 are there"),
    "lying chunk": (riff(GOOD, chunk(b"LIST", b"", 2**32 - 2), DATA), "a chunk says 4,294,967,294 bytes"),
    "data first": (riff(DATA, GOOD), "before their format"),
    "two formats": (riff(GOOD, GOOD, DATA), "two format chunks"),
    "short format": (riff(chunk(b"fmt ", b"\1\0\1\0"), DATA), "has 4 bytes, not 16"),
    "no channels": (riff(fmt(PCM, 0, 16_000, 16), DATA), "0 channels"),
    "rate 0": (riff(fmt(PCM, 1, 0, 16), DATA), "1 channels at 0 Hz"),
    "rate huge": (riff(fmt(PCM, 1, 2**32 - 1, 16), DATA), "4,294,967,295 samples a second"),
    "rate tiny": (riff(fmt(PCM, 1, 1, 16), DATA), "1 samples a second"),
    "channels huge": (riff(fmt(PCM, 32_000, 16_000, 8), chunk(b"data", b"\0" * 32_000)), "32,000 channels"),
    "frame": (riff(fmt(PCM, 2, 16_000, 16, frame=2), DATA), "frames have 2 bytes, and 2 channels of 16 bits have 4"),
    "frame 0": (riff(fmt(PCM, 1, 16_000, 16, frame=0), DATA), "frames have 0 bytes"),
    "bits 0": (riff(fmt(PCM, 1, 16_000, 0), DATA), "PCM of 0 bits"),
    "bits 12": (riff(fmt(PCM, 1, 16_000, 12, frame=2), DATA), "PCM of 12 bits"),
    "float of 16": (riff(fmt(FLOAT, 1, 16_000, 16), DATA), "float of 16 bits"),
    "ADPCM": (riff(fmt(0x11, 1, 16_000, 4), DATA), "IMA ADPCM"),
    "unknown": (riff(fmt(0x1234, 1, 16_000, 16), DATA), "format 0x1234"),
    "no samples": (riff(GOOD, chunk(b"data", b"")), "holds no samples"),
    "part of a frame": (riff(fmt(PCM, 2, 16_000, 16), chunk(b"data", b"\0" * 6)), "no whole number of frames of 4"),
    "extensible, short": (riff(fmt(EXTENSIBLE, 1, 16_000, 16), DATA), "has 16 bytes, not 40"),
    "extensible, extra": (riff(fmt(EXTENSIBLE, 1, 16_000, 16, sub=PCM, extra=2), DATA), "2 bytes more"),
    "extensible, valid": (riff(fmt(EXTENSIBLE, 1, 16_000, 16, sub=PCM, valid=17), DATA), "17 valid bits of 16"),
    "extensible, GUID": (riff(fmt(EXTENSIBLE, 1, 16_000, 16, sub=PCM, tail=b"\0" * 14), DATA), "none of PCM or float"),
    "extensible, itself": (riff(fmt(EXTENSIBLE, 1, 16_000, 16, sub=EXTENSIBLE), DATA), "format 0xfffe"),
    "chunks": (riff(GOOD, *[chunk(b"LIST", b"")] * 1001, DATA), "more than 1,000 chunks"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_WAVS)
def test_a_bad_wav_is_refused_by_name(name: str) -> None:
    data, why = BAD_WAVS[name]
    with pytest.raises(UsageError, match=why):
        read_sound(data)


def mutated(rng: random.Random, good: bytes) -> bytes:
    """Bytes changed, mostly in the header; cut; repeated; sizes put to extremes."""
    data = bytearray(good)
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(min(len(data), 96) if rng.random() < 0.8 else len(data))
        match rng.randrange(6):
            case 0:
                data[at] = rng.randrange(256)
            case 1:
                data[at : at + 4] = struct.pack("<I", rng.choice([0, 1, 2**31 - 1, 2**31, 2**32 - 1, len(data)]))
            case 2:
                data[at : at + 2] = struct.pack("<H", rng.choice([0, 1, 3, 8, 12, 24, 65535, EXTENSIBLE]))
            case 3 if len(data) > 64:
                del data[rng.randrange(len(data)) :]
            case 4:
                data[at:at] = data[at : at + rng.randrange(64)]
            case _:
                del data[at : at + rng.randrange(8)]
        if not data:
            return b""
    return bytes(data)


def fuzz(goods: list[bytes], rounds: int, seed: int) -> tuple[int, int]:
    """(read, refused). Anything but a sound or a UsageError fails, as does a sound longer than the limit."""
    rng = random.Random(seed)
    read = refused = 0
    for _ in range(rounds):
        data = mutated(rng, rng.choice(goods))
        try:
            sound = read_sound(data, max_seconds=2.0)
        except UsageError:
            refused += 1
            continue
        read += 1
        assert sound.dtype == np.float32
        assert sound.ndim == 1
        assert len(sound) <= 32_001, data[:64].hex()
        assert np.isfinite(sound).all(), data[:64].hex()
    return read, refused


def test_damaged_wavs_are_read_or_refused_and_take_no_memory() -> None:
    goods = [wav(noise(300, 2), 22_050, tag, bits) for tag, bits in FORMS]
    goods.append(wav(noise(300, 2), 16_000, EXTENSIBLE, 16, sub=PCM))
    tracemalloc.start()
    read, refused = fuzz(goods, 600, seed=1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert read > 50, "mutations that leave nothing to read test the header alone"
    assert refused > 50
    assert peak < 4_000_000, f"{peak:,} bytes for files of {max(map(len, goods)):,}"


# Other files


@pytest.mark.parametrize(("form", "subtype", "tolerance"), [
    ("FLAC", "PCM_16", 2e-5), ("FLAC", "PCM_24", 2e-7), ("OGG", "VORBIS", 0.05), ("OGG", "OPUS", 0.1),
    ("MP3", None, 0.05),
])  # fmt: skip
def test_compressed_sound_is_read(form: str, subtype: str | None, tolerance: float) -> None:
    x = np.stack([tone(1.0, 16_000), tone(1.0, 16_000, 1000.0, 0.25)], axis=1)
    got = read_sound(packed(x, 16_000, form, subtype))
    want = x.mean(axis=1)
    assert abs(len(got) - len(want)) <= (0 if tolerance < 1e-3 else 1600)
    if tolerance < 1e-3:
        assert np.abs(got - want).max() <= tolerance
    spectrum = np.abs(np.fft.rfft(got[4000:12000])) / 4000  # 2 Hz a bin
    assert abs(spectrum[220] - 0.25) <= tolerance
    assert abs(spectrum[500] - 0.125) <= tolerance
    assert np.delete(spectrum, [*range(218, 223), *range(498, 503)]).max() < 0.01


@pytest.mark.parametrize("form", ["FLAC", "OGG", "MP3"])
def test_damaged_compressed_sound_is_read_or_refused(form: str) -> None:
    _, refused = fuzz([packed(noise(8000), 16_000, form)], 60, seed=2)
    assert refused > 5


def test_torn_flac_is_refused() -> None:
    whole = packed(noise(16_000), 16_000, "FLAC")
    with pytest.raises(UsageError, match="cannot be decoded"):
        read_sound(whole[: len(whole) // 2])


@pytest.mark.parametrize("head", [b"OggS", b"fLaC", b"ID3\3"])
def test_what_libsndfile_says_names_no_address(head: bytes) -> None:
    with pytest.raises(UsageError, match=r"cannot be (decoded|read)") as found:
        read_sound(head + b"\1" * 4096)
    assert "0x" not in found.value.message


@pytest.mark.parametrize("data", [b"", b"\0" * 100, b"hello", b"RIFX\0\0\0\0WAVE", b"\x89PNG\r\n", b"\xff\xd8\xff\xe0"])
def test_what_is_no_sound_file_is_refused(data: bytes) -> None:
    with pytest.raises(UsageError, match="no WAV, MP3, FLAC or Ogg"):
        read_sound(data)


def test_an_aiff_behind_a_tag_of_mp3_is_refused() -> None:
    with pytest.raises(UsageError):
        read_sound(b"ID3" + packed(noise(100), 16_000, "AIFF"))


def test_a_long_sound_is_refused_before_it_is_converted() -> None:
    quiet = riff(fmt(PCM, 1, 8_000, 8), chunk(b"data", b"\x80" * 8_000_000))
    tracemalloc.start()
    with pytest.raises(UsageError, match=r"1000\.00 s long; 600 s are the most"):
        read_sound(quiet)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000
    flac = packed(np.zeros(16_000 * 60, np.float32), 16_000, "FLAC")
    assert len(flac) < 20_000, "silence is small in a file, and not in memory"
    with pytest.raises(UsageError, match="more than 5 s long"):
        read_sound(flac, max_seconds=5.0)


@pytest.mark.parametrize("package", ["soundfile", "soxr"])
def test_a_missing_package_is_named_with_its_extra(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    data = packed(noise(8000), 16_000, "FLAC") if package == "soundfile" else wav(noise(8000), 44_100)
    with pytest.raises(ToolchainError, match=package) as e:
        read_sound(data)
    assert "pip install 'kerngen[media]'" in (e.value.hint or "")
    assert len(read_sound(wav(noise(100)))) == 100, "WAV of 16 kHz needs neither"


# Other rates


@pytest.mark.parametrize("rate", [8_000, 11_025, 22_050, 44_100, 48_000, 96_000])
@pytest.mark.parametrize("hertz", [440.0, 3_000.0])
def test_resampling_keeps_frequency_level_and_time(rate: int, hertz: float) -> None:
    got = read_sound(wav(tone(1.0, rate, hertz), rate, FLOAT, 32))
    assert abs(len(got) - 16_000) <= 1
    want = tone(1.0, 16_000, hertz)
    assert np.abs(got[1000:15_000] - want[1000:15_000]).max() < 1e-3


def test_resampling_takes_away_what_16_khz_cannot_hold() -> None:
    got = read_sound(wav(tone(1.0, 44_100, 12_000.0), 44_100, FLOAT, 32))
    assert np.abs(got[1000:15_000]).max() < 1e-3, "12 kHz would be heard as 4 kHz"


def test_thirty_seconds_of_any_rate_are_thirty_seconds() -> None:
    for rate in (44_100, 48_000, 22_050):
        assert sound_media(read_sound(wav(tone(30.0, rate), rate)), MEL).num_tokens == 750


# Samples of a library's user


def test_samples_of_any_kind_are_taken() -> None:
    x = np.round(noise(800) * 127) / 128
    for samples in (x, x.astype(np.float64), x.astype(np.float16), (x * 2**15).astype(np.int16),
                    (x.astype(np.float64) * 2**31).astype(np.int32), (x * 128 + 128).astype(np.uint8)):  # fmt: skip
        assert np.array_equal(from_samples(samples, 16_000), x.astype(np.float32)), samples.dtype
    pair = np.stack([x, -x / 2], axis=1)
    assert np.allclose(from_samples(pair, 16_000), x / 4, atol=1e-7)
    assert len(from_samples(x, 8_000)) == 1600


@pytest.mark.parametrize(("samples", "rate", "why"), [
    (np.zeros(10, np.int64), 16_000, "not int64"), (np.zeros(10, bool), 16_000, "not bool"),
    (np.zeros((1, 2, 3), np.float32), 16_000, r"not \[1, 2, 3\]"), (np.zeros(0, np.float32), 16_000, r"not \[0\]"),
    (np.zeros(10, np.float32), 0, "0 samples a second"), (np.zeros((2, 65), np.float32), 16_000, "65 channels"),
    (np.zeros(10_000_000, np.uint8), 16_000, r"625\.00 s long"),
])  # fmt: skip
def test_samples_that_cannot_be_are_refused(samples: NDArray[Any], rate: int, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        from_samples(samples, rate)
