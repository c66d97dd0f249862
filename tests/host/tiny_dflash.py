"""Tiny random DFlash drafters for the models of tiny_gemma.py, as z-lab stores them; and the same in numpy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from tiny_gemma import BASE, F, S
from transformers import Gemma4ForCausalLM

from kerngen.runtime.config import read_drafter_config
from kerngen.runtime.dflash import DflashDrafter
from kerngen.runtime.dflash_config import DflashConfig
from kerngen.runtime.model import Gemma4
from kerngen.runtime.weights.loader import load_drafter

Array = NDArray[np.float64]
WINDOW, BLOCK, MASK = 21, 16, 4
H, HEADS, KV_HEADS, DIM, INNER, TYPES = BASE["hidden_size"], 4, 2, 16, 40, (S, S, F)
EPS, THETA, CAP = 1e-6, 1e6, BASE["final_logit_softcapping"]


def dflash_json(num_layers: int, taps: tuple[int, ...], **overrides: Any) -> dict[str, Any]:
    return {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "block_size": BLOCK, "hidden_act": "silu",
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": list(taps)}, "num_target_layers": num_layers,
        "hidden_size": H, "intermediate_size": INNER, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
        "head_dim": DIM, "num_hidden_layers": len(TYPES), "layer_types": list(TYPES), "sliding_window": WINDOW,
        "rope_theta": THETA, "rope_scaling": None, "rms_norm_eps": EPS, "vocab_size": BASE["vocab_size"],
        "max_position_embeddings": 1024, "attention_bias": False, "tie_word_embeddings": False,
    } | overrides  # fmt: skip


def make_dflash(folder: Path, num_layers: int, taps: tuple[int, ...], **overrides: Any) -> dict[str, torch.Tensor]:
    """Its tensors, which it has written. overrides: of its config."""
    config = dflash_json(num_layers, taps, **overrides)
    h, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = (config[f"num_{name}_heads"] * dim for name in ("attention", "key_value"))
    made: dict[str, tuple[int, ...]] = {"fc": (h, len(taps) * h), "hidden_norm": (h,), "norm": (h,)}
    for i in range(config["num_hidden_layers"]):
        made |= {f"layers.{i}.{name}": shape for name, shape in {
            "input_layernorm": (h,), "post_attention_layernorm": (h,), "self_attn.q_proj": (q, h),
            "self_attn.k_proj": (kv, h), "self_attn.v_proj": (kv, h), "self_attn.o_proj": (h, q),
            "self_attn.q_norm": (dim,), "self_attn.k_norm": (dim,), "mlp.gate_proj": (inner, h),
            "mlp.up_proj": (inner, h), "mlp.down_proj": (h, inner),
        }.items()}  # fmt: skip
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for name, shape in made.items():
        noise = torch.randn(shape, generator=generator)
        tensors[f"{name}.weight"] = 1.5 + 0.3 * noise if len(shape) == 1 else 1.5 * noise / shape[-1] ** 0.5
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return tensors


def load_dflash(folder: Path, target: Gemma4) -> DflashDrafter:
    config = read_drafter_config(folder, target.config)
    assert isinstance(config, DflashConfig)
    return DflashDrafter(config, load_drafter(folder, config, target.ops), target)


def _norm(x: Array, weight: Array) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * weight


def _rope(x: Array, positions: Array) -> Array:
    """x [n, heads, DIM], rotate-half over all dims."""
    angles = positions[:, None] / THETA ** (np.arange(DIM // 2) / (DIM // 2))
    cos, sin = (np.concatenate((f(angles), f(angles)), -1)[:, None] for f in (np.cos, np.sin))
    return x * cos + np.concatenate((-x[..., DIM // 2 :], x[..., : DIM // 2]), -1) * sin


def block_by_hand(
    hf: Gemma4ForCausalLM, tensors: dict[str, torch.Tensor], taps: tuple[int, ...], ids: list[int], *,
    is_causal: bool = True,
) -> tuple[Array, Array]:  # fmt: skip
    """(states [BLOCK, H] after the final norm, logits [BLOCK, vocab]) of the block that begins with the last of `ids`,
    from nothing but the text: features are transformers' hidden states, and no cache is kept.
    """
    w = {name.removesuffix(".weight"): t.double().numpy() for name, t in tensors.items()}
    past = len(ids) - 1
    with torch.no_grad():
        hidden = hf(torch.tensor([ids]), output_hidden_states=True).hidden_states
    features = np.concatenate([hidden[i + 1][0, :past].double().numpy() for i in taps], -1)
    context = _norm(features @ w["fc"].T, w["hidden_norm"])
    table = hf.model.embed_tokens.weight.detach().double().numpy()
    x = table[[ids[-1], *[MASK] * (BLOCK - 1)]] * H**0.5
    at, keys = past + np.arange(BLOCK), np.arange(past + BLOCK)
    for i, kind in enumerate(TYPES):
        p = {name.removeprefix(f"layers.{i}."): t for name, t in w.items() if name.startswith(f"layers.{i}.")}
        h = _norm(x, p["input_layernorm"])
        both = np.concatenate((context, h))  # what K and V are made of
        q = _rope(_norm((h @ p["self_attn.q_proj"].T).reshape(BLOCK, HEADS, DIM), p["self_attn.q_norm"]), at)
        k, v = ((both @ p[f"self_attn.{n}_proj"].T).reshape(len(keys), KV_HEADS, DIM) for n in "kv")
        k = _rope(_norm(k, p["self_attn.k_norm"]), keys)
        sees = np.ones((BLOCK, len(keys)), bool)
        if kind == S:
            sees = keys > at[:, None] - WINDOW
            if is_causal:
                sees &= keys <= at[:, None]
        out = np.empty_like(q)
        for head in range(HEADS):
            scores = q[:, head] @ k[:, head // (HEADS // KV_HEADS)].T * DIM**-0.5
            scores = np.where(sees, scores, -np.inf)
            chance = np.exp(scores - scores.max(-1, keepdims=True))
            out[:, head] = chance / chance.sum(-1, keepdims=True) @ v[:, head // (HEADS // KV_HEADS)]
        x = x + out.reshape(BLOCK, -1) @ p["self_attn.o_proj"].T
        h = _norm(x, p["post_attention_layernorm"])
        gate, up = h @ p["mlp.gate_proj"].T, h @ p["mlp.up_proj"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ p["mlp.down_proj"].T
    states = _norm(x, w["norm"])
    return states, CAP * np.tanh(states @ table.T / CAP)
