"""Sound: encoded files or samples in, what a model is given of them out.

A conformer (E2B, E4B) hears log-mel frames, the 12B its raw samples. Both at 16 kHz, one channel. Source:
Gemma4AudioFeatureExtractor and Gemma4UnifiedAudioFeatureExtractor of transformers 5.22.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kerngen.errors import ToolchainError, UsageError
from kerngen.runtime.media.config import AudioConfig
from kerngen.runtime.media.values import Media, Source
from kerngen.runtime.media.wav import mean_of_channels, read_wav

SAMPLE_RATE = 16_000
CONFORMER_SAMPLES = 480_000  # 30 s: what a conformer hears of one sound
RATES = (1_000, 384_000)  # Hz that are resampled: what is outside is a header that lies
MAX_CHANNELS = 64
MAX_SECONDS = 600.0  # of one sound, whoever hears it: 38 MB of samples
PADDING_SAMPLES = 1_600  # a tenth of a second: what encoders of MP3 add to a recording of the full length
LOUDEST = 256.0  # of floats, whose full scale is 1: integers that nobody has scaled are beyond it
FRAME, HOP, FFT = 320, 160, 512  # samples: 20 ms, every 10 ms
MEL_FLOOR = 0.001
_BLOCK = 1 << 18  # samples that are decoded at a time
_INSTALL = "pip install 'kerngen[media]'"
_COMPRESSED = ("FLAC", "MP3", "OGG")  # libsndfile's names


@dataclass(frozen=True, slots=True)
class SoundRule:
    """How a model takes sound. features: "mel", log-mel frames, or "samples", frames of samples as they are.

    width: features of a frame: mel filters, or samples. max_samples: the longest sound; None for any.
    """

    features: Literal["mel", "samples"]
    width: int
    max_samples: int | None = None

    @staticmethod
    def of(config: AudioConfig) -> SoundRule:
        """What a model of that config takes."""
        if config.encoder is None:
            return SoundRule("samples", config.num_features)
        return SoundRule("mel", config.num_features, max_samples=CONFORMER_SAMPLES)

    @property
    def min_samples(self) -> int:
        """The shortest sound that gives a token."""
        return HOP + 1 if self.features == "mel" else 1

    def num_frames(self, num_samples: int) -> int:
        """Of mel, those whose samples, and one more behind them, are all there."""
        if self.features == "samples":
            return -(-num_samples // self.width)
        return max(0, (num_samples + HOP - FRAME - 1) // HOP + 1)

    def num_tokens(self, num_samples: int) -> int:
        """Soft tokens of that many samples, 25 a second: the conformer halves its frames twice, rounding up."""
        frames = self.num_frames(num_samples)
        return frames if self.features == "samples" else -(-frames // 4)


def read_sound(data: bytes, *, max_seconds: float = MAX_SECONDS) -> NDArray[np.float32]:
    """float32 [n] at 16 kHz of a WAV, MP3, FLAC or Ogg file, its channels averaged.

    A 16 kHz file's samples are exactly its own; others are resampled by soxr (HQ). No more memory is taken than some
    times the file's size and max_seconds of samples. Raises UsageError for what cannot be read, holds no samples or is
    longer; ToolchainError where soundfile or soxr is needed and not installed. libsndfile may write to stderr.
    """
    if data[:4] == b"RIFF":
        wav = read_wav(data)
        _check_shape(wav.rate, wav.channels)
        _check_length(wav.num_frames, wav.rate, max_seconds)
        return _at_16_khz(_sane(wav.mono()), wav.rate)
    if data[:4] in (b"fLaC", b"OggS") or data[:3] == b"ID3" or _is_mpeg(data):
        return _at_16_khz(*_decompress(data, max_seconds))
    raise UsageError(
        "the sound cannot be read: it is no WAV, MP3, FLAC or Ogg file",
        hint="ffmpeg -i FILE -ar 16000 -ac 1 sound.wav makes one",
    )


def decode_sound(rule: SoundRule, source: Source, limits: object) -> Media:
    """What a model is given of an encoded sound's bytes. limits: of images; a sound's are MAX_SECONDS and the rule's.
    Of sound that is longer than the model takes by no more than an encoder's padding the end is cut.

    Raises as read_sound and sound_media do.
    """
    if source.data is None or source.kind != "audio":
        raise ValueError("no sound's bytes")
    samples = read_sound(source.data)
    is_padded = rule.max_samples is not None and len(samples) <= rule.max_samples + PADDING_SAMPLES
    return sound_media(samples, rule, cut=is_padded)


def from_samples(samples: NDArray[Any], rate: int, *, max_seconds: float = MAX_SECONDS) -> NDArray[np.float32]:
    """float32 [n] at 16 kHz of samples [n] or [n, channels] at `rate` Hz, their channels averaged.

    samples: floats whose full scale is 1, or int16, int32 or uint8. Raises as read_sound does.
    """
    if samples.dtype.kind not in "iuf" or samples.dtype.name in ("int8", "uint16", "uint32", "int64", "uint64"):
        raise UsageError(f"samples are floats, int16, int32 or uint8, not {samples.dtype}")
    if samples.ndim not in (1, 2) or not samples.size:
        raise UsageError(f"samples are [n] or [n, channels], not {list(samples.shape)}")
    frames = samples.reshape(len(samples), -1)
    _check_shape(rate, frames.shape[1])
    _check_length(len(frames), rate, max_seconds)
    return _at_16_khz(_sane(mean_of_channels(frames)), rate)


def sound_media(samples: NDArray[np.float32], rule: SoundRule, *, cut: bool = False) -> Media:
    """What a model is given of samples [n] at 16 kHz: its frames as `rule` makes them.

    cut: of sound longer than the model takes, only the beginning, which is what transformers does and does not say.
    Raises UsageError for longer sound where that is not asked for, and for sound too short to give a token.
    """
    if samples.ndim != 1 or samples.dtype != np.float32:
        raise UsageError(f"a sound is float32 [n], not {samples.dtype} {list(samples.shape)}: see from_samples")
    _sane(samples)
    if cut:
        samples = samples[: rule.max_samples]
    num_samples = len(samples)
    if num_samples < rule.min_samples:
        raise UsageError(
            f"a sound of {num_samples} samples gives no token: {rule.min_samples} at 16 kHz are the fewest"
        )
    if rule.max_samples is not None and num_samples > rule.max_samples:
        longest = rule.max_samples / SAMPLE_RATE
        raise UsageError(
            f"the sound is {num_samples / SAMPLE_RATE:.2f} s long, and this model hears {longest:g} s of one at most",
            hint="send it in parts, each a sound of its own",
        )
    frames = _log_mel(samples, rule) if rule.features == "mel" else _raw_frames(samples, rule)
    return Media.of("audio", frames, (len(frames), 1), rule.num_tokens(num_samples))


def _raw_frames(samples: NDArray[np.float32], rule: SoundRule) -> NDArray[np.float32]:
    """[frames, width], the last one with zeros at its end."""
    frames = np.zeros((rule.num_frames(len(samples)), rule.width), np.float32)
    frames.reshape(-1)[: len(samples)] = samples
    return frames


def _log_mel(samples: NDArray[np.float32], rule: SoundRule) -> NDArray[np.float32]:
    """[frames, width]: ln(mel + 0.001) of the magnitudes, 160 zeros before the first sample."""
    padded = np.concatenate((np.zeros(HOP, np.float32), samples))
    frames = np.lib.stride_tricks.sliding_window_view(padded, FRAME)[::HOP][: rule.num_frames(len(samples))]
    magnitudes = np.abs(np.fft.rfft(frames * _window(), n=FFT, axis=-1))
    return np.log(magnitudes @ _mel_filters(rule.width) + MEL_FLOOR).astype(np.float32)


@cache
def _window() -> NDArray[np.float32]:
    """Hann, periodic."""
    return (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(FRAME) / FRAME)).astype(np.float32)


@cache
def _mel_filters(num_filters: int) -> NDArray[np.float64]:
    """[257, num_filters] triangles, evenly spaced on HTK's scale from 0 to 8000 Hz, each 1 at its peak."""
    top = 2595.0 * np.log10(1.0 + SAMPLE_RATE / 2 / 700.0)
    edges = 700.0 * (10.0 ** (np.linspace(0.0, top, num_filters + 2) / 2595.0) - 1.0)
    bins = np.linspace(0.0, SAMPLE_RATE / 2, FFT // 2 + 1)[:, None]
    widths = np.diff(edges)
    rising, falling = (bins - edges[:-2]) / widths[:-1], (edges[2:] - bins) / widths[1:]
    return np.maximum(0.0, np.minimum(rising, falling))


def _is_mpeg(data: bytes) -> bool:
    """Whether it begins with a frame of MPEG audio: eleven bits of sync, and a layer."""
    return len(data) > 1 and data[0] == 0xFF and data[1] & 0xE0 == 0xE0 and data[1] & 0x06 != 0


def _decompress(data: bytes, max_seconds: float) -> tuple[NDArray[np.float32], int]:
    """(samples [n], rate) by libsndfile, a block at a time."""
    try:
        import soundfile
    except (ImportError, OSError) as e:  # OSError: libsndfile itself is not there
        raise ToolchainError(f"MP3, FLAC and Ogg need soundfile: {e}", hint=f"{_INSTALL}; or send WAV") from e
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            if file.format not in _COMPRESSED:
                raise UsageError(f"the sound cannot be read: it is {file.format}, not WAV, MP3, FLAC or Ogg")
            _check_shape(file.samplerate, file.channels)
            blocks = list(_blocks(file, max_seconds))
            rate = int(file.samplerate)
    except (soundfile.SoundFileError, ValueError) as e:
        why = getattr(e, "error_string", e)  # libsndfile's own; the exception names an object in memory before it
        raise UsageError(f"the sound cannot be decoded: {why}") from e
    if not blocks:
        raise UsageError("the sound cannot be decoded: it holds no samples")
    return _sane(np.concatenate(blocks)), rate


def _blocks(file: Any, max_seconds: float) -> Iterator[NDArray[np.float32]]:
    """What is decoded is counted, not what the file says: that may be a guess, or a lie."""
    num_frames = 0
    while True:
        block = file.read(max(_BLOCK // file.channels, 1), dtype="float32", always_2d=True)
        if not len(block):
            return
        num_frames += len(block)
        _check_length(num_frames, file.samplerate, max_seconds, at_least=True)
        yield mean_of_channels(block)


def _check_shape(rate: int, channels: int) -> None:
    if not RATES[0] <= rate <= RATES[1]:
        raise UsageError(f"the sound has {rate:,} samples a second; {RATES[0]:,} to {RATES[1]:,} are read")
    if channels > MAX_CHANNELS:
        raise UsageError(f"the sound has {channels:,} channels; {MAX_CHANNELS} are the most that are read")


def _check_length(num_frames: int, rate: int, max_seconds: float, *, at_least: bool = False) -> None:
    if num_frames > max_seconds * rate:
        how_long = f"more than {max_seconds:g}" if at_least else f"{num_frames / rate:.2f}"
        raise UsageError(f"the sound is {how_long} s long; {max_seconds:g} s are the most that are read")


def _sane(samples: NDArray[np.float32]) -> NDArray[np.float32]:
    """The same. Raises UsageError for what is no sound: NaN, infinity, integers that were stored as floats."""
    loudest = float(np.abs(samples).max(initial=0.0))  # NaN if one is NaN
    if not loudest <= LOUDEST:
        raise UsageError(
            f"the sound's samples reach {loudest:g}; full scale is 1", hint="divide integers by their range"
        )
    return samples


def _at_16_khz(samples: NDArray[np.float32], rate: int) -> NDArray[np.float32]:
    if rate == SAMPLE_RATE:
        return samples
    try:
        import soxr
    except ImportError as e:
        raise ToolchainError(f"sound of {rate:,} Hz needs soxr: {e}", hint=f"{_INSTALL}; or send 16,000 Hz") from e
    return np.asarray(soxr.resample(samples, rate, SAMPLE_RATE, quality="HQ"), np.float32)
