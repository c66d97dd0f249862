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
from kerngen.runtime.media.towers.conformer import Conformer, TorchConformer, ask_all
from kerngen.runtime.media.towers.graphs import ShapeGraphs
from kerngen.runtime.media.towers.linear import (
    NO_BOUNDS,
    Bounds,
    ClippedLinear,
    Interval,
    TowerSource,
    clipped_linear,
    within,
)
from kerngen.runtime.media.towers.upload import upload
from kerngen.runtime.media.values import Media

MAX_FRAMES = 12_000  # of one forward, padding counted: four sounds of 30 s, whose first convolution gives 0.2 GB
# Above these the GPU takes longer than the host, and a graph's memory would be better spent.
MAX_CAPTURED_FRAMES = 6_000
# Frames, 2 s: what lengths are rounded up to, so that few graphs serve them all. The longest sound is 15 of them.
GRAPH_STEP = 200
_K_SCALE = math.log(1.0 + math.e) / math.log(2.0)


@dataclass(frozen=True, slots=True)
class FeedForwardWeights:
    """up [4 D, D], down [D, 4 D], norms [D]; post_norm is multiplied by what the residual adds of it.

    bounds: of what up gives and down takes. end_bounds: of what down gives, of what the norms behind it take, and of
    what the next linear takes.
    """

    pre_norm: Tensor
    up: ClippedLinear
    bounds: Bounds
    down: ClippedLinear
    post_norm: Tensor
    end_bounds: Bounds


@dataclass(frozen=True, slots=True)
class AudioAttentionWeights:
    """qkv: rows q | k | v, out [D, D], norms [D].

    q_scale [d] and relative_keys [heads, window + 1, d], of distances from window to 0, are in fp32, made of
    per_dim_scale and relative_k_proj. A token sees `window` tokens, itself and those before it. bounds: of q, k, v and
    what out takes. end_bounds: as of FeedForwardWeights.
    """

    pre_norm: Tensor
    qkv: ClippedLinear
    bounds: Bounds
    out: ClippedLinear
    post_norm: Tensor
    end_bounds: Bounds
    q_scale: Tensor
    relative_keys: Tensor


@dataclass(frozen=True, slots=True)
class LightConvWeights:
    """start: rows value | gate; taps [size, D], end [D, D], norms [D].

    bounds: of what start gives, of what the norm takes, and of what end takes. end_bounds: as of FeedForwardWeights.
    """

    pre_norm: Tensor
    start: ClippedLinear
    taps: Tensor
    bounds: Bounds
    conv_norm: Tensor
    end: ClippedLinear
    end_bounds: Bounds


@dataclass(frozen=True, slots=True)
class AudioLayerWeights:
    first: FeedForwardWeights
    attention: AudioAttentionWeights
    light_conv: LightConvWeights
    second: FeedForwardWeights
    out_norm: Tensor


@dataclass(frozen=True, slots=True)
class AudioWeights:
    """Of the halvings: taps [9, C] and norm [C] of the first, kernel [C', C, 3, 3] and norm [C'] of the second.

    input [D, mels / 4 * C'], output [O, D] and its bias [O], projection [H, O].
    """

    first: tuple[Tensor, Tensor]
    second: tuple[Tensor, Tensor]
    input: Tensor
    layers: tuple[AudioLayerWeights, ...]
    output: Tensor
    output_bias: Tensor
    projection: Tensor


@dataclass(frozen=True, slots=True)
class SampleWeights:
    """projection [H, samples of a frame]."""

    projection: Tensor


def audio_tower(
    source: TowerSource, config: AudioConfig, hidden_size: int, conformer: Conformer | None = None
) -> AudioTower | SampleEmbedder:
    """What embeds sound, with the weights of `source`. hidden_size: the text model's. conformer: as of AudioTower."""
    if config.encoder is None:
        return SampleEmbedder(config, SampleWeights(_projection(source, config, hidden_size)))
    return AudioTower(config, _audio_weights(source, config, config.encoder, hidden_size), conformer)


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
        first=(convs[0][0].flatten(1).t().contiguous(), convs[0][1]),
        second=(convs[1][0].contiguous(memory_format=torch.channels_last), convs[1][1]),
        input=source.tensor(f"{subsample}.input_proj_linear.weight", width, quarter),
        layers=_layers(source, "audio_tower.layers", encoder),
        output=source.tensor("audio_tower.output_proj.weight", config.hidden_size, width),
        output_bias=source.tensor("audio_tower.output_proj.bias", config.hidden_size),
        projection=_projection(source, config, hidden_size),
    )


def _layers(source: TowerSource, name: str, encoder: AudioEncoderConfig) -> tuple[AudioLayerWeights, ...]:
    width = encoder.hidden_size
    ups = [
        clipped_linear(source, [(f"{name}.{i}.feed_forward1.ffw_layer_1", 4 * width)], width, clips=encoder.clips)
        for i in range(encoder.num_layers)
    ]
    return tuple(_layer(source, name, encoder, ups, i) for i in range(encoder.num_layers))


def _layer(
    source: TowerSource, name: str, encoder: AudioEncoderConfig, ups: Sequence[ClippedLinear], index: int
) -> AudioLayerWeights:
    """ups: of every layer's first feed-forward. index: which layer."""
    name, width = f"{name}.{index}", encoder.hidden_size
    heads, dim = encoder.num_heads, width // encoder.num_heads
    largest = _largest(encoder, ups[0].weight.dtype)
    taken = ups[index + 1].takes if index + 1 < encoder.num_layers else NO_BOUNDS

    def norm(which: str) -> Tensor:
        return source.tensor(f"{name}.{which}.weight", width)

    def linear(modules: Sequence[str], rows: int, columns: int) -> ClippedLinear:
        return clipped_linear(source, [(f"{name}.{each}", rows) for each in modules], columns, clips=encoder.clips)

    def bounds(*each: Interval) -> Bounds:
        return Bounds.table_of(each, ups[0].weight)

    def end_bounds(given: ClippedLinear, takes: Interval) -> Bounds:
        """Of the residual behind `given`, whose norm and those of the sum take no more than `largest`."""
        return bounds(within(given.gives[0], largest), (-largest, largest), takes)

    def feed_forward(which: str, up: ClippedLinear, given: ClippedLinear, takes: Interval) -> FeedForwardWeights:
        return FeedForwardWeights(
            pre_norm=norm(f"{which}.pre_layer_norm"),
            up=up.before() if which == "feed_forward1" and not index else up.between(),
            bounds=bounds(*up.gives, given.takes),
            down=given.between(),
            post_norm=norm(f"{which}.post_layer_norm") * encoder.residual_weight,
            end_bounds=end_bounds(given, takes),
        )

    downs = [linear([f"feed_forward{i}.ffw_layer_2"], width, 4 * width) for i in (1, 2)]
    up = linear(["feed_forward2.ffw_layer_1"], 4 * width, width)
    qkv = linear([f"self_attn.{which}_proj" for which in "qkv"], width, width)
    out = linear(["self_attn.post"], width, width)
    start, end = linear(["lconv1d.linear_start"], 2 * width, width), linear(["lconv1d.linear_end"], width, width)
    scale = source.tensor(f"{name}.self_attn.per_dim_scale", dim)
    relative = source.tensor(f"{name}.self_attn.relative_k_proj.weight", width, width)
    keys = F.linear(_distances(width, encoder.num_keys).to(relative), relative).float()
    kernel = source.tensor(f"{name}.lconv1d.depthwise_conv1d.weight", width, 1, encoder.conv_kernel)
    return AudioLayerWeights(
        first=feed_forward("feed_forward1", ups[index], downs[0], qkv.takes),
        attention=AudioAttentionWeights(
            pre_norm=norm("norm_pre_attn"),
            qkv=qkv.between(),
            bounds=bounds(*qkv.gives, out.takes),
            out=out.between(),
            post_norm=norm("norm_post_attn"),
            # The norm before a convolution takes what it gets.
            end_bounds=bounds(within(out.gives[0], largest), NO_BOUNDS, start.takes),
            q_scale=F.softplus(scale).float() * (dim**-0.5 / math.log(2.0)),
            relative_keys=keys.view(-1, heads, dim).transpose(0, 1).contiguous(),
        ),
        light_conv=LightConvWeights(
            pre_norm=norm("lconv1d.pre_layer_norm"),
            start=start.between(),
            taps=kernel[:, 0].t().contiguous(),
            bounds=bounds(start.gives[0], (-largest, largest), end.takes),
            conv_norm=norm("lconv1d.conv_norm"),
            end=end.between(),
            end_bounds=bounds(end.gives[0], (-largest, largest), up.takes),
        ),
        second=feed_forward("feed_forward2", up, downs[1], taken),
        out_norm=norm("norm_out"),
    )


def _largest(encoder: AudioEncoderConfig, dtype: torch.dtype) -> float:
    """What transformers clamps to before norms, which makes fp16's infinities its largest number."""
    largest: float = torch.tensor(min(encoder.largest, torch.finfo(dtype).max), dtype=dtype).item()
    return largest


def _distances(width: int, window: int) -> Tensor:
    """fp32 [window + 1, width]: sines, then cosines, of the distances window to 0 times width / 2 frequencies, which
    fall from 1 to 1/10000.
    """
    num = width // 2
    frequencies = torch.exp(torch.arange(num) * (-math.log(10_000.0) / max(num - 1, 1)))
    angles = torch.arange(window, -1, -1)[:, None] * frequencies
    return torch.cat((angles.sin(), angles.cos()), -1)


class AudioTower:
    """A conformer and the projector behind it. conformer: what computes beside products; None for torch."""

    def __init__(self, config: AudioConfig, weights: AudioWeights, conformer: Conformer | None = None) -> None:
        if config.encoder is None:
            raise TypeError("the config has no encoder")
        self.config = config
        self.weights = weights
        self.conformer = conformer or TorchConformer()
        self._encoder = config.encoder
        self._largest = _largest(config.encoder, weights.input.dtype)
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
            frames = upload(padded, self.weights.input.device)
            rows = self._replay(frames, (len(batch), lengths[batch[0]]))
            found |= {i: row[: items[i].num_tokens] for i, row in zip(batch, rows, strict=True)}
        return [found[i] for i in range(len(items))]

    def _replay(self, frames: Tensor, shape: tuple[int, int]) -> Tensor:
        """As forward, by a graph where that is faster."""
        if self._graphs is None or math.prod(shape) > MAX_CAPTURED_FRAMES:
            return self.forward(frames, shape)
        return self._graphs(frames, shape)

    def warm_up(self) -> None:
        """Ask for the kernels that sounds of all lengths need. What listens takes it down; nothing is computed."""
        if not isinstance(self.conformer, TorchConformer):
            ask_all(self.conformer, self.config, self.weights.input.dtype)

    def forward(self, frames: Tensor, shape: tuple[int, int]) -> Tensor:
        """Embeddings [batch, tokens, H] of log-mel frames in fp32, as `_padded` lays them out. shape: (batch,
        num_frames). Waits for nothing on the host.

        Attention and convolutions look at no later token: what tokens behind a sound's end are does not matter to its
        own. Only the halving of the frames looks ahead.
        """
        (batch, num_frames), weights, eps = shape, self.weights, self.config.eps
        mels, lengths = frames[: batch * num_frames], frames[batch * num_frames :].flatten()[:batch]
        x = self._halved_twice(mels, lengths, num_frames)
        seq_len, x = x.shape[1], x.flatten(0, 1)
        y = F.rms_norm(x.clamp(-self._largest, self._largest), x.shape[-1:], weights.layers[0].first.pre_norm, eps)
        for layer, following in zip(weights.layers, (*weights.layers[1:], None), strict=True):
            attention, conv = layer.attention, layer.light_conv
            x, y = self._feed_forward(layer.first, x, y, attention.pre_norm, None)
            y = self.conformer.attention(attention.qkv(y), attention.q_scale, attention.relative_keys,
                                         attention.bounds, _K_SCALE, self._encoder.logit_cap, seq_len)  # fmt: skip
            x, y = self._residual(x, attention.out(y), attention.post_norm, conv.pre_norm, None, attention.end_bounds)
            y = self.conformer.glu_conv(conv.start(y), conv.taps, conv.conv_norm, conv.bounds, seq_len, eps)
            x, y = self._residual(x, conv.end(y), None, layer.second.pre_norm, None, conv.end_bounds)
            following_norm = None if following is None else following.first.pre_norm
            x, y = self._feed_forward(layer.second, x, y, layer.out_norm, following_norm)
        y = F.linear(y.unflatten(0, (batch, seq_len)), weights.output, weights.output_bias)
        return _project(y, weights.projection, eps)

    def _halved_twice(self, frames: Tensor, lengths: Tensor, num_frames: int) -> Tensor:
        """[batch, tokens, D] of frames [batch * num_frames, mels], of which `lengths` [batch] are sound and those
        behind are zero: time and mels halved by each convolution, for which what is no sound is zero.
        """
        (taps, norm), (kernel, last), eps = self.weights.first, self.weights.second, self.config.eps
        x = self.conformer.mel_conv(frames, lengths, taps, norm, num_frames, eps).permute(0, 3, 1, 2)  # channels last
        x = F.conv2d(x, kernel, stride=2, padding=1).permute(0, 2, 3, 1)  # [batch, time, mels, channels]
        return F.linear(F.layer_norm(x, last.shape, last, eps=eps).relu_().flatten(2), self.weights.input)

    def _feed_forward(
        self, weights: FeedForwardWeights, x: Tensor, y: Tensor, following: Tensor, last: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        y = weights.down(self.conformer.silu(weights.up(y), weights.bounds))
        return self._residual(x, y, weights.post_norm, following, last, weights.end_bounds)

    def _residual(
        self, x: Tensor, y: Tensor, post: Tensor | None, following: Tensor, last: Tensor | None, bounds: Bounds
    ) -> tuple[Tensor, Tensor]:
        return self.conformer.residual_norms(x, y, post, following, last, bounds, self.config.eps)


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


def _padded(sounds: Sequence[NDArray[np.float32]], num_frames: int) -> list[NDArray[np.float32]]:
    """What, one below another, is every sound with zeros up to num_frames, and then the sounds' lengths, row by row."""
    features = sounds[0].shape[1]
    zeros = np.zeros((max(num_frames - min(map(len, sounds)), 0), features), np.float32)
    lengths = np.zeros((-(-len(sounds) // features), features), np.float32)
    lengths.flat[: len(sounds)] = [len(sound) for sound in sounds]
    parts = [part for sound in sounds for part in (sound, zeros[: num_frames - len(sound)])]
    return [*parts, lengths]


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
