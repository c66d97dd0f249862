"""What the keys of a GGUF file say of a model, as a config.json has it.

Keys: ggml-org/llama.cpp, gguf-py/gguf/constants.py (Keys.LLM, Keys.Attention, Keys.Rope), as convert_hf_to_gguf.py
writes them for Gemma-4. Two facts have no key: whether V is K, which the absence of attn_v says, and which part of a
head RoPE turns, which rope_freqs.weight has: divisors of the frequencies, 1 of those that turn and 1e30 of the others.

A file may have been written by a tool that knew less than it should. So what has the sizes of a released model must be
it in all that changes the arithmetic, and what has other sizes must say all of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kerngen.errors import CheckpointError, UsageError
from kerngen.runtime.config_fields import RELEASED
from kerngen.runtime.gguf.container import GgufModel, open_gguf
from kerngen.runtime.gguf.names import ROPE_FREQS, named_packings, packings, placed
from kerngen.runtime.gguf.tokenizer import tokens_of

if TYPE_CHECKING:
    from kerngen.runtime.config import ModelConfig

ARCH = "gemma4"
# What else is called Gemma, and what to do about it.
_OTHERS = {
    "gemma4-assistant": ("a drafter", "drafters are read as safetensors: hf download google/gemma-4-…-assistant, "
                                      "and name that folder with --draft"),
    "dflash": ("a DFlash drafter", "drafters are read as safetensors: --draft FOLDER"),
    "clip": ("what embeds images and sound (an mmproj file)", "name the model's own file; images need its safetensors"),
}  # fmt: skip
_NOT_TURNED = 1e30
_OTHER_MATHS = ("gemma4.rope.scaling.", "gemma4.attn_logit_softcapping", "gemma4.attention.scale")
_ENDS = ("<eos>", "<turn|>")  # tokens that end an answer, whatever the one eos_token_id of a file says

# What generation_config.json of a release forbids, for which a file has no key: by width and layers, of the 12B.
_NEVER: dict[tuple[Any, ...], tuple[str, ...]] = {(3840, 48): ("<audio|>", "<image|>")}


def config_json(place: Path) -> dict[str, Any]:
    """What config.json of the same model would say of the text model, quantization_config included.

    Raises UsageError for a file of another kind of model, CheckpointError for keys that are missing, contradict each
    other or the tensors, or say what is not implemented.
    """
    model = open_gguf(place)
    _require_arch(model)
    found = placed(model)
    kept = named_packings(packings(model, found))
    quant = {"quant_method": "gguf", "packings": kept}
    return _Keys(model).text_config() | ({"quantization_config": quant} if kept else {})


def generation_json(place: Path) -> dict[str, Any]:
    """What generation_config.json would say: how tokens are to be drawn, where the file recommends something, and which
    are not.
    """
    model = open_gguf(place)
    head, found = model.head, {}
    for ours, theirs in (("temperature", "temp"), ("top_k", "top_k"), ("top_p", "top_p")):
        if (key := f"general.sampling.{theirs}") in head:
            found[ours] = head.get(key)
    found |= {"do_sample": True} if found else {}
    sizes = tuple(head.get(key) for key in ("gemma4.embedding_length", "gemma4.block_count") if key in head)
    tokens = (tokens_of(model) or {}) if sizes in _NEVER else {}
    if never := [tokens[name] for name in _NEVER.get(sizes, ()) if name in tokens]:
        found["suppress_tokens"] = never
    return found


def require_as_released(config: ModelConfig, place: Path) -> None:
    """Raises CheckpointError where a model has the sizes of a released one, and is another in anything that changes the
    arithmetic.
    """
    for name, released in _released().items():
        if (released.hidden_size, len(released.layers)) != (config.hidden_size, len(config.layers)):
            continue
        # What a tuner of weights may change: how long a context is allowed, and what ends an answer.
        kept = {own: getattr(config, own) for own in ("quant", "max_positions", "eos_ids", "bos_id")}
        released = replace(released, **kept)
        for field in fields(config):
            ours, theirs = getattr(config, field.name), getattr(released, field.name)
            if ours != theirs:
                raise CheckpointError(
                    f"{place}: it has the sizes of {name}, and another {field.name}: {_difference(ours, theirs)}",
                    hint="the file was made by a tool that did not know this model; take one that llama.cpp's current "
                    "convert_hf_to_gguf.py wrote",
                )
        return


@cache
def _released() -> dict[str, ModelConfig]:
    from kerngen.runtime.config import read_model_config

    folders = (folder for folder in sorted(RELEASED.iterdir()) if (folder / "config.json").is_file())
    return {folder.name: read_model_config(folder) for folder in folders}


def _difference(ours: Any, theirs: Any) -> str:
    if isinstance(ours, tuple) and isinstance(theirs, tuple) and len(ours) == len(theirs):
        ours, theirs = next((a, b) for a, b in zip(ours, theirs, strict=True) if a != b)
    return f"{ours!r}, not {theirs!r}"


def _require_arch(model: GgufModel) -> None:
    arch = model.head.text("general.architecture")
    if arch == ARCH:
        return
    what, way_on = _OTHERS.get(arch, (f"a model of the architecture {arch!r}", "kerngen runs Gemma-4 alone"))
    raise UsageError(f"{model.head.path} holds {what}, not a Gemma-4 model", hint=way_on)


class _Keys:
    """The keys below `gemma4.`, read in the order in which they need each other."""

    def __init__(self, model: GgufModel) -> None:
        self._model, self._head = model, model.head
        self._layers = self._integer("block_count", high=1024)

    def text_config(self) -> dict[str, Any]:
        head = self._head
        shared = self._integer("attention.shared_kv_layers", 0, high=self._layers - 1)
        sliding = self._sliding()
        dims = [self._integer(f"attention.key_length{'_swa' if s else ''}", low=1, high=4096) for s in sliding]
        for s, dim in zip(sliding, dims, strict=True):
            for key in ("attention.value_length", "rope.dimension_count"):
                if (said := self._integer(f"{key}{'_swa' if s else ''}", dim)) != dim:
                    raise head.error(f"gemma4.{key}{'_swa' if s else ''} is {said}; key_length is {dim}")
        heads = self._per_layer("attention.head_count")
        if len(set(heads)) != 1:
            raise head.error(f"gemma4.attention.head_count differs between layers: {sorted(set(heads))}")
        kv_heads = self._per_layer("attention.head_count_kv")
        inner, is_double = self._mlp(self._layers - shared)
        width = self._integer("embedding_length", low=1)
        ple = self._integer("embedding_length_per_layer_input", 0)
        experts = self._integer("expert_count", 0)
        cap = "gemma4.final_logit_softcapping"
        found: dict[str, Any] = {
            "model_type": "gemma4_text",
            "vocab_size": self._rows("token_embd.weight", width),
            "hidden_size": width,
            "intermediate_size": inner,
            "num_hidden_layers": self._layers,
            "layer_types": [f"{'sliding' if s else 'full'}_attention" for s in sliding],
            "num_attention_heads": heads[0],
            "num_key_value_heads": kv_heads[0],
            "head_dim": dims[0],
            "per_layer_config": {
                str(i): {"head_dim": dim, "num_key_value_heads": kv}
                for i, (dim, kv) in enumerate(zip(dims, kv_heads, strict=True))
                if (dim, kv) != (dims[0], kv_heads[0])
            },
            "attention_k_eq_v": self._v_is_k(sliding, self._layers - shared),
            "num_kv_shared_layers": shared,
            "use_double_wide_mlp": is_double,
            "sliding_window": self._integer("attention.sliding_window", low=1) if any(sliding) else None,
            "rope_parameters": self._rope(sliding, dims),
            "rms_norm_eps": head.number("gemma4.attention.layer_norm_rms_epsilon"),
            "max_position_embeddings": self._integer("context_length", low=1),
            "final_logit_softcapping": head.number(cap) if cap in head else None,
            "hidden_size_per_layer_input": ple,
            "enable_moe_block": bool(experts),
            "tie_word_embeddings": True,
            "bos_token_id": head.integer("tokenizer.ggml.bos_token_id", 2),
            "eos_token_id": end_ids(self._model),
        }
        if ple:
            found["vocab_size_per_layer_input"] = self._rows("per_layer_token_embd.weight", self._layers * ple)
        if experts:
            found |= {
                "num_experts": experts,
                "top_k_experts": self._integer("expert_used_count", low=1),
                "moe_intermediate_size": self._integer("expert_feed_forward_length", low=1),
            }
        return found

    def _integer(self, key: str, default: int | None = None, *, low: int = 0, high: int = 1 << 31) -> int:
        return self._head.integer(f"gemma4.{key}", default, low=low, high=high)

    def _per_layer(self, key: str) -> list[int]:
        """One number of all layers, or one of each."""
        name = f"gemma4.{key}"
        if not self._head.is_array(name):
            return [self._head.integer(name, low=1)] * self._layers
        found = self._head.integers(name)
        if len(found) != self._layers or not all(found):
            raise self._head.error(f"{name} has {len(found)} numbers of {self._layers} layers, or one that is 0")
        return found

    def _sliding(self) -> list[bool]:
        name = "gemma4.attention.sliding_window_pattern"
        found = self._head.flags(name)
        if len(found) != self._layers:
            raise self._head.error(f"{name} is of {len(found)} layers; gemma4.block_count is {self._layers}")
        if found[-1]:
            raise self._head.error(f"{name} says that the last layer is sliding; in Gemma-4 it never is")
        return found

    def _mlp(self, owners: int) -> tuple[int, bool]:
        """The MLP's width, and whether layers without a cache have one of twice that."""
        sizes = self._per_layer("feed_forward_length")
        inner, later = sizes[0], set(sizes[owners:])
        if set(sizes[:owners]) != {inner} or len(later) > 1 or not later <= {inner, 2 * inner}:
            raise self._head.error(
                f"gemma4.feed_forward_length is {sorted(set(sizes))} of its layers; those with a cache have one width, "
                "and the others that or twice that"
            )
        return inner, later == {2 * inner}

    def _v_is_k(self, sliding: Sequence[bool], owners: int) -> bool:
        has = {kind: {f"blk.{i}.attn_v.weight" in self._model.places for i in range(owners) if sliding[i] is kind}
               for kind in (True, False)}  # fmt: skip
        if False in has[True] or len(has[False]) > 1:
            raise self._head.error(
                "attn_v is missing from a sliding layer, or from some that are not, and not from all"
            )
        return has[False] == {False}

    def _rope(self, sliding: Sequence[bool], dims: Sequence[int]) -> dict[str, Any]:
        for key in self._head.values:
            if key.startswith(_OTHER_MATHS) and self._head.get(key) not in ("none", 1.0):
                raise self._head.error(f"{key} is {self._head.get(key)}; no released Gemma-4 has it")
        full = next((dim for s, dim in zip(sliding, dims, strict=True) if not s), 0)
        return {
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": self._head.number("gemma4.rope.freq_base_swa", None if any(sliding) else 10_000.0),
            },
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": self._head.number("gemma4.rope.freq_base"),
                "partial_rotary_factor": self._turned(full),
            },
        }

    def _turned(self, head_dim: int) -> float:
        """The part of the heads of full attention that RoPE turns."""
        file = self._model.places.get(ROPE_FREQS)
        if file is None:
            raise self._head.error(
                f"it has no {ROPE_FREQS}, which says what part of a head RoPE turns",
                hint="the file was made by a tool that did not know this model; take another",
            )
        divisors = file.floats(ROPE_FREQS)
        turned = next((i for i, divisor in enumerate(divisors) if divisor != 1.0), len(divisors))
        others = {divisor for divisor in divisors[turned:] if not abs(divisor / _NOT_TURNED - 1) < 1e-6}
        if len(divisors) * 2 != head_dim or not turned or others:
            raise file.error(
                f"{ROPE_FREQS} has {len(divisors)} numbers, first {turned} times 1, then {sorted(others)[:3] or 1e30}; "
                f"a head of {head_dim} has {head_dim // 2}, 1 of those that turn and then 1e30"
            )
        # A hair above, as config.json's reader rounds the count of turned pairs down.
        return min(1.0, math.nextafter(turned / len(divisors), 2.0))

    def _rows(self, name: str, width: int) -> int:
        """Rows of a table, which has no key."""
        if name not in self._model.places:
            raise self._head.error(f"it lacks the tensor {name}")
        shape = self._model.info(name).shape
        if len(shape) != 2 or shape[1] != width:
            raise self._head.error(f"{name} has the shape {list(shape)}; its keys say rows of {width}")
        return shape[0]


def end_ids(model: GgufModel) -> list[int]:
    """Tokens that end an answer: those that keys name, and those of Gemma-4 that are called so."""
    head, tokens = model.head, tokens_of(model) or {}
    found = [tokens[name] for name in _ENDS if name in tokens]
    for key in ("eos", "eot", "eom"):
        if (name := f"tokenizer.ggml.{key}_token_id") in head:
            found.append(head.integer(name))
    return list(dict.fromkeys(found))
