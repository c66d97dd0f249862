"""What a conformer does between its products: norms and residuals, SiLU, convolutions over tokens, and attention.

By torch, or by our kernels, a launch each. What stands between two linears clamps what the one gives and the
next takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kerngen.runtime.media.config import AudioConfig
from kerngen.runtime.media.towers.linear import Bounds, clamp_, clamped
from kerngen.templates.attn_relative.op import attn_relative
from kerngen.templates.call import Call
from kerngen.templates.glu_conv.op import glu_conv
from kerngen.templates.mel_conv.op import mel_conv
from kerngen.templates.mel_conv.spec import NUM_TAPS
from kerngen.templates.residual_norms.op import residual_norms
from kerngen.templates.silu.op import bounded_silu

# Powers of two, up to which kernels are got ready: no forward has more than 12,000 frames, of which four are a token.
READY_TOKENS = tuple(1 << e for e in range(13))
_INVALID = -1e9  # score of a key that a query does not see


class Conformer(Protocol):
    """Tensors are, but for frames, [tokens, width] of whole sounds of seq_len tokens each, and weights [width], all of
    one dtype.
    """

    def mel_conv(
        self, frames: Tensor, lengths: Tensor, taps: Tensor, norm: Tensor, num_frames: int, eps: float
    ) -> Tensor:
        """relu(layer_norm(conv(frames))) [sounds, num_frames / 2, mels / 2, channels] of frames [sounds * num_frames,
        mels] in fp32: a 3 x 3 convolution of one channel with stride 2 and padding 1, normed over channels, zero behind
        a sound's end. taps [9, channels]: row by row. lengths [sounds] in fp32: frames from there on are zero.
        """

    def residual_norms(
        self,
        residual: Tensor,
        h: Tensor,
        post: Tensor | None,
        following: Tensor,
        last: Tensor | None,
        bounds: Bounds,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        """x = residual + norm(h; post), or + h, and norm(x; following); with `last`, where x is normed: x =
        norm(residual + norm(h; post); following), and norm(x; last). `residual` and h are the caller's no more.

        bounds: of h, of what the norms of the sum take, and of the second result.
        """

    def silu(self, x: Tensor, bounds: Bounds) -> Tensor:
        """SiLU of x, which is the caller's no more. bounds: of x and of the result."""

    def glu_conv(self, x: Tensor, taps: Tensor, norm: Tensor, bounds: Bounds, seq_len: int, eps: float) -> Tensor:
        """silu(norm(conv(value * sigmoid(gate)))) [tokens, width] of value | gate [tokens, 2 * width], which is the
        caller's no more. taps [size, width]: of a causal depthwise convolution, the last of a token itself. bounds: of
        x, of what the norm takes, and of the result.
        """

    def attention(
        self, qkv: Tensor, q_scale: Tensor, relative_keys: Tensor, bounds: Bounds, k_scale: float, cap: float,
        seq_len: int,
    ) -> Tensor:  # fmt: skip
        """[tokens, heads * d] of q | k | v [tokens, 3 * heads * d], which is the caller's no more, in fp32. A token
        sees itself and those before it, `window` in all.

        q_scale [d] and relative_keys [heads, window + 1, d], of distances from window to 0, in fp32: a score is (q *
        q_scale) . (k * k_scale + relative key), of which softmax takes cap * tanh(score / cap). bounds: of q, k, v and
        the result.
        """


class TorchConformer:
    """By torch."""

    def mel_conv(
        self, frames: Tensor, lengths: Tensor, taps: Tensor, norm: Tensor, num_frames: int, eps: float
    ) -> Tensor:
        x = frames.to(taps.dtype).view(len(lengths), 1, num_frames, -1)
        x = F.conv2d(x, taps.t().reshape(-1, 1, 3, 3), stride=2, padding=1).permute(0, 2, 3, 1)
        x = F.layer_norm(x, norm.shape, norm, eps=eps).relu_()
        is_sound = torch.arange(0, num_frames, 2, device=x.device) < lengths[:, None]
        return x.mul_(is_sound[..., None, None])

    def residual_norms(
        self,
        residual: Tensor,
        h: Tensor,
        post: Tensor | None,
        following: Tensor,
        last: Tensor | None,
        bounds: Bounds,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        of_h, of_norms, of_out = bounds.each
        h = clamp_(h, of_h)
        x = residual + (h if post is None else F.rms_norm(h, post.shape, post, eps))
        y = F.rms_norm(clamped(x, of_norms), following.shape, following, eps)
        if last is not None:
            x, y = y, F.rms_norm(clamped(y, of_norms), last.shape, last, eps)
        return x, clamp_(y, of_out)

    def silu(self, x: Tensor, bounds: Bounds) -> Tensor:
        of_x, of_out = bounds.each
        return clamp_(F.silu(clamp_(x, of_x)), of_out)

    def glu_conv(self, x: Tensor, taps: Tensor, norm: Tensor, bounds: Bounds, seq_len: int, eps: float) -> Tensor:
        of_x, of_norm, of_out = bounds.each
        size, width = taps.shape
        y = F.glu(clamp_(x, of_x)).view(-1, seq_len, width).transpose(1, 2)
        y = F.conv1d(F.pad(y, (size - 1, 0)), taps.t()[:, None], groups=width).transpose(1, 2)
        y = F.rms_norm(clamp_(y, of_norm), norm.shape, norm, eps)
        return clamp_(F.silu(y), of_out).flatten(0, 1)

    def attention(
        self, qkv: Tensor, q_scale: Tensor, relative_keys: Tensor, bounds: Bounds, k_scale: float, cap: float,
        seq_len: int,
    ) -> Tensor:  # fmt: skip
        """Queries go in blocks of `window`, each with the keys of its own block and of the one before: all that they
        see, and no product of every query with every key.
        """
        (heads, rows, dim), (*of_parts, of_out) = relative_keys.shape, bounds.each
        window, dtype = rows - 1, qkv.dtype
        for part, interval in zip(qkv.chunk(3, -1), of_parts, strict=True):
            clamp_(part, interval)
        num_blocks = -(-seq_len // window)
        qkv = F.pad(qkv.view(-1, seq_len, 3 * heads * dim).float(), (0, 0, 0, num_blocks * window - seq_len))
        qkv = qkv.view(-1, num_blocks, window, 3, heads, dim).permute(3, 0, 4, 1, 2, 5)
        q = qkv[0] * q_scale  # [B, heads, blocks, window, d]
        past = F.pad(qkv[1:], (0, 0, 0, 0, 1, 0))[:, :, :, :-1]
        k, v = torch.cat((past, qkv[1:]), -2)  # [B, heads, blocks, 2 * window, d]
        relative = q.flatten(2, 3) @ relative_keys.transpose(-1, -2)  # [B, heads, blocks * window, window + 1]
        scores = q @ (k * k_scale).transpose(-1, -2) + _shifted(relative.unflatten(2, (num_blocks, window)))
        scores = (torch.tanh(scores / cap) * cap).masked_fill(_unseen(num_blocks, window, qkv.device), _INVALID)
        y = torch.softmax(scores, -1) @ v
        y = y.permute(0, 2, 3, 1, 4).flatten(1, 2)[:, :seq_len].flatten(2).flatten(0, 1)
        return clamp_(y.to(dtype), of_out)


class KernelConformer:
    """By kernels. run: gives what a call, which is made in a place of the model, leaves (KernelOps.run)."""

    def __init__(self, run: Callable[[Call[Any], str], Any]) -> None:
        self._run = run

    def mel_conv(
        self, frames: Tensor, lengths: Tensor, taps: Tensor, norm: Tensor, num_frames: int, eps: float
    ) -> Tensor:
        made: Tensor = self._run(mel_conv(frames, lengths, taps, norm, num_frames, eps), "first convolution (sound)")
        return made

    def residual_norms(
        self,
        residual: Tensor,
        h: Tensor,
        post: Tensor | None,
        following: Tensor,
        last: Tensor | None,
        bounds: Bounds,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        call = residual_norms(residual, h, post, following, last, bounds.table, eps)
        return residual, self._run(call, "residual and norms (sound)")

    def silu(self, x: Tensor, bounds: Bounds) -> Tensor:
        self._run(bounded_silu(x, bounds.table), "activation (sound)")
        return x

    def glu_conv(self, x: Tensor, taps: Tensor, norm: Tensor, bounds: Bounds, seq_len: int, eps: float) -> Tensor:
        made: Tensor = self._run(glu_conv(x, taps, norm, bounds.table, seq_len, eps), "convolution (sound)")
        return made

    def attention(
        self, qkv: Tensor, q_scale: Tensor, relative_keys: Tensor, bounds: Bounds, k_scale: float, cap: float,
        seq_len: int,
    ) -> Tensor:  # fmt: skip
        call = attn_relative(qkv, q_scale, relative_keys, bounds.table, k_scale, cap, seq_len)
        made: Tensor = self._run(call, "attention (sound)")
        return made


def ask_all(conformer: Conformer, config: AudioConfig, dtype: torch.dtype) -> None:
    """Ask `conformer` for all that the encoder of `config` asks for at any number of tokens. The tensors have no
    memory: it is for who listens, and not for who computes.
    """

    if (encoder := config.encoder) is None:
        return

    def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    width, window = encoder.hidden_size, encoder.num_keys
    heads, dim = encoder.num_heads, width // encoder.num_heads
    norm, scale = empty(width), empty(dim, dtype=torch.float32)
    keys, taps = empty(heads, window + 1, dim, dtype=torch.float32), empty(encoder.conv_kernel, width)
    of_two, of_three, of_four = (Bounds.table_of([(-1.0, 1.0)] * n, norm) for n in (2, 3, 4))
    for count in READY_TOKENS:
        x, frames = empty(count, width), empty(2 * count, config.num_features, dtype=torch.float32)
        channels = empty(NUM_TAPS, encoder.channels[0])
        conformer.mel_conv(frames, scale[:1], channels, channels[0], 2 * count, 1.0)
        for post, last in ((norm, None), (norm, norm), (None, None)):
            conformer.residual_norms(x, x, post, norm, last, of_three, 1.0)
        conformer.silu(empty(count, 4 * width), of_two)
        conformer.glu_conv(empty(count, 2 * width), taps, norm, of_three, count, 1.0)
        conformer.attention(empty(count, 3 * width), scale, keys, of_four, 1.0, 1.0, count)


def _shifted(relative: Tensor) -> Tensor:
    """[..., window, 2 * window] of [..., window, window + 1]: key c, i + window - c tokens before query i, gets column
    c - i, which is of that distance. Other keys get what nobody sees. Source: appendix B of arXiv 1901.02860.
    """
    window = relative.shape[-2]
    wide = F.pad(relative, (0, window))  # a column more than there are keys, so that each row begins one further right
    return wide.flatten(-2)[..., : 2 * window * window].unflatten(-1, (window, 2 * window))


def _unseen(num_blocks: int, window: int, device: torch.device) -> Tensor:
    """bool [blocks, window, 2 * window]: keys that are later, too far back, or before the sound's beginning."""
    key, query = torch.arange(2 * window, device=device), torch.arange(window, device=device)[:, None]
    is_first = torch.arange(num_blocks, device=device)[:, None, None] == 0
    return (key <= query) | (key > query + window) | (is_first & (key < window))
