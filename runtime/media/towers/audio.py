"""Sound as embeddings of the text model: the conformer of E2B and E4B, and the 12B's frames of samples, which are
embedded one by one.

Source: Gemma4AudioModel, Gemma4MultimodalEmbedder and Gemma4UnifiedMultimodalEmbedder of transformers' modeling files.
Rounding follows them: activations and linears in the weights' dtype, norms in fp32, and attention in fp32 from the
projections of queries, keys and values to its output's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from kerngen.errors import UsageError
from kerngen.runtime.media.config import AudioConfig, AudioEncoderConfig
from kerngen.runtime.media.towers.graphs import ShapeGraphs
from kerngen.runtime.media.towers.linear import ClippedLinear, TowerSource, clipped_linear
from kerngen.runtime.media.towers.upload import upload
from kerngen.runtime.media.values import Media

MAX_FRAMES = 12_000  # of one forward, padding counted: four sounds of 30 s, whose first convolution gives 0.2 GB
# Above these the GPU takes longer than the host, and a graph's memory would be better spent.
MAX_CAPTURED_FRAMES = 6_000
GRAPH_STEP = 240  # frames, 2.4 s: what lengths are rounded up to, so that few graphs serve them all
_K_SCALE = math.log(1.0 + math.e) / math.log(2.0)
_INVALID = -1e9  # score of a key that a query does not see


@dataclass(frozen=True, slots=True)
class FeedForwardWeights:
    """up [4 D, D], down [D, 4 D], norms [D]."""

    pre_norm: Tensor
    up: ClippedLinear
    down: ClippedLinear
    post_norm: Tensor


@dataclass(frozen=True, slots=True)
class AudioAttentionWeights:
    """qkv: rows q | k | v, out [D, D], norms [D].

    q_scale [d] and relative_keys [heads, d, window + 1], of distances from window to 0, are in fp32, made of
    per_dim_scale and relative_k_proj. A token sees `window` tokens, itself and those before it.
    """

    pre_norm: Tensor
    qkv: ClippedLinear
    out: ClippedLinear
    post_norm: Tensor
    q_scale: Tensor
    relative_keys: Tensor


@dataclass(frozen=True, slots=True)
class LightConvWeights:
    """start: rows value | gate; kernel [D, 1, size], end [D, D], norms [D]."""

    pre_norm: Tensor
    start: ClippedLinear
    kernel: Tensor
    conv_norm: Tensor
    end: ClippedLinear


@dataclass(frozen=True, slots=True)
class AudioLayerWeights:
    first: FeedForwardWeights
    attention: AudioAttentionWeights
    light_conv: LightConvWeights
    second: FeedForwardWeights
    out_norm: Tensor


@dataclass(frozen=True, slots=True)
class AudioWeights:
    """convs: (kernel [C', C, 3, 3], norm [C']) of each halving; input [D, mels / 4 * C'], output [O, D] and its bias
    [O], projection [H, O].
    """

    convs: tuple[tuple[Tensor, Tensor], ...]
    input: Tensor
    layers: tuple[AudioLayerWeights, ...]
    output: Tensor
    output_bias: Tensor
    projection: Tensor


@dataclass(frozen=True, slots=True)
class SampleWeights:
    """projection [H, samples of a frame]."""

    projection: Tensor


def audio_tower(source: TowerSource, config: AudioConfig, hidden_size: int) -> AudioTower | SampleEmbedder:
    """What embeds sound, with the weights of `source`. hidden_size: the text model's."""
    if config.encoder is None:
        return SampleEmbedder(config, SampleWeights(_projection(source, config, hidden_size)))
    return AudioTower(config, _audio_weights(source, config, config.encoder, hidden_size))


def _projection(source: TowerSource, config: AudioConfig, hidden_size: int) -> Tensor:
    return source.tensor("embed_audio.embedding_projection.weight", hidden_size, config.hidden_size)


def _audio_weights(
    source: TowerSource, config: AudioConfig, encoder: AudioEncoderConfig, hidden_size: int
) -> AudioWeights:
    width, subsample = encoder.hidden_size, "audio_tower.subsample_conv_projection"
    convs = []
    for i, (taken, given) in enumerate(zip((1, encoder.channels[0]), encoder.channels, strict=True)):
        kernel = source.tensor(f"{subsample}.layer{i}.conv.weight", given, taken, 3, 3)
        convs.append((kernel, source.tensor(f"{subsample}.layer{i}.norm.weight", given)))
    quarter = -(-config.num_features // 4) * encoder.channels[1]
    return AudioWeights(
        convs=tuple(convs),
        input=source.tensor(f"{subsample}.input_proj_linear.weight", width, quarter),
        layers=tuple(_layer(source, f"audio_tower.layers.{i}", encoder) for i in range(encoder.num_layers)),
        output=source.tensor("audio_tower.output_proj.weight", config.hidden_size, width),
        output_bias=source.tensor("audio_tower.output_proj.bias", config.hidden_size),
        projection=_projection(source, config, hidden_size),
    )


def _layer(source: TowerSource, name: str, encoder: AudioEncoderConfig) -> AudioLayerWeights:
    width = encoder.hidden_size

    def norm(which: str) -> Tensor:
        return source.tensor(f"{name}.{which}.weight", width)

    def linear(modules: Sequence[str], rows: int, columns: int) -> ClippedLinear:
        return clipped_linear(source, [(f"{name}.{each}", rows) for each in modules], columns, clips=encoder.clips)

    def feed_forward(which: str) -> FeedForwardWeights:
        return FeedForwardWeights(
            pre_norm=norm(f"{which}.pre_layer_norm"),
            up=linear([f"{which}.ffw_layer_1"], 4 * width, width),
            down=linear([f"{which}.ffw_layer_2"], width, 4 * width),
            post_norm=norm(f"{which}.post_layer_norm"),
        )

    heads, dim = encoder.num_heads, width // encoder.num_heads
    scale = source.tensor(f"{name}.self_attn.per_dim_scale", dim)
    relative = source.tensor(f"{name}.self_attn.relative_k_proj.weight", width, width)
    keys = F.linear(_distances(width, encoder.num_keys).to(relative), relative).float()
    return AudioLayerWeights(
        first=feed_forward("feed_forward1"),
        attention=AudioAttentionWeights(
            pre_norm=norm("norm_pre_attn"),
            qkv=linear([f"self_attn.{which}_proj" for which in "qkv"], width, width),
            out=linear(["self_attn.post"], width, width),
            post_norm=norm("norm_post_attn"),
            q_scale=F.softplus(scale).float() * (dim**-0.5 / math.log(2.0)),
            relative_keys=keys.view(-1, heads, dim).permute(1, 2, 0).contiguous(),
        ),
        light_conv=LightConvWeights(
            pre_norm=norm("lconv1d.pre_layer_norm"),
            start=linear(["lconv1d.linear_start"], 2 * width, width),
            kernel=source.tensor(f"{name}.lconv1d.depthwise_conv1d.weight", width, 1, encoder.conv_kernel),
            conv_norm=norm("lconv1d.conv_norm"),
            end=linear(["lconv1d.linear_end"], width, width),
        ),
        second=feed_forward("feed_forward2"),
        out_norm=norm("norm_out"),
    )


def _distances(width: int, window: int) -> Tensor:
    """fp32 [window + 1, width]: sines, then cosines, of the distances window to 0 times width / 2 frequencies, which
    fall from 1 to 1/10000.
    """
    num = width // 2
    frequencies = torch.exp(torch.arange(num) * (-math.log(10_000.0) / max(num - 1, 1)))
    angles = torch.arange(window, -1, -1)[:, None] * frequencies
    return torch.cat((angles.sin(), angles.cos()), -1)


class AudioTower:
    """A conformer and the projector behind it."""

    def __init__(self, config: AudioConfig, weights: AudioWeights) -> None:
        if config.encoder is None:
            raise TypeError("the config has no encoder")
        self.config = config
        self.weights = weights
        self._encoder = config.encoder
        # transformers clamps what norms take to this, which makes fp16's infinities its largest number.
        self._largest = min(self._encoder.largest, torch.finfo(weights.input.dtype).max)
        self._graphs = ShapeGraphs(self.forward) if weights.input.is_cuda else None

    @torch.inference_mode()
    def embed(self, items: Sequence[Media]) -> list[Tensor]:
        """[num_tokens, H] of each sound, in the activations' dtype. Raises UsageError for one that does not fit.

        Sounds go through together, the longest first, padded, which changes no result.
        """
        for item in items:
            require_sound(item, self.config.num_features, -(-len(item.data) // 4))
        step = 1 if self._graphs is None else GRAPH_STEP
        lengths = [-(-len(item.data) // step) * step for item in items]
        found: dict[int, Tensor] = {}
        for batch in _batches(lengths):
            padded = _padded([items[i].data for i in batch], lengths[batch[0]])
            frames = upload([padded], self.weights.input.device)
            rows = self._replay(frames, (len(batch), lengths[batch[0]]))
            found |= {i: row[: items[i].num_tokens] for i, row in zip(batch, rows, strict=True)}
        return [found[i] for i in range(len(items))]

    def _replay(self, frames: Tensor, shape: tuple[int, int]) -> Tensor:
        """As forward, by a graph where that is faster."""
        if self._graphs is None or math.prod(shape) > MAX_CAPTURED_FRAMES:
            return self.forward(frames, shape)
        return self._graphs(frames, shape)

    def forward(self, frames: Tensor, shape: tuple[int, int]) -> Tensor:
        """Embeddings [batch, tokens, H] of log-mel frames in fp32 [batch, num_frames, mels + 1]; the last column is 1,
        or 0 for padding at a sound's end. shape: (batch, num_frames). Waits for nothing on the host.

        Attention and convolutions look at no later token: what tokens behind a sound's end are does not matter to its
        own. Only the halving of the frames looks ahead.
        """
        weights = self.weights
        x = self._halved_twice(frames)
        unseen = _unseen(x.shape[1], self._encoder.num_keys, x.device)
        for layer in weights.layers:
            x = self._feed_forward(x, layer.first)
            y = self._attention(layer.attention, self._norm(x, layer.attention.pre_norm), unseen)
            x = x + self._norm(y, layer.attention.post_norm)
            x = self._light_conv(x, layer.light_conv)
            x = self._feed_forward(x, layer.second)
            x = self._norm(x, layer.out_norm)
        x = F.linear(x, weights.output, weights.output_bias)
        return _project(x, weights.projection, self.config.eps)

    def _halved_twice(self, frames: Tensor) -> Tensor:
        """[batch, tokens, D]: time and mels halved by each convolution, for which what is no sound is zero."""
        x, is_sound = frames[:, None, :, :-1].to(self.weights.input.dtype), frames[:, None, :, -1:]
        for kernel, norm in self.weights.convs:
            x = (x * is_sound.to(x.dtype)).contiguous(memory_format=torch.channels_last)
            x = F.conv2d(x, kernel, stride=2, padding=1).permute(0, 2, 3, 1)  # [batch, time, mels, channels]
            x = F.layer_norm(x, norm.shape, norm, eps=self.config.eps).relu().permute(0, 3, 1, 2)
            is_sound = is_sound[:, :, ::2]
        return F.linear(x.permute(0, 2, 3, 1).flatten(2), self.weights.input)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x.clamp(-self._largest, self._largest), weight.shape, weight, self.config.eps)

    def _feed_forward(self, x: Tensor, weights: FeedForwardWeights) -> Tensor:
        y = weights.down(F.silu(weights.up(self._norm(x, weights.pre_norm))))
        return x + self._norm(y, weights.post_norm) * self._encoder.residual_weight

    def _light_conv(self, x: Tensor, weights: LightConvWeights) -> Tensor:
        y = F.glu(weights.start(F.rms_norm(x, x.shape[-1:], weights.pre_norm, self.config.eps)))
        y = F.pad(y.transpose(1, 2), (weights.kernel.shape[-1] - 1, 0))
        y = F.conv1d(y, weights.kernel, groups=len(weights.kernel)).transpose(1, 2)
        return x + weights.end(F.silu(self._norm(y, weights.conv_norm)))

    def _attention(self, weights: AudioAttentionWeights, x: Tensor, unseen: Tensor) -> Tensor:
        """x [B, N, D]; unseen: see `_unseen`. Returns [B, N, D].

        Queries go in blocks of `window`, each with the keys of its own block and of the one before: all that they see,
        and no product of every query with every key.
        """
        batch, tokens, width = x.shape
        heads, dim, window = self._encoder.num_heads, width // self._encoder.num_heads, self._encoder.num_keys
        num_blocks = len(unseen)
        qkv = F.pad(weights.qkv(x).float(), (0, 0, 0, num_blocks * window - tokens))
        qkv = qkv.view(batch, num_blocks, window, 3, heads, dim).permute(3, 0, 4, 1, 2, 5)
        q = qkv[0] * weights.q_scale  # [B, heads, blocks, window, d]
        past = F.pad(qkv[1:], (0, 0, 0, 0, 1, 0))[:, :, :, :-1]
        k, v = torch.cat((past, qkv[1:]), -2)  # [B, heads, blocks, 2 * window, d]
        relative = q.flatten(2, 3) @ weights.relative_keys  # [B, heads, blocks * window, window + 1]
        scores = q @ (k * _K_SCALE).transpose(-1, -2) + _shifted(relative.unflatten(2, (num_blocks, window)))
        cap = self._encoder.logit_cap
        scores = (torch.tanh(scores / cap) * cap).masked_fill(unseen, _INVALID)
        y = torch.softmax(scores, -1) @ v
        return weights.out(y.permute(0, 2, 3, 1, 4).reshape(batch, -1, width)[:, :tokens].to(x.dtype))


class SampleEmbedder:
    """Frames of samples as soft tokens, each on its own: a norm, which takes its loudness away, and a linear."""

    def __init__(self, config: AudioConfig, weights: SampleWeights) -> None:
        self.config = config
        self.weights = weights

    @torch.inference_mode()
    def embed(self, items: Sequence[Media]) -> list[Tensor]:
        """As AudioTower.embed."""
        if not items:
            return []
        for item in items:
            require_sound(item, self.config.num_features, len(item.data))
        weight = self.weights.projection
        samples = upload([item.data for item in items], weight.device).to(weight.dtype)
        return list(_project(samples, weight, self.config.eps).split([item.num_tokens for item in items]))


def _project(x: Tensor, projection: Tensor, eps: float) -> Tensor:
    return F.linear(F.rms_norm(x, x.shape[-1:], None, eps), projection)


def _shifted(relative: Tensor) -> Tensor:
    """[..., window, 2 * window] of [..., window, window + 1]: key c, i + window - c tokens before query i, gets column
    c - i, which is of that distance. Other keys get what nobody sees. Source: appendix B of arXiv 1901.02860.
    """
    window = relative.shape[-2]
    wide = F.pad(relative, (0, window))  # a column more than there are keys, so that each row begins one further right
    return wide.flatten(-2)[..., : 2 * window * window].unflatten(-1, (window, 2 * window))


def _unseen(num_tokens: int, window: int, device: torch.device) -> Tensor:
    """bool [blocks, window, 2 * window]: keys that are later, too far back, or before the sound's beginning."""
    num_blocks = -(-num_tokens // window)
    key, query = torch.arange(2 * window, device=device), torch.arange(window, device=device)[:, None]
    is_first = torch.arange(num_blocks, device=device)[:, None, None] == 0
    return (key <= query) | (key > query + window) | (is_first & (key < window))


def _padded(sounds: Sequence[NDArray[np.float32]], num_frames: int) -> NDArray[np.float32]:
    """[batch, num_frames, features + 1], the last column 1 where there is sound."""
    frames = np.zeros((len(sounds), num_frames, sounds[0].shape[1] + 1), np.float32)
    for row, sound in zip(frames, sounds, strict=True):
        row[: len(sound), :-1] = sound
        row[: len(sound), -1] = 1.0
    return frames


def _batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Which sounds go together: the longest first, and no batch of more than MAX_FRAMES once padded, unless of one."""
    batch: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batch and lengths[batch[0]] * (len(batch) + 1) > MAX_FRAMES:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def require_sound(item: Media, num_features: int, num_tokens: int) -> None:
    """Raises UsageError for what was not made for this model: an image, other frames, another number of tokens."""
    shape = item.data.shape
    if item.kind != "audio" or item.data.dtype != np.float32 or len(shape) != 2 or shape[1] != num_features:
        raise UsageError(
            f"{item.kind} of {item.data.dtype} {list(shape)} is no sound: float32 [frames, {num_features}]"
        )
    if not len(item.data) or item.num_tokens != num_tokens:
        raise UsageError(f"{len(item.data)} frames of sound are {num_tokens} tokens, not {item.num_tokens}")
