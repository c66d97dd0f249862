"""The Gemma-4 text model and its MTP drafter as plain torch modules, for training.

Parameter names are those of the released checkpoints, so that a state dict is the checkpoint. Only what the tiny
model uses is here: dense, no per-layer embeddings, no mixture of experts, whole sequences without a cache. The
maths is that of transformers' gemma4 and gemma4_assistant; tests/host/test_examples.py compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SLIDING, FULL = "sliding_attention", "full_attention"
GROUP_SIZE = 32  # weights that share one int4 scale


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a network, named as in config.json's text_config. backbone_hidden_size is set for a drafter alone."""

    hidden_size: int
    intermediate_size: int
    layer_types: tuple[str, ...]
    vocab_size: int = 1024
    num_attention_heads: int = 2
    num_key_value_heads: int = 2
    num_global_key_value_heads: int = 1
    head_dim: int = 256
    global_head_dim: int = 512
    sliding_window: int = 64
    rms_norm_eps: float = 1e-6
    final_logit_softcapping: float | None = 30.0
    backbone_hidden_size: int | None = None
    rope_theta: dict[str, float] = field(default_factory=lambda: {SLIDING: 1e4, FULL: 1e6})
    partial_rotary_factor: float = 0.25  # of the full layers

    def heads(self, kind: str) -> tuple[int, int]:
        """(number of KV heads, head_dim) of a layer of this kind."""
        if kind == FULL:
            return self.num_global_key_value_heads, self.global_head_dim
        return self.num_key_value_heads, self.head_dim


TARGET = Shape(hidden_size=128, intermediate_size=256, layer_types=(SLIDING,) * 5 + (FULL,))
DRAFTER = Shape(
    hidden_size=64,
    intermediate_size=192,
    layer_types=(SLIDING,) * 3 + (FULL,),
    final_logit_softcapping=None,
    backbone_hidden_size=128,
)


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round each group of GROUP_SIZE weights along the input to int4 with one bf16 scale.

    weight: [out, in]. Returns (q [out, in] float, whole numbers from -8 to 7; scale [out, in/32] bf16). The scale is
    the largest magnitude over 7.5, the convention of compressed-tensors' observer. A group of zeros gets scale 1.
    """
    groups = weight.bfloat16().float().unflatten(1, (-1, GROUP_SIZE))  # [out, in/32, 32]
    largest = groups.abs().amax(-1)
    scale = torch.where(largest > 0, largest / 7.5, 1.0).bfloat16()
    q = (groups / scale.float().unsqueeze(-1)).round().clamp(-8, 7)
    return q.flatten(1), scale


def dequantise(q: Tensor, scale: Tensor) -> Tensor:
    """q times its group's scale, rounded to bf16. q: [out, in]; scale: [out, in/32] bf16. Returns [out, in] bf16."""
    return (q.unflatten(1, (-1, GROUP_SIZE)).bfloat16() * scale.unsqueeze(-1)).flatten(1)


class Linear(nn.Linear):
    """A linear layer without bias that can show the weight its int4 copy will have (straight-through gradient)."""

    quantised = False

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__(d_in, d_out, bias=False)
        nn.init.normal_(self.weight, std=d_in**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in]. Returns [..., out]."""
        if not self.quantised:
            return F.linear(x, self.weight)
        with torch.no_grad():
            error = dequantise(*quantise(self.weight)).float() - self.weight
        return F.linear(x, self.weight + error)


class Norm(nn.Module):
    """x / rms(x) * weight, in fp32. The weight is used as it is, not one plus it."""

    def __init__(self, size: int, eps: float, start: float = 1.0) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.full((size,), start)), eps

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., size]. Returns the same shape and dtype."""
        return F.rms_norm(x.float(), x.shape[-1:], self.weight, self.eps).to(x.dtype)


def rotation(shape: Shape, kind: str, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin [length, 1, head_dim/2] for positions 0..length-1. Full layers turn a quarter of the pairs."""
    _, dim = shape.heads(kind)
    pairs = torch.arange(dim // 2, device=device)
    freq = shape.rope_theta[kind] ** (-2.0 * pairs / dim)
    if kind == FULL:
        freq = torch.where(pairs < int(shape.partial_rotary_factor * dim / 2), freq, 0.0)
    angle = (torch.arange(length, device=device)[:, None] * freq)[:, None]
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
    """Turn the pairs (j, j + dim/2). x: [batch, length, heads, dim]."""
    (a, b), (cos, sin) = x.float().chunk(2, -1), cos_sin
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def causal_mask(length: int, window: int, device: torch.device, *, strict: bool = False) -> Tensor:
    """[length, length] bool, True where a query (row) may look. window 0 keeps all; strict leaves out the row itself.

    A strict row 0 would see nothing: it sees itself, and must be left out of the loss.
    """
    i = torch.arange(length, device=device)
    distance = i[:, None] - i
    seen = distance >= (1 if strict else 0)
    if window:
        seen &= distance < window
    return seen | (i[:, None] + i == 0)


KV = tuple[Tensor, Tensor]  # roped keys and normed values, each [batch, num_kv_heads, length, head_dim]


class Attention(nn.Module):
    """Attention of one layer. With owns_kv False there are no key and value projections: they come from the target."""

    def __init__(self, shape: Shape, kind: str, owns_kv: bool) -> None:
        super().__init__()
        self.kind, self.eps, self.num_q_heads = kind, shape.rms_norm_eps, shape.num_attention_heads
        self.num_kv_heads, dim = shape.heads(kind)
        start = dim**-0.25  # scores are not scaled: begin with q k of unit variance
        self.q_proj = Linear(shape.hidden_size, self.num_q_heads * dim)
        self.o_proj = Linear(self.num_q_heads * dim, shape.hidden_size)
        self.q_norm = Norm(dim, self.eps, start)
        if owns_kv:
            self.k_proj = Linear(shape.hidden_size, self.num_kv_heads * dim)
            self.k_norm = Norm(dim, self.eps, start)
            if kind == SLIDING:  # a full layer makes its values from k_proj
                self.v_proj = Linear(shape.hidden_size, self.num_kv_heads * dim)

    def forward(self, x: Tensor, cos_sin: tuple[Tensor, Tensor], seen: Tensor, kv: KV | None) -> tuple[Tensor, KV]:
        """x: [batch, length, hidden]. Returns the same shape, and the keys and values that were read."""
        q = rotate(self.q_norm(self.q_proj(x).unflatten(-1, (self.num_q_heads, -1))), cos_sin).transpose(1, 2)
        if kv is None:
            raw_k = self.k_proj(x).unflatten(-1, (self.num_kv_heads, -1))
            raw_v = self.v_proj(x).unflatten(-1, (self.num_kv_heads, -1)) if self.kind == SLIDING else raw_k
            k = rotate(self.k_norm(raw_k), cos_sin).transpose(1, 2)
            v = F.rms_norm(raw_v.float(), raw_v.shape[-1:], None, self.eps).to(raw_v.dtype).transpose(1, 2)
            kv = k, v
        groups = self.num_q_heads // self.num_kv_heads
        k, v = (t.repeat_interleave(groups, 1) for t in kv)
        scores = (q @ k.transpose(-1, -2)).float().masked_fill(~seen, float("-inf"))
        out = scores.softmax(-1).to(v.dtype) @ v
        return self.o_proj(out.transpose(1, 2).flatten(2)), kv


class MLP(nn.Module):
    """down(gelu_tanh(gate x) * up x)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = Linear(shape.hidden_size, shape.intermediate_size)
        self.up_proj = Linear(shape.hidden_size, shape.intermediate_size)
        self.down_proj = Linear(shape.intermediate_size, shape.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., hidden]. Returns the same shape."""
        return self.down_proj(F.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))


class Layer(nn.Module):
    """One decoder layer: attention and MLP, each between two norms, then the layer's scalar."""

    def __init__(self, shape: Shape, kind: str, owns_kv: bool) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(shape, kind, owns_kv), MLP(shape)
        self.input_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps, 0.5)
        self.pre_feedforward_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.post_feedforward_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps, 0.5)
        self.layer_scalar = nn.Parameter(torch.full((1,), 0.9))

    def forward(self, x: Tensor, cos_sin: tuple[Tensor, Tensor], seen: Tensor, kv: KV | None) -> tuple[Tensor, KV]:
        """x: [batch, length, hidden]. Returns the same shape, and the keys and values that were read."""
        h, kv = self.self_attn(self.input_layernorm(x), cos_sin, seen, kv)
        x = x + self.post_attention_layernorm(h)
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        return x * self.layer_scalar, kv


class Stack(nn.Module):
    """Embedding table, layers and final norm: what lies under `model.` in a checkpoint."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        nn.init.normal_(self.embed_tokens.weight, std=shape.hidden_size**-0.5)
        owns_kv = shape.backbone_hidden_size is None
        self.layers = nn.ModuleList(Layer(shape, kind, owns_kv) for kind in shape.layer_types)
        self.norm = Norm(shape.hidden_size, shape.rms_norm_eps)

    def embed(self, ids: Tensor) -> Tensor:
        """Rows of the table times sqrt(hidden_size) rounded to bf16. ids: [...]. Returns [..., hidden]."""
        scale = torch.tensor(self.shape.hidden_size**0.5).bfloat16().item()
        return self.embed_tokens(ids) * scale

    def forward(self, x: Tensor, shared: dict[str, KV] | None = None) -> tuple[Tensor, dict[str, KV]]:
        """x: [batch, length, hidden]; shared: keys and values by layer kind, for a drafter.

        Returns (the normed hidden state, the keys and values of the last layer of each kind). A drafter's row p is
        one draft at position p: it sees the keys before p only.
        """
        length, strict = x.shape[1], shared is not None
        kinds = set(self.shape.layer_types)
        cos_sin = {kind: rotation(self.shape, kind, length, x.device) for kind in kinds}
        window = {SLIDING: self.shape.sliding_window, FULL: 0}
        seen = {kind: causal_mask(length, window[kind], x.device, strict=strict) for kind in kinds}
        stored: dict[str, KV] = {}
        for kind, layer in zip(self.shape.layer_types, self.layers, strict=True):
            given = shared[kind] if shared is not None else None
            x, stored[kind] = layer(x, cos_sin[kind], seen[kind], given)
        return self.norm(x), stored


class Target(nn.Module):
    """The model that is served."""

    def __init__(self, shape: Shape = TARGET) -> None:
        super().__init__()
        self.shape, self.model = shape, Stack(shape)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor, dict[str, KV]]:
        """ids: [batch, length]. Returns (logits [batch, length, vocab] fp32, normed hidden state, shared KV)."""
        hidden, kv = self.model(self.model.embed(ids))
        logits = F.linear(hidden, self.model.embed_tokens.weight).float()
        if cap := self.shape.final_logit_softcapping:
            logits = cap * torch.tanh(logits / cap)
        return logits, hidden, kv

    def show_quantised(self, on: bool) -> None:
        """From now on compute with the weights as their int4 copies will be, or with the weights themselves."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.quantised = on


class Drafter(nn.Module):
    """The MTP drafter: queries only, keys and values are the target's."""

    def __init__(self, shape: Shape = DRAFTER) -> None:
        super().__init__()
        if shape.backbone_hidden_size is None:
            raise ValueError("a drafter's shape names its target's hidden size: backbone_hidden_size is None")
        self.shape, self.model = shape, Stack(shape)
        self.pre_projection = Linear(2 * shape.backbone_hidden_size, shape.hidden_size)
        self.post_projection = Linear(shape.hidden_size, shape.backbone_hidden_size)

    def forward(self, embedded: Tensor, hidden: Tensor, kv: dict[str, KV]) -> tuple[Tensor, Tensor]:
        """One draft at every position at once.

        embedded: [batch, length, backbone], the target's embedding of the last known token; hidden: the same shape,
        the target's normed state before it or what the last draft returned. Row p stands at position p.
        Returns (logits [batch, length, vocab] fp32, the next hidden).
        """
        y, _ = self.model(self.pre_projection(torch.cat((embedded, hidden), -1)), kv)
        return F.linear(y, self.model.embed_tokens.weight).float(), self.post_projection(y)
