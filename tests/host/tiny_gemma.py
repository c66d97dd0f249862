"""Tiny random Gemma-4 checkpoints, made with transformers, that the runtime's tests load and compare with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4ForCausalLM, Gemma4TextConfig

from kerngen.runtime.config import ModelConfig, read_drafter_config, read_model_config
from kerngen.runtime.drafting import MtpDrafter
from kerngen.runtime.model import Gemma4
from kerngen.runtime.ops.eager import TorchOps
from kerngen.runtime.weights.loader import load_drafter, load_model

S, F = "sliding_attention", "full_attention"
WINDOW = 8
BASE: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "global_head_dim": 32, "sliding_window": WINDOW, "max_position_embeddings": 1024,
    "final_logit_softcapping": 30.0, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 96,
    "num_hidden_layers": 4, "layer_types": [S, S, S, F],
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "dense": {},
    "k_eq_v": {
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "num_hidden_layers": 5,
        "layer_types": [S, F, S, S, F],
    },
    "shared_ple": {
        "num_hidden_layers": 7, "layer_types": [S, S, F, S, S, F, F], "num_kv_shared_layers": 4,
        "hidden_size_per_layer_input": 16, "use_double_wide_mlp": True,
    },
    "moe": {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 24},
}  # fmt: skip
CPU = torch.device("cpu")
torch.set_num_threads(1)  # the models are tiny: a second thread only costs


def scramble(model: torch.nn.Module, seed: int) -> None:
    """Weights that make every term count: norms and scalars away from 1, matrices large enough to change the token."""
    generator = torch.Generator().manual_seed(seed)
    tensors = [*model.named_parameters(), *(b for b in model.named_buffers() if b[0].endswith("layer_scalar"))]
    for name, p in tensors:
        noise = torch.randn(p.shape, generator=generator)
        with torch.no_grad():
            if name.endswith("layer_scalar"):
                p.copy_(0.9 + 0.1 * noise)
            elif p.dim() == 1:
                p.copy_(1.0 + 0.2 * noise)
            else:
                p.copy_(noise / p.shape[-1] ** 0.5)


def make_target(folder: Path, variant: str, **overrides: Any) -> Gemma4ForCausalLM:
    """A random target model of `variant`, saved to `folder`."""
    model = Gemma4ForCausalLM(Gemma4TextConfig(**(BASE | VARIANTS[variant] | overrides))).eval()
    scramble(model, seed=1)
    save(model, folder)
    return model


def make_assistant(folder: Path, variant: str, *, num_centroids: int = 0) -> Gemma4AssistantForCausalLM:
    """A random assistant for `variant`, saved to `folder`; with a centroid head if num_centroids > 0."""
    keep = ("attention_k_eq_v", "num_global_key_value_heads")
    text = BASE | {k: v for k, v in VARIANTS[variant].items() if k in keep}
    text |= {"hidden_size": 24, "vocab_size_per_layer_input": 0, "final_logit_softcapping": None}
    config = Gemma4AssistantConfig(
        text_config=Gemma4TextConfig(**text),
        backbone_hidden_size=BASE["hidden_size"],
        use_ordered_embeddings=num_centroids > 0,
        num_centroids=max(num_centroids, 1),
        centroid_intermediate_top_k=max(num_centroids // 3, 1),
    )
    model = Gemma4AssistantForCausalLM(config).eval()
    scramble(model, seed=2)
    if model.masked_embedding is not None:
        order = torch.randperm(BASE["vocab_size"], generator=torch.Generator().manual_seed(3))
        model.masked_embedding.token_ordering.copy_(order)
    save(model, folder)
    return model


def save(model: Any, folder: Path) -> None:
    """save_pretrained, with the flat keys that released checkpoints have in place of per_layer_config."""
    model.save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    text = config.get("text_config", config)
    text.pop("per_layer_config", None)
    text["global_head_dim"] = BASE["global_head_dim"]
    text["num_global_key_value_heads"] = 1 if text["attention_k_eq_v"] else None
    path.write_text(json.dumps(config))


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Gemma4:
    ops = TorchOps(CPU, dtype)
    config = read_model_config(folder)
    return Gemma4(config, load_model(folder, config, ops), ops)


def load_assistant(folder: Path, target: Gemma4) -> MtpDrafter:
    config = read_drafter_config(folder, target.config)
    return MtpDrafter(config, load_drafter(folder, config, target.ops), target)


def prompt(length: int, seed: int = 0) -> list[int]:
    ids = torch.randint(3, BASE["vocab_size"], (length,), generator=torch.Generator().manual_seed(seed))
    return [2, *ids.tolist()[1:]]


def hf_greedy(model: Gemma4ForCausalLM, ids: list[int], count: int) -> list[int]:
    """`count` greedy tokens from transformers, past any end-of-sequence."""
    out = model.generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False, eos_token_id=None)
    return out[0, len(ids) :].tolist()


def hf_logits(model: Gemma4ForCausalLM, ids: list[int]) -> Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


def config_of(folder: Path) -> ModelConfig:
    return read_model_config(folder)
