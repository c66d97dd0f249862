"""Images and frames of a video as embeddings of the text model: the vision transformer of 31B, 26B-A4B, E4B and E2B,
and the 12B's patches, which are embedded one by one.

Source: Gemma4VisionModel, Gemma4MultimodalEmbedder and Gemma4UnifiedVisionEmbedder of transformers' modeling files.
Images of one size go through together and none is padded, so that attention needs no mask.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kerngen.errors import UsageError
from kerngen.runtime.media.config import VisionConfig, VisionEncoderConfig
from kerngen.runtime.media.towers.graphs import ShapeGraphs
from kerngen.runtime.media.towers.linear import NO_BOUNDS, Bounds, ClippedLinear, TowerSource, clipped_linear
from kerngen.runtime.media.towers.rows import Rows, TorchRows, Turn, ask_all, partner
from kerngen.runtime.media.towers.upload import upload
from kerngen.runtime.media.values import Media

# Of one forward: as many as the largest image has, so that a batch takes no more memory than that image.
MAX_PATCHES = 10_080
# Above these the GPU takes longer than the host, and a graph's memory would be better spent. Of a model without an
# encoder, whose patches are tokens: ten launches for all.
MAX_CAPTURED_PATCHES = 5_040
MAX_CAPTURED_TOKENS = 1_120
LAYER_NORM_EPS = 1e-5  # torch's default, which transformers leaves in place


@dataclass(frozen=True, slots=True)
class VisionLayerWeights:
    """Norms are [D]. qkv: rows q | k | v; gate_up: rows gate | up.

    head_norms: q_norm and k_norm, as they are and with the elements of each pair exchanged, [2, 1, d] both. What stands
    between two linears clamps what the one gives and the other takes: head_bounds q, k and v; attention_bounds what
    `out` gives and gate_up takes; gate_bounds gate, up and what `down` takes; ffn_bounds what that gives and the next
    layer's qkv takes.
    """

    input_norm: Tensor
    qkv: ClippedLinear
    head_bounds: Bounds | None
    head_norms: tuple[Tensor, Tensor]
    out: ClippedLinear
    attention_bounds: Bounds | None
    post_attention_norm: Tensor
    pre_ffn_norm: Tensor
    gate_up: ClippedLinear
    gate_bounds: Bounds | None
    down: ClippedLinear
    ffn_bounds: Bounds | None
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
        layers=_layers(source, f"{name}.encoder.layers", width, encoder),
        standard=standard,
        projection=source.tensor("embed_vision.embedding_projection.weight", hidden_size, width),
    )  # fmt: skip


def _layers(source: TowerSource, name: str, width: int, encoder: VisionEncoderConfig) -> tuple[VisionLayerWeights, ...]:
    rows = encoder.num_heads * encoder.head_dim
    qkvs = [
        clipped_linear(
            source, [(f"{name}.{i}.self_attn.{which}_proj", rows) for which in "qkv"], width, clips=encoder.clips
        )
        for i in range(encoder.num_layers)
    ]
    following = [*qkvs[1:], None]
    # What the first takes is made by a norm alone, which clamps nothing.
    taking = [linear.between() if i else linear.before() for i, linear in enumerate(qkvs)]
    return tuple(
        _layer(source, f"{name}.{i}", width, encoder, taking[i], Bounds.of(qkvs[i].gives, qkvs[i].weight), following[i])
        for i in range(encoder.num_layers)
    )


def _layer(
    source: TowerSource,
    name: str,
    width: int,
    encoder: VisionEncoderConfig,
    qkv: ClippedLinear,
    head_bounds: Bounds | None,
    following: ClippedLinear | None,
) -> VisionLayerWeights:
    """following: the next layer's qkv."""
    attn, mlp, dim, inner = f"{name}.self_attn", f"{name}.mlp", encoder.head_dim, encoder.intermediate_size
    norms = torch.stack([source.tensor(f"{attn}.{which}_norm.weight", dim) for which in "qk"])[:, None]

    def linear(modules: Sequence[tuple[str, int]], columns: int) -> ClippedLinear:
        return clipped_linear(source, modules, columns, clips=encoder.clips)

    out = linear([(f"{attn}.o_proj", width)], encoder.num_heads * dim)
    gate_up = linear([(f"{mlp}.{which}_proj", inner) for which in ("gate", "up")], width)
    down = linear([(f"{mlp}.down_proj", width)], inner)
    return VisionLayerWeights(
        input_norm=source.tensor(f"{name}.input_layernorm.weight", width),
        qkv=qkv,
        head_bounds=head_bounds,
        head_norms=(norms, partner(norms)),
        out=out.before(),
        attention_bounds=Bounds.of((*out.gives, gate_up.takes), norms),
        post_attention_norm=source.tensor(f"{name}.post_attention_layernorm.weight", width),
        pre_ffn_norm=source.tensor(f"{name}.pre_feedforward_layernorm.weight", width),
        gate_up=gate_up.between(),
        gate_bounds=Bounds.of((*gate_up.gives, down.takes), norms),
        down=down.between(),
        ffn_bounds=Bounds.of((*down.gives, NO_BOUNDS if following is None else following.takes), norms),
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


class _ByGrid:
    """Embeds images of one grid together, by CUDA graphs of `forward` up to `most_captured` patches."""

    def __init__(self, config: VisionConfig, like: Tensor, most_captured: int) -> None:
        """like: a tensor where `forward` runs."""
        self.config = config
        self._device = like.device
        self._most_captured = most_captured
        self._graphs = ShapeGraphs(self.forward) if like.is_cuda else None

    @torch.inference_mode()
    def embed(self, items: Sequence[Media], *, graphs: bool = True) -> list[Tensor]:
        """[num_tokens, H] of each image, in the activations' dtype. Raises UsageError for one that does not fit.

        graphs: by CUDA graphs where these are faster; the result is the same.
        """
        found: dict[int, Tensor] = {}
        for grid, batch in _batches(items, self.config):
            patches, shape = upload([items[i].data for i in batch], self._device), (len(batch), *grid)
            if not graphs or self._graphs is None or len(patches) > self._most_captured:
                made = self.forward(patches, shape)
            else:
                made = self._graphs(patches, shape)
            found |= zip(batch, made, strict=True)
        return [found[i] for i in range(len(items))]

    def forward(self, patches: Tensor, shape: tuple[int, int, int]) -> Tensor:
        """Embeddings [batch, tokens, H] of uint8 patches [batch * rows * columns, 3 p^2].

        shape: (batch, rows, columns). Waits for nothing on the host.
        """
        raise NotImplementedError


class VisionTower(_ByGrid):
    """A vision transformer and the projector behind it. rows: what makes norms, heads and gates; None for torch."""

    def __init__(self, config: VisionConfig, weights: VisionWeights, rows: Rows | None = None) -> None:
        if (encoder := config.encoder) is None:
            raise TypeError("the config has no encoder")
        super().__init__(config, weights.patches, MAX_CAPTURED_PATCHES)
        self.rows = rows or TorchRows()
        self.weights = weights
        # p = 2 (x / 255 - 0.5) in fp32, then in the weights' dtype
        self._pixels = _pixel_table(weights.patches, 2.0, 0.5)
        self._turns = _turns(config.num_positions, encoder.head_dim // 2, encoder.rope_theta, weights.patches)

    def forward(self, patches: Tensor, shape: tuple[int, int, int]) -> Tensor:
        batch, rows, columns = shape
        w, eps = self.weights, self.config.eps
        x = F.linear(self._pixels[patches.int()], w.patches).view(batch, rows * columns, -1)
        x = (x + (w.positions[0, :columns] + w.positions[1, :rows, None]).flatten(0, 1)).flatten(0, 1)
        turn = self._turn(rows, columns)
        y = self.rows.norm(x, w.layers[0].input_norm, eps)
        for layer, following in zip(w.layers, (*w.layers[1:], None), strict=True):
            y = layer.out(self._attention(layer, y, turn))
            x, y = self.rows.add_norm(x, y, layer.post_attention_norm, layer.pre_ffn_norm, layer.attention_bounds, eps)
            y = layer.down(self.rows.gelu_gate(layer.gate_up(y), layer.gate_bounds))
            following_norm = None if following is None else following.input_norm
            x, y = self.rows.add_norm(x, y, layer.post_ffn_norm, following_norm, layer.ffn_bounds, eps)
        return self._project(x.view(batch, rows, columns, -1))

    def warm_up(self) -> None:
        """Ask for the kernels that images of all sizes need. What listens takes it down; nothing is computed."""
        if not isinstance(self.rows, TorchRows):
            ask_all(self.rows, self.config, self.weights.patches.dtype)

    def _turn(self, rows: int, columns: int) -> Turn:
        """cos and sin [rows * columns, 1, 1, d] of an image's patches: half of a head turns by x, the other by y."""

        def of_patches(table: Tensor) -> Tensor:
            x, y = table[:columns].expand(rows, -1, -1), table[:rows, None].expand(-1, columns, -1)
            return torch.stack((x, y), 2).view(rows * columns, 1, 1, -1)

        cos, sin = self._turns
        return of_patches(cos), of_patches(sin)

    def _attention(self, layer: VisionLayerWeights, x: Tensor, turn: Turn) -> Tensor:
        """x [B * N, D]. Returns [B * N, heads * d]."""
        heads = self.rows.heads(layer.qkv(x), layer.head_norms, turn, layer.head_bounds, self.config.eps)
        q, k, v = (each.transpose(1, 2) for each in heads)
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


class PatchEmbedder(_ByGrid):
    """Patches as soft tokens, each on its own: three layer norms, a linear, a position, and the projector."""

    def __init__(self, config: VisionConfig, weights: PatchWeights) -> None:
        super().__init__(config, weights.patches, MAX_CAPTURED_TOKENS)
        self.weights = weights
        self._pixels = _pixel_table(weights.patches, 1.0, 0.0)

    def forward(self, patches: Tensor, shape: tuple[int, int, int]) -> Tensor:
        batch, rows, columns = shape
        w = self.weights
        y = F.linear(_layer_norm(self._pixels[patches.int()], w.input_norm), w.patches, w.patches_bias)
        y = _layer_norm(y, w.patches_norm).view(batch, rows * columns, -1)
        y = y + (w.positions[:columns, 0] + w.positions[:rows, 1, None]).flatten(0, 1)
        y = F.rms_norm(_layer_norm(y, w.position_norm), y.shape[-1:], None, self.config.eps)
        return F.linear(y, w.projection)


def _layer_norm(x: Tensor, norm: tuple[Tensor, Tensor]) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], *norm, LAYER_NORM_EPS)


def _pixel_table(like: Tensor, factor: float, middle: float) -> Tensor:
    """factor (x / 255 - middle) of each x from 0 to 255, in fp32 and then in the dtype of `like`: [256]."""
    values = torch.arange(256, dtype=torch.float32) * (1 / 255)
    return (factor * (values - middle)).to(like.device, like.dtype)


def _turns(positions: int, half: int, theta: float, like: Tensor) -> Turn:
    """cos and sin [positions, half] of half a head in the dtype of `like`, on its device; sin is what the other of a
    pair is multiplied by, and negative for the first.

    Elements j and j + half / 2 are a pair, which turns by theta^(-2 j / half) times the position.
    """
    each = torch.arange(0, half, 2, dtype=torch.float32, device=like.device) / half
    frequencies = 1.0 / theta**each  # [half / 2]
    angles = torch.arange(positions, dtype=torch.float32, device=like.device)[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1).to(like.dtype), torch.cat((-sin, sin), -1).to(like.dtype)


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
