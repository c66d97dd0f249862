"""Video files: which of their frames a model is given, and when each is shown.

A file is what its bytes hold, not what its header says: its packets are counted, and of them only those are decoded
that the chosen frames need. It is read from memory by a demuxer that its first bytes name: playlists and scripts, which
name other files, are never read. Source of the choice: Gemma4VideoProcessor of transformers 5.22 and its base.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kerngen.errors import KerngenError, ToolchainError, UsageError
from kerngen.runtime.media.images import DEFAULT_FPS, MAX_FPS, ImageRule, frame_indices, image_media
from kerngen.runtime.media.limits import MAX_PIXELS, MediaLimits
from kerngen.runtime.media.values import Media, Source

if TYPE_CHECKING:
    from av import Packet, VideoCodecContext, VideoFrame
    from av.container import InputContainer
    from av.video.stream import VideoStream

# FFmpeg's names of the decoders that a file may ask for: of its hundreds, those of today's mp4, mov, webm and mkv.
CODECS = ("av1", "h264", "hevc", "libdav1d", "mjpeg", "mpeg4", "prores", "vp8", "vp9")
_NAMES = "mp4, mov, webm or mkv"
_MOV_ATOMS = (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip")  # that such a file begins with
_DAMAGED = "the video cannot be decoded: the file is damaged or truncated"
_VP8_IS_SHOWN = 0x10  # of a frame's first byte


def decode_video(rule: ImageRule, source: Source, limits: MediaLimits) -> Media:
    """All frames that a model is given of a video file's bytes, as one item with `times`. Raises as `video_frames`."""
    if source.data is None or source.kind != "video_file":
        raise ValueError("no video file's bytes")
    frames, times = [], []
    for at, pixels in video_frames(source.data, limits.pixels):
        frames.append(image_media(pixels, rule, source.num_tokens, "video"))
        times.append(at)
    data = np.stack([frame.data for frame in frames])
    made = Media.of("video", data, frames[0].grid, sum(frame.num_tokens for frame in frames))
    return replace(made, times=tuple(times))


def video_frames(data: bytes, max_pixels: int = MAX_PIXELS) -> Iterator[tuple[float, NDArray[np.uint8]]]:
    """(seconds, uint8 [height, width, 3], RGB, all of one size) of the frames of a video file that a model is given.

    seconds: a frame's number / the file's mean frames a second, or 24 where it does not say. Upright, as the file's
    rotation has it. Of several streams of video the one that players show; sound is left out.
    Raises UsageError for another format or codec, a damaged or truncated file, more than `max_pixels` a frame, or
    frames of several sizes; ToolchainError where PyAV is not installed.
    """
    av = _pyav()
    demuxer = _demuxer(data)
    try:
        # The data reference of another file is not followed (enable_drefs), and no protocol would open it.
        options = {"codec_whitelist": ",".join(CODECS), "protocol_whitelist": "none"}
        options |= {"enable_drefs": "0"} if demuxer == "mov" else {}
        with av.open(io.BytesIO(data), format=demuxer, options=options, metadata_errors="replace") as container:
            stream = container.streams.best("video")
            if stream is None:
                raise UsageError("the file has no video that can be decoded here: it holds sound or data alone")
            yield from _chosen(container, stream, max_pixels)
    except (KerngenError, MemoryError):
        raise
    except (av.FFmpegError, ValueError, OverflowError) as e:  # the latter of numbers that PyAV makes of damaged bytes
        raise UsageError(_DAMAGED) from e


def _pyav() -> ModuleType:
    try:
        import av
    except (ImportError, OSError) as e:  # OSError: a library of FFmpeg's is not there
        raise ToolchainError(f"video files need PyAV: {e}",
                             hint="pip install 'kerngen[video]'; or send frames") from e  # fmt: skip
    return av


def _demuxer(data: bytes) -> str:
    """FFmpeg's name of it. Raises UsageError for a file of another format."""
    if data[4:8] in _MOV_ATOMS:
        return "mov"
    if data[:4] == b"\x1aE\xdf\xa3":  # EBML
        return "matroska"
    raise UsageError(f"the video cannot be decoded: it is no {_NAMES} file",
                     hint="ffmpeg -i FILE video.mp4 makes one")  # fmt: skip


def _chosen(
    container: InputContainer, stream: VideoStream, max_pixels: int
) -> Iterator[tuple[float, NDArray[np.uint8]]]:
    codec = stream.codec_context
    if codec is None or codec.codec.name not in CODECS:
        name = "of an unknown codec" if codec is None else f"in {codec.codec.name}"
        raise UsageError(f"the video is {name}, which is not decoded here: H.264, HEVC, VP8, VP9, AV1 and MPEG-4 are")
    _check_size(codec.width, codec.height, max_pixels)
    codec.options = {"max_pixels": str(max_pixels)}  # which a later frame may have, too
    codec.thread_count = 1  # others of the machine's cores decode other files
    fps = _fps(stream.average_rate)
    packets = list(_packets(container, stream))
    shown = sorted(_pts(packet) for packet in packets if _is_shown(packet, codec.codec.name))
    if not shown:
        raise UsageError("the video cannot be decoded: it holds no frames")
    numbers = frame_indices(len(shown))
    shape: tuple[int, ...] = ()
    for number, frame in zip(numbers, _decoded(codec, packets, [shown[n] for n in numbers]), strict=True):
        pixels = _rgb(frame)
        if pixels.shape != (shape or pixels.shape):
            raise UsageError(f"the video's frames are of several sizes, such as {shape[1]} x {shape[0]} and "
                             f"{pixels.shape[1]} x {pixels.shape[0]}: one size is read")  # fmt: skip
        shape = pixels.shape
        yield number / fps, pixels


def _fps(mean: Fraction | None) -> float:
    """Raises UsageError for a rate that no camera has."""
    fps = float(mean or DEFAULT_FPS)
    if not 1 / MAX_FPS <= fps <= MAX_FPS:
        raise UsageError(f"the video has {fps:g} frames a second: between {1 / MAX_FPS} and {MAX_FPS:,} make sense")
    return fps


def _packets(container: InputContainer, stream: VideoStream) -> Iterator[Packet]:
    """Of encoded frames, in the order in which they are decoded. Raises UsageError for one that is not whole."""
    for packet in container.demux(stream):
        if packet.is_corrupt:
            raise UsageError(_DAMAGED)
        if packet.size:  # the last is empty: it asks decoders for what they hold
            yield packet


def _pts(packet: Packet) -> int:
    """When it is shown, in units of its stream. Raises UsageError where it does not say."""
    if packet.pts is None:
        raise UsageError("the video cannot be decoded: its frames have no times")
    return packet.pts


def _is_shown(packet: Packet, codec: str) -> bool:
    """Not where an edit list cuts it off, nor a frame of VP8 that others refer to and nobody sees."""
    return not packet.is_discard and (codec != "vp8" or bool(bytes(packet)[0] & _VP8_IS_SHOWN))


def _decoded(codec: VideoCodecContext, packets: Sequence[Packet], wanted: Sequence[int]) -> Iterator[VideoFrame]:
    """The frames that are shown at `wanted`, in order.

    Of the packets before each of them those from its key frame on are decoded, or those behind the frame before it.
    Raises UsageError for a frame that does not come out.
    """
    at_pts = {_pts(packet): at for at, packet in enumerate(packets)}
    keys = [(at, _pts(packet)) for at, packet in enumerate(packets) if packet.is_keyframe]
    behind, waiting = 0, list[Any]()  # the next packet that the decoder has not seen; frames that nobody asked for yet
    for pts in wanted:
        at = at_pts[pts]
        # A frame that is shown before its key frame may refer to what is before that one (an open group of pictures).
        key = max((k for k, shown in keys if k <= at and shown <= pts), default=0)
        if key > behind:
            codec.flush_buffers()
            behind, waiting = key, []
        while True:
            waiting = [frame for frame in waiting if frame.pts is not None and frame.pts >= pts]
            if waiting:
                break
            if behind > len(packets):
                raise UsageError(_DAMAGED)
            waiting += codec.decode(packets[behind] if behind < len(packets) else None)
            behind += 1
        if waiting[0].pts != pts:
            raise UsageError(_DAMAGED)
        yield waiting[0]


def _rgb(frame: VideoFrame) -> NDArray[np.uint8]:
    pixels = np.asarray(frame.reformat(format="rgb24", threads=1).to_ndarray(), np.uint8)
    quarters = frame.rotation / 90  # counterclockwise
    if not quarters.is_integer():
        raise UsageError(f"the video is turned by {frame.rotation} degrees; 90, 180 and 270 are read")
    return np.ascontiguousarray(np.rot90(pixels, int(quarters)))


def _check_size(width: int, height: int, max_pixels: int) -> None:
    if width < 1 or height < 1:
        raise UsageError(_DAMAGED)
    if width * height > max_pixels:
        raise UsageError(f"the video has frames of {width} x {height} pixels; {max_pixels:,} are the most")
