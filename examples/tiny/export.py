"""Write trained networks as the released Gemma-4 checkpoints are: bf16, compressed-tensors W4A16, and assistant."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizer as bpe
import torch
from model import FULL, GROUP_SIZE, SLIDING, Drafter, Linear, Shape, Target, quantise
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

TARGET_DIR, W4A16_DIR, DRAFTER_DIR = "gemma-4-tiny", "gemma-4-tiny-w4a16", "gemma-4-tiny-assistant"
PREFIX = "model.language_model."  # where the multimodal class keeps the text model
MAX_POSITIONS = 2048
Json = dict[str, object]
NUM_ASSISTANT_TOKENS = 4  # what transformers drafts in a round

CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- if message['role'] not in ['system', 'user', 'assistant', 'model'] -%}
{{- raise_exception('unknown role: ' + message['role']) -}}
{%- endif -%}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
{{- '<|turn>' + role + '\\n' + (message['content'] | trim) + '<turn|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|turn>model\\n' -}}
{%- endif -%}
"""

QUANTIZATION: Json = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "version": "0.17.1",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "format": "pack-quantized",
            "input_activations": None,
            "output_activations": None,
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": GROUP_SIZE,
                "dynamic": False,
                "actorder": None,
                "block_structure": None,
                "observer": "memoryless_minmax",
                "observer_kwargs": {},
                "scale_dtype": None,
                "zp_dtype": None,
            },
        }
    },
    "ignore": ["lm_head"],
    "global_compression_ratio": None,
    "kv_cache_scheme": None,
    "sparsity_config": {},
    "transform_config": {},
}


def text_config(shape: Shape) -> Json:
    """The text_config of config.json: every key that the released ones have and that means something here."""
    return {
        "model_type": "gemma4_text",
        "dtype": "bfloat16",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": len(shape.layer_types),
        "layer_types": list(shape.layer_types),
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "num_global_key_value_heads": shape.num_global_key_value_heads,
        "head_dim": shape.head_dim,
        "global_head_dim": shape.global_head_dim,
        "attention_k_eq_v": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "sliding_window": shape.sliding_window,
        "max_position_embeddings": MAX_POSITIONS,
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": shape.rope_theta[SLIDING]},
            FULL: {
                "rope_type": "proportional",
                "rope_theta": shape.rope_theta[FULL],
                "partial_rotary_factor": shape.partial_rotary_factor,
            },
        },
        "rms_norm_eps": shape.rms_norm_eps,
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": shape.final_logit_softcapping,
        "tie_word_embeddings": True,
        "use_bidirectional_attention": None,
        "num_kv_shared_layers": 0 if shape.backbone_hidden_size is None else len(shape.layer_types),
        "use_double_wide_mlp": False,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": shape.vocab_size if shape.backbone_hidden_size is None else 0,
        "enable_moe_block": False,
        "num_experts": None,
        "top_k_experts": None,
        "moe_intermediate_size": None,
        "initializer_range": 0.02,
        "use_cache": True,
        "pad_token_id": bpe.PAD,
        "eos_token_id": bpe.EOS,
        "bos_token_id": bpe.BOS,
    }


def target_config(shape: Shape) -> Json:
    """config.json of a target: the multimodal class, with no tower beside the text model."""
    return {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "dtype": "bfloat16",
        "tie_word_embeddings": True,
        "eos_token_id": [bpe.EOS, bpe.END_OF_TURN],
        "text_config": text_config(shape),
        "vision_config": None,
        "audio_config": None,
    }


def drafter_config(shape: Shape) -> Json:
    """config.json of an assistant."""
    return {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": "gemma4_assistant",
        "dtype": "bfloat16",
        "tie_word_embeddings": True,
        "backbone_hidden_size": shape.backbone_hidden_size,
        "use_ordered_embeddings": False,
        "num_centroids": 2048,
        "centroid_intermediate_top_k": 32,
        "text_config": text_config(shape),
    }


def round_to_bf16(model: nn.Module) -> None:
    """Round every parameter to the nearest bf16, in place: what is used from here on is what is written."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())


def pack(q: Tensor) -> Tensor:
    """Eight int4 to a word, the lowest nibble first. q: [out, in], whole numbers -8..7. Returns [out, in/8] int32."""
    nibbles = (q.to(torch.int64) + 8).unflatten(1, (-1, 8))  # [out, in/8, 8]
    words = (nibbles << (4 * torch.arange(8, device=q.device))).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def state(model: nn.Module, prefix: str = "model.") -> dict[str, Tensor]:
    """The parameters in bf16 on the host, with `prefix` in place of "model."."""
    return {
        prefix + name.removeprefix("model.") if name.startswith("model.") else name: value.detach().bfloat16().cpu()
        for name, value in model.state_dict().items()
    }


def quantised_state(target: Target) -> dict[str, Tensor]:
    """As `state`, with each linear layer in three tensors, and the head apart, as the released files have it."""
    tensors = state(target, PREFIX)
    for name, module in target.named_modules():
        if isinstance(module, Linear):
            name = PREFIX + name.removeprefix("model.")
            q, scale = quantise(tensors.pop(f"{name}.weight"))
            tensors[f"{name}.weight_packed"] = pack(q)
            tensors[f"{name}.weight_scale"] = scale
            tensors[f"{name}.weight_shape"] = torch.tensor(q.shape)
    tensors["lm_head.weight"] = tensors[f"{PREFIX}embed_tokens.weight"].clone()
    return tensors


def write_target(target: Target, tokenizer: Tokenizer, out: Path) -> None:
    """Write the bf16 folder and the W4A16 folder."""
    config = target_config(target.shape)
    generation = {
        "bos_token_id": bpe.BOS,
        "pad_token_id": bpe.PAD,
        "eos_token_id": [bpe.EOS, bpe.END_OF_TURN],
        "do_sample": True,
        "temperature": 1.0,
        "top_k": 64,
        "top_p": 0.95,
    }
    quantised = config | {"quantization_config": QUANTIZATION}
    _write(out / TARGET_DIR, state(target, PREFIX), config, generation, tokenizer)
    _write(out / W4A16_DIR, quantised_state(target), quantised, generation, tokenizer)


def write_drafter(drafter: Drafter, tokenizer: Tokenizer, out: Path) -> None:
    """Write the assistant's folder."""
    generation = {
        "pad_token_id": bpe.PAD,
        "eos_token_id": bpe.EOS,
        "bos_token_id": bpe.BOS,
        "num_assistant_tokens": NUM_ASSISTANT_TOKENS,
        "num_assistant_tokens_schedule": "constant",
    }
    _write(out / DRAFTER_DIR, state(drafter), drafter_config(drafter.shape), generation, tokenizer)


def load_target(target: Target, out: Path) -> None:
    """Read the weights of the bf16 folder back into `target`."""
    tensors = load_file(out / TARGET_DIR / "model.safetensors")
    target.load_state_dict({f"model.{name.removeprefix(PREFIX)}": value for name, value in tensors.items()})


def _write(folder: Path, tensors: dict[str, Tensor], config: Json, generation: Json, tokenizer: Tokenizer) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    weights = folder / "model.safetensors"
    save_file({k: v.contiguous() for k, v in tensors.items()}, weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # safetensors makes it readable by its owner alone
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    words = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "mask_token": "<mask>",
        "additional_special_tokens": [text for i, text in bpe.SPECIAL.items() if i > 4],
        "model_max_length": MAX_POSITIONS,
        "clean_up_tokenization_spaces": False,
    }
    for name, value in (("config", config), ("generation_config", generation), ("tokenizer_config", words)):
        (folder / f"{name}.json").write_text(json.dumps(value, indent=2) + "\n")
