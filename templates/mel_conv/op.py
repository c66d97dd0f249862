"""Tensors to calls of mel_conv."""

from __future__ import annotations

from torch import Tensor

from kerngen.templates.call import Call, op
from kerngen.templates.common.rows.spec import require
from kerngen.templates.common.rows.torch_rows import DTYPE_NAME, empty
from kerngen.templates.mel_conv.spec import NUM_TAPS, Problem


@op(takes={"frames": "fp32[R, M]", "lengths": "fp32[B]", "taps": "D[9, C]", "norm_weight": "D[C]"})
def mel_conv(
    frames: Tensor, lengths: Tensor, taps: Tensor, norm_weight: Tensor, num_frames: int, eps: float
) -> Call[Tensor]:
    """relu(layer_norm(conv(frames))) of sounds of num_frames frames each: a 3 x 3 convolution of one channel with
    stride 2 and padding 1, normed over channels.

    frames [B * num_frames, M]; lengths [B]: of each sound, whose frames behind are zero. taps [9, C], those of a row of
    the kernel one after another; norm_weight [C]. Returns [B, (num_frames + 1) // 2, (M + 1) // 2, C] in taps' dtype,
    zero for frames 2 t that are behind a sound's end.
    """
    (rows, mels), (num_taps, channels), sounds = frames.shape, taps.shape, lengths.shape[0]
    require(num_taps == NUM_TAPS, f"taps has {num_taps} rows, not {NUM_TAPS}")
    require(
        num_frames > 0 and rows == sounds * num_frames,
        f"frames has {rows} rows, which are not {sounds} sounds of {num_frames} frames",
    )
    half = (num_frames + 1) // 2
    out = empty(taps, sounds, half, (mels + 1) // 2, channels)
    problem = Problem(mels, channels, DTYPE_NAME[taps.dtype], sounds * half) if sounds else None
    arguments = {
        "out": out, "frames": frames, "taps": taps, "norm_weight": norm_weight, "lengths": lengths, "eps": eps,
        "num_tokens": sounds * half, "num_frames": num_frames,
    }  # fmt: skip
    return Call("mel_conv", problem, arguments, out)
