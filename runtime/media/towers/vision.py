"""Images and frames of a video as embeddings of the text model: the vision transformer of 31B, 26B-A4B, E4B and E2B,
and the 12B's patches, which are embedded one by one.

Source: Gemma4VisionModel, Gemma4MultimodalEmbedder and Gemma4UnifiedVisionEmbedder of transformers' modeling files.
Images of one size go through together and none is padded, so that attention needs no mask.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kerngen.errors import UsageError
from kerngen.runtime.media.config import VisionConfig, VisionEncoderConfig
from kerngen.runtime.media.towers.graphs import ShapeGraphs
from kerngen.runtime.media.towers.linear import ClippedLinear, TowerSource, clipped_linear
from kerngen.runtime.media.towers.rows import Rows, TorchRows, ask_all
from kerngen.runtime.media.values import Media

# Of one forward: as many as the largest image has, so that a batch takes no more memory than that image.
MAX_PATCHES = 10_080
# Above these the GPU takes longer than the host, and a graph's memory would be better spent.
MAX_CAPTURED_PATCHES = 5_040
LAYER_NORM_EPS = 1e-5  # torch's default, which transformers leaves in place


@dataclass(frozen=True, slots=True)
class VisionLayerWeights:
    """Norms are [D]. qkv: rows q | k | v; gate_up: rows gate | up.

    head_norms: q_norm and k_norm, as they are and with the elements of each pair exchanged, [2, 1, d] both.
    """

    input_norm: Tensor
    qkv: ClippedLinear
    head_norms: tuple[Tensor, Tensor]
    out: ClippedLinear
    post_attention_norm: Tensor
    pre_ffn_norm: Tensor
    gate_up: ClippedLinear
    down: ClippedLinear
    post_ffn_norm: Tensor


@dataclass(frozen=True, slots=True)
class VisionWeights:
    """patches [D, 3 p^2], positions [2, P, D] of x and y, projection [H, D]. standard: bias and scale [D] in fp32."""

    patches: Tensor
    positions: Tensor
    layers: tuple[VisionLayerWeights, ...]
    standard: tuple[Tensor, Tensor] | None
    projection: Tensor


@dataclass(frozen=True, slots=True)
class PatchWeights:
    """Norms are (weight, bias), of [3 p^2] or [D]. patches [D, 3 p^2] and a bias [D], positions [P, 2, D] of x and y,
    projection [H, D].
    """

    input_norm: tuple[Tensor, Tensor]
    patches: Tensor
    patches_bias: Tensor
    patches_norm: tuple[Tensor, Tensor]
    positions: Tensor
    position_norm: tuple[Tensor, Tensor]
    projection: Tensor


def vision_tower(
    source: TowerSource, config: VisionConfig, hidden_size: int, rows: Rows | None = None
) -> VisionTower | PatchEmbedder:
    """What embeds images, with the weights of `source`. hidden_size: the text model's. rows: as of VisionTower."""
    if config.encoder is None:
        return PatchEmbedder(config, _patch_weights(source, config, hidden_size))
    return VisionTower(config, _vision_weights(source, config, config.encoder, hidden_size), rows)


def _vision_weights(
    source: TowerSource, config: VisionConfig, encoder: VisionEncoderConfig, hidden_size: int
) -> VisionWeights:
    width, name = config.hidden_size, "vision_tower"
    standard = None
    if encoder.standardizes:  # in fp32: fp16 may lack their range
        bias, scale = (source.tensor(f"{name}.std_{what}", width, dtype=torch.float32) for what in ("bias", "scale"))
        standard = bias, scale
    return VisionWeights(
        patches=source.tensor(f"{name}.patch_embedder.input_proj.weight", width, _patch_values(config)),
        positions=source.tensor(f"{name}.patch_embedder.position_embedding_table", 2, config.num_positions, width),
        layers=tuple(
            _layer(source, f"{name}.encoder.layers.{i}", width, encoder) for i in range(encoder.num_layers)
        ),
        standard=standard,
        projection=source.tensor("embed_vision.embedding_projection.weight", hidden_size, width),
    )  # fmt: skip


def _layer(source: TowerSource, name: str, width: int, encoder: VisionEncoderConfig) -> VisionLayerWeights:
    attn, mlp, dim, inner = f"{name}.self_attn", f"{name}.mlp", encoder.head_dim, encoder.intermediate_size
    rows = encoder.num_heads * dim
    norms = torch.stack([source.tensor(f"{attn}.{which}_norm.weight", dim) for which in "qk"])[:, None]
    return VisionLayerWeights(
        input_norm=source.tensor(f"{name}.input_layernorm.weight", width),
        qkv=clipped_linear(source, [(f"{attn}.{which}_proj", rows) for which in "qkv"], width, clips=encoder.clips),
        head_norms=(norms, _partner(norms)),
        out=clipped_linear(source, [(f"{attn}.o_proj", width)], rows, clips=encoder.clips),
        post_attention_norm=source.tensor(f"{name}.post_attention_layernorm.weight", width),
        pre_ffn_norm=source.tensor(f"{name}.pre_feedforward_layernorm.weight", width),
        gate_up=clipped_linear(
            source, [(f"{mlp}.{which}_proj", inner) for which in ("gate", "up")], width, clips=encoder.clips
        ),
        down=clipped_linear(source, [(f"{mlp}.down_proj", width)], inner, clips=encoder.clips),
        post_ffn_norm=source.tensor(f"{name}.post_feedforward_layernorm.weight", width),
    )


def _patch_weights(source: TowerSource, config: VisionConfig, hidden_size: int) -> PatchWeights:
    width, values, name = config.hidden_size, _patch_values(config), "vision_embedder"

    def norm(which: str, size: int) -> tuple[Tensor, Tensor]:
        return source.tensor(f"{name}.{which}.weight", size), source.tensor(f"{name}.{which}.bias", size)

    return PatchWeights(
        input_norm=norm("patch_ln1", values),
        patches=source.tensor(f"{name}.patch_dense.weight", width, values),
        patches_bias=source.tensor(f"{name}.patch_dense.bias", width),
        patches_norm=norm("patch_ln2", width),
        positions=source.tensor(f"{name}.pos_embedding", config.num_positions, 2, width),
        position_norm=norm("pos_norm", width),
        projection=source.tensor("embed_vision.embedding_projection.weight", hidden_size, width),
    )


def _patch_values(config: VisionConfig) -> int:
    return 3 * config.patch_size**2


class VisionTower:
    """A vision transformer and the projector behind it. rows: what norms and gates are computed by; None for torch."""

    def __init__(self, config: VisionConfig, weights: VisionWeights, rows: Rows | None = None) -> None:
        if config.encoder is None:
            raise TypeError("the config has no encoder")
        self.config = config
        self.rows = rows or TorchRows()
        self.weights = weights
        self._encoder = config.encoder
        # p = 2 (x / 255 - 0.5) in fp32, then in the weights' dtype
        self._pixels = _pixel_table(weights.patches, 2.0, 0.5)
        self._graphs = ShapeGraphs(self.forward) if weights.patches.is_cuda else None

    def embed(self, items: Sequence[Media], *, graphs: bool = True) -> list[Tensor]:
        """[num_tokens, H] of each image, in the activations' dtype. Raises UsageError for one that does not fit.

        graphs: by CUDA graphs where these are faster; the result is the same.
        """
        return _embed(items, self.config, self.weights.patches, self._replay if graphs else self.forward)

    def _replay(self, patches: Tensor, shape: tuple[int, int, int]) -> Tensor:
        """As forward, by a graph where that is faster."""
        if self._graphs is None or len(patches) > MAX_CAPTURED_PATCHES:
            return self.forward(patches, shape)
        return self._graphs(patches, shape)

    def forward(self, patches: Tensor, shape: tuple[int, int, int]) -> Tensor:
        """Embeddings [batch, tokens, H] of uint8 patches [batch * rows * columns, 3 p^2].

        shape: (batch, rows, columns). Waits for nothing on the host.
        """
        batch, rows, columns = shape
        w, dim, eps = self.weights, self._encoder.head_dim, self.config.eps
        x = F.linear(self._pixels[patches.int()], w.patches).view(batch, rows * columns, -1)
        x = (x + (w.positions[0, :columns] + w.positions[1, :rows, None]).flatten(0, 1)).flatten(0, 1)
        cos, sin = _rotation(rows, columns, dim, self._encoder.rope_theta, x)
        y = self.rows.norm(x, w.layers[0].input_norm, eps)
        for layer, following in zip(w.layers, (*w.layers[1:], None), strict=True):
            y = layer.out(self._attention(layer, y, cos, sin))
            x, y = self.rows.add_norm(x, y, layer.post_attention_norm, layer.pre_ffn_norm, eps)
            y = layer.down(self.rows.gelu_gate(layer.gate_up(y)))
            following_norm = None if following is None else following.input_norm
            x, y = self.rows.add_norm(x, y, layer.post_ffn_norm, following_norm, eps)
        return self._project(x.view(batch, rows, columns, -1))

    def warm_up(self) -> None:
        """Ask for the kernels that images of all sizes need. What listens takes it down; nothing is computed."""
        if not isinstance(self.rows, TorchRows):
            ask_all(self.rows, self.config.hidden_size, self._encoder.intermediate_size, self.weights.patches.dtype)

    def _attention(self, layer: VisionLayerWeights, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B * N, D]; cos, sin [N, 1, 1, d]. Returns [B * N, heads * d]."""
        dim = self._encoder.head_dim
        qkv = layer.qkv(x).view(-1, len(cos), 3, self._encoder.num_heads, dim)
        normed = F.rms_norm(qkv, (dim,), None, self.config.eps)
        # The norm's weight goes into the rotation: each is then one pass over queries and keys together.
        qk, (norms, of_partners) = normed[:, :, :2], layer.head_norms
        qk = torch.addcmul(qk * (norms * cos), _partner(qk), of_partners * sin)
        q, k, v = (each.transpose(1, 2) for each in (qk[:, :, 0], qk[:, :, 1], normed[:, :, 2]))
        return F.scaled_dot_product_attention(q, k, v, scale=1.0).transpose(1, 2).flatten(2).flatten(0, 1)

    def _project(self, x: Tensor) -> Tensor:
        """x [B, rows, columns, D], pooled and projected: [B, tokens, H]. In fp32 up to the norm: fp16 is too narrow."""
        side, weights = self.config.pooling, self.weights
        pooled = x.unflatten(2, (-1, side)).unflatten(1, (-1, side)).float().mean((2, 4)).flatten(1, 2)
        pooled = pooled * self.config.hidden_size**0.5
        if weights.standard is not None:
            bias, scale = weights.standard
            pooled = (pooled - bias) * scale
        normed = F.rms_norm(pooled, pooled.shape[-1:], None, self.config.eps)
        return F.linear(normed.to(x.dtype), weights.projection)


class PatchEmbedder:
    """Patches as soft tokens, each on its own: three layer norms, a linear, a position, and the projector."""

    def __init__(self, config: VisionConfig, weights: PatchWeights) -> None:
        self.config = config
        self.weights = weights
        self._pixels = _pixel_table(weights.patches, 1.0, 0.0)

    def embed(self, items: Sequence[Media]) -> list[Tensor]:
        """As VisionTower.embed."""
        return _embed(items, self.config, self.weights.patches, self.forward)

    def forward(self, patches: Tensor, shape: tuple[int, int, int]) -> Tensor:
        """As VisionTower.forward."""
        batch, rows, columns = shape
        w = self.weights
        y = F.linear(_layer_norm(self._pixels[patches.int()], w.input_norm), w.patches, w.patches_bias)
        y = _layer_norm(y, w.patches_norm).view(batch, rows * columns, -1)
        y = y + (w.positions[:columns, 0] + w.positions[:rows, 1, None]).flatten(0, 1)
        y = F.rms_norm(_layer_norm(y, w.position_norm), y.shape[-1:], None, self.config.eps)
        return F.linear(y, w.projection)


@torch.inference_mode()
def _embed(
    items: Sequence[Media],
    config: VisionConfig,
    like: Tensor,
    forward: Callable[[Tensor, tuple[int, int, int]], Tensor],
) -> list[Tensor]:
    """What `forward` makes of the items, those of one grid together. like: a tensor where it runs."""
    found: dict[int, Tensor] = {}
    for grid, batch in _batches(items, config):
        patches = torch.from_numpy(np.concatenate([items[i].data for i in batch])).to(like.device)
        found |= zip(batch, forward(patches, (len(batch), *grid)), strict=True)
    return [found[i] for i in range(len(items))]


def _layer_norm(x: Tensor, norm: tuple[Tensor, Tensor]) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], *norm, LAYER_NORM_EPS)


def _pixel_table(like: Tensor, factor: float, middle: float) -> Tensor:
    """factor (x / 255 - middle) of each x from 0 to 255, in fp32 and then in the dtype of `like`: [256]."""
    values = torch.arange(256, dtype=torch.float32) * (1 / 255)
    return (factor * (values - middle)).to(like.device, like.dtype)


def _rotation(rows: int, columns: int, dim: int, theta: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [rows * columns, 1, 1, dim] of the patches' angles, in the dtype of `like`; sin is of `_partner`, and
    negative for the first of a pair.

    The first half of a head turns by x and the second by y. In a half of h elements, j and j + h / 2 are a pair, which
    turns by theta^(-2 j / h) times the position.
    """
    half = dim // 2
    each = torch.arange(0, half, 2, dtype=torch.float32, device=like.device) / half
    frequencies = 1.0 / theta**each  # [half / 2]
    x, y = (torch.arange(n, dtype=torch.float32, device=like.device)[:, None] * frequencies for n in (columns, rows))
    # [rows, columns, 2, half / 2]
    angles = torch.stack((x.expand(rows, -1, -1), y[:, None].expand(-1, columns, -1)), 2)
    cos, sin = angles.cos(), angles.sin()

    def of_pairs(first: Tensor, second: Tensor) -> Tensor:
        return torch.stack((first, second), -2).view(rows * columns, 1, 1, dim).to(like.dtype)

    return of_pairs(cos, cos), of_pairs(-sin, sin)


def _partner(x: Tensor) -> Tensor:
    """x [..., d] with the two elements of each pair exchanged."""
    return x.unflatten(-1, (2, 2, -1)).flip(-2).flatten(-3)


def _batches(items: Sequence[Media], config: VisionConfig) -> Iterator[tuple[tuple[int, int], list[int]]]:
    """Which items go through together: those of one grid, up to MAX_PATCHES patches. Raises as `require_image`."""
    of_grid: dict[tuple[int, int], list[int]] = defaultdict(list)
    for i, item in enumerate(items):
        require_image(item, config)
        of_grid[item.grid].append(i)
    for grid, found in of_grid.items():
        size = max(MAX_PATCHES // (grid[0] * grid[1]), 1)
        for first in range(0, len(found), size):
            yield grid, found[first : first + size]


def require_image(item: Media, config: VisionConfig) -> None:
    """Raises UsageError for what was not made for this model: another size of patches, no image, more than it knows."""
    rows, columns = item.grid
    expected = (rows * columns, _patch_values(config))
    if item.kind == "audio" or item.data.dtype != np.uint8 or item.data.shape != expected:
        raise UsageError(
            f"{item.kind} of {item.data.dtype} {list(item.data.shape)} is no image of {rows} x {columns} patches of "
            f"{config.patch_size} x {config.patch_size} pixels: uint8 {list(expected)}"
        )
    if not 0 < rows <= config.num_positions or not 0 < columns <= config.num_positions:
        raise UsageError(f"an image of {rows} x {columns} patches; the model knows {config.num_positions} of a side")
    if rows % config.pooling or columns % config.pooling:
        raise UsageError(f"{rows} x {columns} patches do not divide into tokens of {config.pooling} x {config.pooling}")
    if (tokens := rows * columns // config.pooling**2) != item.num_tokens:
        raise UsageError(f"{rows} x {columns} patches are {tokens} tokens, not {item.num_tokens}")
