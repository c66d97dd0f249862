"""WAV files, read strictly: PCM of 8, 16, 24 or 32 bits and floats of 32 or 64, WAVE_FORMAT_EXTENSIBLE included.

Source: Multiple Channel Audio Data and WAVE Files, Microsoft 2001, and the RIFF chunks that it builds on. What a header
says is checked against the bytes that are there, so that memory is bounded by the file's size.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kerngen.errors import UsageError

_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
_FORMATS = {
    (_PCM, 8): "u1",
    (_PCM, 16): "<i2",
    (_PCM, 24): "<i3",
    (_PCM, 32): "<i4",
    (_FLOAT, 32): "<f4",
    (_FLOAT, 64): "<f8",
}
_NAMES = {2: "ADPCM", 6: "A-law", 7: "mu-law", 0x11: "IMA ADPCM", 0x50: "MPEG", 0x55: "MP3"}
_SUBFORMAT_TAIL = bytes.fromhex("000000001000800000aa00389b71")  # of the GUID, behind the two bytes that are the format
_UNKNOWN_SIZE = 0xFFFFFFFF  # what writes to a pipe does not know its length: the data go on to the file's end
_MAX_CHUNKS = 1000  # before the data: a file of empty chunks would take seconds
_PIECE = 65536  # samples that are converted at a time


@dataclass(frozen=True, slots=True)
class Wav:
    """What a WAV file holds. form: numpy's name of a sample's type, "<i3" for 24 bits; data: whole frames."""

    rate: int
    channels: int
    form: str
    data: memoryview

    @property
    def num_frames(self) -> int:
        return len(self.data) // self._frame_bytes

    @property
    def _frame_bytes(self) -> int:
        return int(self.form[-1]) * self.channels

    def mono(self) -> NDArray[np.float32]:
        """float32 [num_frames], the mean of the channels: of PCM in [-1, 1), of floats whatever they are."""
        out = np.empty(self.num_frames, np.float32)
        step = max(_PIECE // self.channels, 1)
        for start in range(0, self.num_frames, step):
            stop = min(start + step, self.num_frames)
            raw = np.frombuffer(self.data[start * self._frame_bytes : stop * self._frame_bytes], np.uint8)
            out[start:stop] = mean_of_channels(self._samples(raw).reshape(stop - start, self.channels))
        return out

    def _samples(self, raw: NDArray[np.uint8]) -> NDArray[np.generic]:
        if self.form != "<i3":
            return raw.view(self.form)
        wide = np.zeros((len(raw) // 3, 4), np.uint8)  # the upper three bytes of 32 bits
        wide[:, 1:] = raw.reshape(-1, 3)
        return wide.view("<i4")


def mean_of_channels(samples: NDArray[np.generic]) -> NDArray[np.float32]:
    """float32 [frames] of [frames, channels]: floats, or uint8, int16 or int32 over their full scale."""
    kind, size = samples.dtype.kind, samples.dtype.itemsize
    with np.errstate(over="ignore", invalid="ignore"):  # who takes floats from outside looks at them afterwards
        wide = samples.astype(np.float64)
        if kind == "u":
            wide = (wide - 128.0) / 128.0
        elif kind == "i":
            wide /= 2.0 ** (8 * size - 1)
        return wide.mean(axis=1).astype(np.float32)


def read_wav(data: bytes) -> Wav:
    """The file's format and samples, nothing converted. Raises UsageError for what is torn, contradicts itself or is no
    PCM or float.
    """
    view = memoryview(data)
    if len(view) < 12 or view[:4] != b"RIFF" or view[8:12] != b"WAVE":
        raise _bad("it does not begin with RIFF and WAVE")
    (riff_size,) = struct.unpack_from("<I", view, 4)
    if riff_size not in (0, _UNKNOWN_SIZE) and riff_size > len(view) - 8:
        raise _bad(f"its header says {riff_size + 8:,} bytes and {len(view):,} are there")
    form: tuple[str, int, int] | None = None
    position = 12
    for _ in range(_MAX_CHUNKS):
        if position + 8 > len(view):
            raise _bad("it has no data chunk")
        name, size = bytes(view[position : position + 4]), struct.unpack_from("<I", view, position + 4)[0]
        position += 8
        there = len(view) - position
        if name == b"data":
            if form is None:
                raise _bad("its data come before their format")
            return _with_data(form, view[position:], size)
        if size > there:
            raise _bad(f"a chunk says {size:,} bytes and {there:,} are there")
        if name == b"fmt ":
            if form is not None:
                raise _bad("it has two format chunks")
            form = _format(view[position : position + size])
        position += size + size % 2
    raise _bad(f"more than {_MAX_CHUNKS:,} chunks come before its data")


def _format(chunk: memoryview) -> tuple[str, int, int]:
    """(form, channels, rate)"""
    if len(chunk) < 16:
        raise _bad(f"its format chunk has {len(chunk)} bytes, not 16 or more")
    tag, channels, rate, _, frame_bytes, bits = struct.unpack_from("<HHIIHH", chunk)
    if tag == _EXTENSIBLE:
        if len(chunk) < 40:
            raise _bad(f"its extensible format has {len(chunk)} bytes, not 40")
        extra, valid_bits = struct.unpack_from("<HH", chunk, 16)
        tag = struct.unpack_from("<H", chunk, 24)[0]
        if extra < 22 or valid_bits > bits:
            raise _bad(f"its extensible format has {extra} bytes more and {valid_bits} valid bits of {bits}")
        if bytes(chunk[26:40]) != _SUBFORMAT_TAIL:
            raise _bad("its extensible format is none of PCM or float")
    form = _FORMATS.get((tag, bits))
    if form is None:
        kind = {_PCM: "PCM", _FLOAT: "float"}.get(tag) or _NAMES.get(tag, f"format 0x{tag:04x}")
        raise _bad(f"its samples are {kind} of {bits} bits; PCM of 8, 16, 24 or 32 and floats of 32 or 64 are read")
    if channels == 0 or rate == 0:
        raise _bad(f"it has {channels} channels at {rate} Hz")
    if frame_bytes != channels * bits // 8:
        raise _bad(
            f"its frames have {frame_bytes} bytes, and {channels} channels of {bits} bits have {channels * bits // 8}"
        )
    return form, channels, rate


def _with_data(form: tuple[str, int, int], rest: memoryview, size: int) -> Wav:
    name, channels, rate = form
    frame = int(name[-1]) * channels
    if size == _UNKNOWN_SIZE:
        size = len(rest) - len(rest) % frame
    if size > len(rest):
        raise _bad(f"its data chunk says {size:,} bytes and {len(rest):,} are there")
    if size % frame:
        raise _bad(f"its {size:,} bytes of data are no whole number of frames of {frame} bytes")
    if not size:
        raise _bad("it holds no samples")
    return Wav(rate, channels, name, rest[:size])


def _bad(what: str) -> UsageError:
    return UsageError(
        f"the WAV file cannot be read: {what}", hint="ffmpeg -i FILE -ar 16000 -ac 1 good.wav writes it anew"
    )
