"""vLLM 0.26's attention layer of Gemma-4, whose backend is given the projection's output as it is.

Norms of heads, RoPE and the cache write are then one launch of the backend's (`attention_v0_26.Impl.make_heads`) within
vLLM's operator for attention: where vLLM cuts its graphs or ends a capture, it does so around both. Source of what is
computed: vLLM 0.26, vllm/model_executor/models/gemma4.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.gemma4_rope import Gemma4RotaryEmbedding
from vllm.model_executor.models import gemma4
from vllm.utils.torch_utils import _encode_layer_name

from kerngen.vllm.attention_v0_26 import Impl, NewHeads
from kerngen.vllm.linear import kernel_of


class SelfAttention(gemma4.Gemma4Attention):
    """vLLM's, from the projection's output to attention's in its backend."""

    def forward(self, positions: Tensor, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """positions [T] int64, hidden_states [T, hidden]. Returns [T, hidden]."""
        qkv, _ = self.qkv_proj(hidden_states)
        out = qkv.new_empty(qkv.shape[0], self.num_heads, self.head_dim)
        # In place of K go the positions; V, which the operator must have, is not looked at.
        torch.ops.vllm.unified_attention_with_output(
            qkv, positions, positions, out, _encode_layer_name(self.attn.layer_name)
        )
        output, _ = self.o_proj(out.flatten(1))
        return output


def has_kerngens_backend(attention: gemma4.Gemma4Attention) -> bool:
    """Whether the part `attention` serves it."""
    return isinstance(getattr(attention.attn, "impl", None), Impl)


def has_k_as_v(attention: gemma4.Gemma4Attention) -> bool:
    """Whether its projection gives q | k alone."""
    new = attention.attn.impl.new_heads
    return new is not None and new.v_is_k


def serve(attention: gemma4.Gemma4Attention, config: VllmConfig) -> str | None:
    """Make a layer with kerngen's backend a `SelfAttention`. Returns why it cannot be one, or None: then it is.

    Where V is K, vLLM has loaded K's rows of the matrix once more as V's: kerngen's matrix goes without them.
    """
    if attention.is_kv_shared_layer:
        return "their K and V are another layer's"
    rotation = _rotation(attention.rotary_emb, attention.head_dim)
    if isinstance(rotation, str):
        return rotation
    inv_freq, pairs = rotation
    without_v = attention.q_size + attention.kv_size
    matrix = kernel_of(attention.qkv_proj) if _is_k_v(attention, config) else None
    v_is_k = matrix is not None and matrix.keep_rows(without_v) is None
    new = NewHeads(attention.q_norm, attention.k_norm, inv_freq, pairs, v_is_k)
    why: str | None = attention.attn.impl.make_heads(new)
    if why is None:
        attention.__class__ = SelfAttention
        attention.register_buffer("inv_freq", inv_freq, persistent=False)  # vLLM keeps buffers while it sleeps
    elif matrix is not None and v_is_k:
        matrix.keep_rows(without_v + attention.kv_size)
    return why


def _is_k_v(attention: gemma4.Gemma4Attention, config: VllmConfig) -> bool:
    """Whether V is K, and nothing is added to either behind the matrix, as adapters (LoRA) and a bias are."""
    return attention.use_k_eq_v and config.lora_config is None and attention.qkv_proj.bias is None


def _rotation(rope: Any, head_dim: int) -> tuple[Tensor, int] | str:
    """(inv_freq [head_dim / 2] fp32, pairs that turn) of RoPE without scaling, or what else it is.

    vLLM rounds sine and cosine of a fp32 angle to the model's dtype, as the kernel does; its table is of these too.
    """
    pairs = head_dim // 2
    if type(rope) is Gemma4RotaryEmbedding:
        pairs = rope.rope_angles
    elif type(rope) is not RotaryEmbedding or rope.rotary_dim != head_dim:
        return f"their RoPE is {type(rope).__name__} of {rope.rotary_dim} dims"
    if rope.head_size != head_dim or not rope.is_neox_style:
        return "their RoPE turns pairs of neighbours"
    return rope._compute_inv_freq(rope.base), pairs
