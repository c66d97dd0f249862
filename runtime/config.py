"""Reads config.json of a Gemma-4 model or its drafter into values that the rest of the runtime can trust.

A checkpoint is untrusted: every field that changes the maths is checked for presence, type and agreement with the
others, and the error names it. Fields: transformers' Gemma4TextConfig and Gemma4AssistantConfig, as released
(`text_config` inside the multimodal config, or the same keys at the top of a text-only one).
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from kerngen.errors import CheckpointError, UsageError
from kerngen.runtime.config_fields import Fields, config_path, is_gguf, read_config, read_json, short
from kerngen.runtime.quant import INT4_ON_LOAD, READ, QuantConfig, read_quant_config, way_on
from kerngen.runtime.world import ONE_RANK, Share, Span, World
from kerngen.templates.common.attention.tile_lists import LIST_KEYS, LIST_QUERIES
from kerngen.templates.common.rows.spec import sliding_format

if TYPE_CHECKING:
    from kerngen.runtime.dflash_config import DflashConfig

TARGET_TYPES = ("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text")
DRAFTER_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
ASSISTANT = "assistant"  # what the drafter of a released model is called that goes with it
MAX_MTP_DRAFTS = 7  # a forward each: those behind are seldom accepted
DRAFT_WEIGHTS = ("stored", "int4")  # what a drafter's matrices are kept as
# What keys and values are kept as: "auto" in the activations' dtype.
KV_CACHE_DTYPES = ("auto", "int8", "int4", "int3", "fp8")
KV_CACHE_LAYOUTS = ("apart", "shared")  # shared: one pool has V, and of K what is not V, in layers whose K is V
# Of both, those that go together: one pool of K and V cannot have fp8's scales of each.
KV_CACHES = tuple((d, x) for d in KV_CACHE_DTYPES for x in KV_CACHE_LAYOUTS if (d, x) != ("fp8", "shared"))
# What Gemma4TextConfig takes where config.json leaves the field out.
DEFAULT_GLOBAL_HEAD_DIM = 512
DEFAULT_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}


@dataclass(frozen=True, slots=True)
class SparsePrefill:
    """Which keys the queries of a long prompt see in full-attention layers, in tiles of 128: block-sparse prefill
    (docs/kernels.md).

    A block of 128 queries sees a tile that is estimated to weigh at least alpha times the heaviest one for some query
    head, the first num_first tiles, the last num_last up to its own, and all if it is one of the last num_dense blocks
    of a prompt. mean_keys: keys of a mean, by which weights are estimated.
    """

    alpha: float
    num_first: int = 2
    num_last: int = 4
    num_dense: int = 2
    mean_keys: int = 32

    @property
    def most_whole(self) -> int:
        """Keys of the longest sequence whose queries see all keys in any case."""
        return (self.num_first + self.num_last) * LIST_KEYS

    def dense_from(self, length: int) -> int:
        """The first position of a prompt of `length` tokens whose queries see all keys."""
        return max(-(-length // LIST_QUERIES) - self.num_dense, 0) * LIST_QUERIES

    @property
    def key(self) -> bytes:
        """What the keys and values of a prompt depend on beside its tokens."""
        return ",".join(map(str, astuple(self))).encode()


@dataclass(frozen=True, slots=True)
class Keeping:
    """How what a checkpoint stores, and what is made of it, is kept on the device, and how much of it prompts read.

    draft_weights: of DRAFT_WEIGHTS, the drafter's matrices. kv_cache_dtype: of KV_CACHE_DTYPES, keys and values.
    kv_cache_layout: of KV_CACHE_LAYOUTS. sparse_prefill: SparsePrefill.alpha; None, and 1 and more, for prompts that
    read all keys. Raises UsageError for another name, for fp8 in one pool, and for an alpha that is not positive.
    """

    draft_weights: str = DRAFT_WEIGHTS[0]
    kv_cache_dtype: str = KV_CACHE_DTYPES[0]
    kv_cache_layout: str = KV_CACHE_LAYOUTS[0]
    sparse_prefill: float | None = None

    def __post_init__(self) -> None:
        for said, name, known in (
            (f"draft weights {self.draft_weights!r} are", self.draft_weights, DRAFT_WEIGHTS),
            (f"a KV cache of dtype {self.kv_cache_dtype!r} is", self.kv_cache_dtype, KV_CACHE_DTYPES),
            (f"a KV cache of layout {self.kv_cache_layout!r} is", self.kv_cache_layout, KV_CACHE_LAYOUTS),
        ):
            if name not in known:
                raise UsageError(f"{said} not known", hint=f"known: {', '.join(known)}")
        if (self.kv_cache_dtype, self.kv_cache_layout) not in KV_CACHES:
            raise UsageError("--kv-cache-layout shared has one pool of K and V, which have scales of their own in fp8",
                             hint="leave it out, or --kv-cache-dtype int8")  # fmt: skip
        if self.sparse_prefill is not None and not self.sparse_prefill > 0:
            raise UsageError(f"sparse prefill's alpha is a number above 0, not {self.sparse_prefill:g}",
                             hint="0.1, say: below 1 keys are left out; without it prompts read all keys")  # fmt: skip

    @staticmethod
    def of(options: Mapping[str, Any]) -> Keeping:
        """Those of `options` that are fields, of what a session is loaded with; the rest as it is usual."""
        return Keeping(**{f.name: options[f.name] for f in fields(Keeping) if f.name in options})

    @property
    def drafts_as_stored(self) -> bool:
        return self.draft_weights == DRAFT_WEIGHTS[0]

    @property
    def kv_format(self) -> str:
        """The name of the cache's format (templates/values.py, KVFormat)."""
        return "plain" if self.kv_cache_dtype == "auto" else self.kv_cache_dtype

    @property
    def options(self) -> tuple[str, ...]:
        """As the command line says it; what is usual is not said."""
        each = zip(KEEPING_OPTIONS, astuple(self), astuple(AS_STORED), strict=True)
        return tuple(word for name, value, usual in each if value != usual for word in (name, str(value)))

    @property
    def sparse(self) -> SparsePrefill | None:
        """None where prompts read all keys."""
        alpha = self.sparse_prefill
        return None if alpha is None or alpha >= 1 else SparsePrefill(alpha)


AS_STORED = Keeping()
KEEPING_OPTIONS = tuple(f"--{f.name.replace('_', '-')}" for f in fields(Keeping))  # as the command line calls them


def require_reproducible(sparse: SparsePrefill | None) -> None:
    """Raises UsageError unless runs can be reproducible with what prompts read."""
    if sparse is not None:
        what = f"sparse prefill by alpha {sparse.alpha:g} keeps keys by an estimate"
        raise UsageError(f"{what}, which rounding may bring over its threshold: no run is reproducible with it",
                         hint="leave sparse prefill out, or reproducible")  # fmt: skip


def in_int4(draft_weights: str | None) -> str:
    """ " in int4" where they are, else nothing: what follows the drafter in a line for people."""
    return " in int4" if draft_weights == "int4" else ""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """theta, how many of the head_dim / 2 pairs rotate, and the divisor of their frequencies."""

    theta: float
    num_rotated: int
    factor: float


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """One decoder layer. window: keys seen, itself included; 0 on a full-attention layer.

    kv_source is the layer whose cache this one reads: its own index where it owns one. kv_heads, inner: of a divided
    model, which of the whole layer's KV heads and of its MLP's width this rank has. kv_scales: of K and of V in a cache
    of fp8, of each of its KV heads or one of all; 1 where no checkpoint's were read (weights/kv_scales.py).
    """

    index: int
    is_sliding: bool
    head_dim: int
    num_kv_heads: int
    window: int
    intermediate_size: int
    v_is_k: bool
    kv_source: int
    kv_heads: Span | None = None
    inner: Span | None = None
    kv_scales: tuple[tuple[float, ...], tuple[float, ...]] = ((1.0,), (1.0,))

    @property
    def kv_span(self) -> Span:
        return self.kv_heads or Span.of(self.num_kv_heads)

    @property
    def inner_span(self) -> Span:
        return self.inner or Span.of(self.intermediate_size)

    @property
    def kind(self) -> str:
        return "sliding" if self.is_sliding else "full"

    @property
    def owns_kv(self) -> bool:
        return self.kv_source == self.index


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The text model. Sizes are counts of elements; ple_size and num_experts are 0 where the model has none.

    share: of a rank that has a part of the model, which: heads, widths and layers are then those of the part.
    """

    vocab_size: int
    hidden_size: int
    num_q_heads: int
    layers: tuple[LayerConfig, ...]
    rope: dict[str, RopeConfig] = field(hash=False)  # by LayerConfig.kind
    rms_norm_eps: float
    logit_cap: float  # 0 for none
    max_positions: int
    tied: bool
    ple_size: int
    ple_vocab_size: int
    num_experts: int
    top_k_experts: int
    moe_intermediate_size: int
    bos_id: int
    eos_ids: tuple[int, ...]
    quant: QuantConfig | None
    share: Share | None = None
    has_kv_scales: bool = False  # whether layers have scales of a cache in fp8
    # Of the cache (templates/values.py, KVFormat), and whether layers whose K is V share a pool: no checkpoint says it.
    kv_format: str = "plain"
    kv_is_shared: bool = False
    sparse: SparsePrefill | None = None  # None where prompts read all keys
    activation: str = "gelu_tanh"  # of gated MLPs: that or "silu"

    def kv_format_of(self, layer: LayerConfig) -> str:
        """Of the cache that `layer` owns."""
        name = self.kv_format
        if layer.kind == "sliding":
            name = sliding_format(name)
        if not (self.kv_is_shared and layer.v_is_k):
            return name
        return "shared" if name == "plain" else f"shared_{name}"

    def keeping(self, kept: Keeping) -> ModelConfig:
        """This model with its cache kept, and its prompts read, so. Raises UsageError where its heads cannot be."""
        odd = {layer.head_dim for layer in self.layers if layer.head_dim % 128}
        if kept.kv_cache_dtype != "auto" and odd:
            raise UsageError(f"a KV cache of {kept.kv_cache_dtype} is in blocks of 64 values, and halves of heads have "
                             f"whole ones; heads of {min(odd)} do not", hint="leave --kv-cache-dtype out")  # fmt: skip
        if kept.kv_cache_dtype == "fp8" and not self.has_kv_scales:
            raise UsageError(
                "--kv-cache-dtype fp8 takes the checkpoint's own scales, and this one has none: its "
                "quantization_config has no kv_cache_scheme",
                hint="--kv-cache-dtype int8 needs none and is more exact; llm-compressor's oneshot makes scales where "
                "a recipe has a kv_cache_scheme",
            )
        is_shared = kept.kv_cache_layout == "shared"
        if is_shared and not any(layer.v_is_k for layer in self.layers):
            raise UsageError("--kv-cache-layout shared is for layers whose K is V, and this model has none",
                             hint="leave it out")  # fmt: skip
        if is_shared and any(layer.v_is_k and not layer.owns_kv for layer in self.layers):
            raise UsageError(
                "--kv-cache-layout shared is not for layers that read another's K and V", hint="leave it out"
            )
        turned = {(layer.head_dim, 2 * self.rope[layer.kind].num_rotated) for layer in self.layers if layer.v_is_k}
        if is_shared and turned != {(512, 128)}:
            raise UsageError(f"--kv-cache-layout shared is for heads of 512 of which RoPE turns 128 dims, not {turned}",
                             hint="leave it out")  # fmt: skip
        return replace(self, kv_format=kept.kv_format, kv_is_shared=is_shared, sparse=kept.sparse)

    def divided(self, world: World) -> ModelConfig:
        """What `world.rank` has of this model. Raises UsageError where it does not divide: see division.py."""
        from kerngen.runtime.division import divided_model

        return divided_model(self, world)

    @property
    def world(self) -> World:
        return ONE_RANK if self.share is None else self.share.world

    @property
    def q_span(self) -> Span:
        """Of the whole model's query heads."""
        return Span.of(self.num_q_heads) if self.share is None else self.share.q_heads

    @property
    def expert_span(self) -> Span:
        """Of the width of each expert."""
        return Span.of(self.moe_intermediate_size) if self.share is None else self.share.expert_width

    @property
    def vocab_span(self) -> Span:
        """Of the rows of the output head."""
        return Span.of(self.vocab_size) if self.share is None else self.share.vocab

    @property
    def embed_scale(self) -> float:
        """sqrt(hidden_size), before it is rounded to the table's dtype."""
        return math.sqrt(self.hidden_size)

    @property
    def window(self) -> int:
        """The sliding layers' window, 0 if the model has none."""
        return max((layer.window for layer in self.layers), default=0)

    def donor(self, kind: str) -> LayerConfig:
        """The last layer of `kind` that owns a cache: what shared layers and the drafter read."""
        owners = [layer for layer in self.layers if layer.kind == kind and layer.owns_kv]
        if not owners:
            raise CheckpointError(f"no {kind}-attention layer owns a KV cache; the drafter needs one to read")
        return owners[-1]


class Arm(NamedTuple):
    """What a step drafts: `length` tokens a sequence, by the drafter number `by` of its engine's."""

    length: int = 0
    by: int = 0


NO_DRAFTS = Arm()


@dataclass(frozen=True, slots=True)
class DraftPolicy:
    """What an engine must know of a drafter, whatever it is, before it drafts.

    max_drafts: after one token, the most. taps: layers of the target, in their order, one at least, whose output it
    takes in behind each forward; None where it takes in nothing. cache_layers: layers of its own that keep K and V,
    each in a pool of its own under the target's block tables. Their indices begin where the target's end, and sliding
    ones have windows no longer than the target's and one more. Where pages are shared, preempted or let go, so is what
    these layers hold there. block: positions from the last known token on that it writes and reads in those layers as
    it drafts, however many drafts are asked for; 0 where it writes none. What it writes there is no token's: the next
    forward's `ingest` and the next block write these rows again. lengths: numbers of drafts of which an engine chooses,
    in ascending order; () for all up to max_drafts. among: the policies of several drafters, of which each step asks
    one; () of a single one.
    """

    max_drafts: int
    taps: tuple[int, ...] | None = None
    cache_layers: tuple[LayerConfig, ...] = ()
    block: int = 0
    lengths: tuple[int, ...] = ()
    among: tuple[DraftPolicy, ...] = ()

    @property
    def arms(self) -> tuple[Arm, ...]:
        """Of which an engine chooses, beside not drafting."""
        each = enumerate(self.among or (self,))
        return tuple(Arm(n, by) for by, one in each for n in one.lengths or range(1, one.max_drafts + 1))

    @staticmethod
    def joint(policies: Sequence[DraftPolicy]) -> DraftPolicy:
        """Of all these drafters together. Raises UsageError for any but one, or one of each kind: one that takes in
        what the target's layers put out, and one that does not.
        """
        if len(policies) == 1:
            return policies[0]
        taking = [policy for policy in policies if policy.taps is not None]
        if len(taking) != 1 or len(policies) != 2:
            raise UsageError(f"{len(policies)} drafters, {len(taking)} of them DFlash's",
                             hint="name one drafter, or an assistant and a DFlash drafter")  # fmt: skip
        return replace(taking[0], max_drafts=max(p.max_drafts for p in policies), lengths=(), among=tuple(policies))


NO_DRAFTER = DraftPolicy(0)


@dataclass(frozen=True, slots=True)
class DrafterLayers:
    """What the configurations of all drafters have. text: their own layers."""

    text: ModelConfig

    @property
    def weights(self) -> str:
        """Of DRAFT_WEIGHTS, what its matrices are kept as."""
        return "stored" if self.text.quant is None else "int4"

    def keeping(self, kept: Keeping) -> Self:
        """This drafter with its matrices kept so. A quantized one is int4 as it is stored."""
        if self.text.quant is not None or kept.drafts_as_stored:
            return self
        return replace(self, text=replace(self.text, quant=INT4_ON_LOAD))


@dataclass(frozen=True, slots=True)
class DrafterConfig(DrafterLayers):
    """The MTP assistant: its own small text stack, all of whose layers read the target's cache."""

    backbone_hidden_size: int
    num_centroids: int  # 0: dense head
    centroid_top_k: int

    @property
    def policy(self) -> DraftPolicy:
        return DraftPolicy(MAX_MTP_DRAFTS)

    def divided(self, target: ModelConfig) -> DrafterConfig:
        """What the rank of `target` has of its drafter: see division.py. Raises UsageError."""
        from kerngen.runtime.division import divided_drafter

        return divided_drafter(self, target)


def read_model_config(folder: Path) -> ModelConfig:
    """The target model's configuration from `folder`/config.json.

    Raises UsageError where the folder is another kind of model, CheckpointError on a missing or contradicting field.
    """
    top = Fields(read_config(folder), str(config_path(folder)))
    from kerngen.runtime.dflash_config import is_dflash

    kind = "DFlash" if is_dflash(top.values) else top.get("model_type")
    if kind in (*DRAFTER_TYPES, "DFlash"):
        raise UsageError(f"{folder} holds a drafter ({kind})", hint="name it with --draft, and its target as MODEL")
    if kind not in TARGET_TYPES:
        raise UsageError(f"{folder} holds a {kind!r} model", hint=f"kerngen runs: {', '.join(TARGET_TYPES)}")
    beside = folder / "hf_quant_config.json"
    if top.values.get("quantization_config") is None and os.path.lexists(beside):
        raise CheckpointError(
            f"{beside}: the weights are quantized by NVIDIA ModelOpt, which is not implemented; {READ}",
            hint=way_on(top),
        )
    text = top.section("text_config") if "text_config" in top.values else top
    config = _text_config(text, top, is_drafter=False)
    if is_gguf(folder):
        from kerngen.runtime.gguf.config import require_as_released

        require_as_released(config, folder)
    return config


def read_drafter_config(folder: Path, target: ModelConfig) -> DrafterConfig | DflashConfig:
    """An assistant's or a DFlash drafter's configuration, checked against the whole target that it drafts for. Raises
    as read_model_config.
    """
    from kerngen.runtime.dflash_config import ARCHITECTURE, is_dflash, read_dflash_config

    values = read_config(folder)
    if is_dflash(values):
        return read_dflash_config(folder, values, target)
    top = Fields(values, str(config_path(folder)))
    if (kind := top.get("model_type")) not in DRAFTER_TYPES:
        known = ", ".join((*DRAFTER_TYPES, ARCHITECTURE))
        raise UsageError(f"{folder} holds a {kind!r} model, not a drafter", hint=f"known: {known}")
    return _read_assistant(folder, top, target)


def _read_assistant(folder: Path, top: Fields, target: ModelConfig) -> DrafterConfig:
    text = _text_config(top.section("text_config"), top, is_drafter=True)
    width = top.integer("backbone_hidden_size")
    if width != target.hidden_size:
        raise UsageError(f"{folder} drafts for a hidden size of {width}; the target has {target.hidden_size}")
    if text.vocab_size != target.vocab_size:
        raise UsageError(f"{folder} has {text.vocab_size} tokens; the target has {target.vocab_size}")
    for layer in text.layers:
        donor = target.donor(layer.kind)
        ours, theirs = (layer.head_dim, layer.num_kv_heads), (donor.head_dim, donor.num_kv_heads)
        if ours != theirs:
            raise UsageError(
                f"{folder}: layer {layer.index} ({layer.kind}) reads heads of {ours[0]} x {ours[1]} KV heads; "
                f"the target's layer {donor.index} writes {theirs[0]} x {theirs[1]}"
            )
    centroids = 0
    if top.flag("use_ordered_embeddings", False):
        centroids = top.integer("num_centroids")
        if text.vocab_size % centroids:
            raise top.error(f"num_centroids {centroids} does not divide vocab_size {text.vocab_size}")
        if top.integer("centroid_intermediate_top_k") > centroids:
            raise top.error(f"centroid_intermediate_top_k is more than num_centroids {centroids}")
    top_k = top.integer("centroid_intermediate_top_k") if centroids else 0
    return DrafterConfig(text, width, centroids, top_k)


def _generation(folder: Path) -> Fields:
    """generation_config.json, empty where there is none; beside a GGUF file, which may also say some of it itself."""
    path = (folder.parent if is_gguf(folder) else folder) / "generation_config.json"
    if is_gguf(folder) and not os.path.lexists(path):
        from kerngen.runtime.gguf.config import generation_json

        return Fields(generation_json(folder), str(folder))
    return Fields(read_json(path) if os.path.lexists(path) else {}, str(path))


def read_eos_ids(folder: Path, config: ModelConfig) -> tuple[int, ...]:
    """Stop tokens: those of generation_config.json where there is one, and config.json's."""
    return tuple(dict.fromkeys((*config.eos_ids, *_id_list(_generation(folder), "eos_token_id"))))


def read_suppressed_ids(folder: Path) -> tuple[int, ...]:
    """Tokens that generation_config.json forbids (`suppress_tokens`; the 12B's media markers)."""
    return _id_list(_generation(folder), "suppress_tokens")


def read_sampling(folder: Path) -> dict[str, float]:
    """temperature, top_k and top_p as generation_config.json recommends them, those of them that it does.

    As transformers takes them: without do_sample the temperature is 0, which is greedy. Raises CheckpointError for
    values that cannot be.
    """
    fields, found = _generation(folder), {}
    for name, low, high in (("temperature", 0.0, 1e30), ("top_k", 0, 1 << 31), ("top_p", 0.0, 1.0)):
        if (value := fields.values.get(name)) is None:
            continue
        kind = int if name == "top_k" else (int, float)
        if isinstance(value, bool) or not isinstance(value, kind) or not low <= value <= high:
            raise fields.error(f"{name} is {short(value)}; it must be a number from {low:g} to {high:g}")
        found[name] = value
    if not fields.flag("do_sample", False):
        found["temperature"] = 0.0
    elif "temperature" not in found:
        found["temperature"] = 1.0
    return found


def _id_list(fields: Fields, name: str) -> tuple[int, ...]:
    value = fields.values.get(name)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
        raise fields.error(f"{name} is {short(value)}; it must be token ids")
    return tuple(ids)


def _text_config(text: Fields, top: Fields, *, is_drafter: bool) -> ModelConfig:
    num_layers = text.integer("num_hidden_layers")
    hidden = text.integer("hidden_size")
    num_heads = text.integer("num_attention_heads")
    if (act := text.values.get("hidden_activation", "gelu_pytorch_tanh")) != "gelu_pytorch_tanh":
        raise text.error(f"hidden_activation is {act!r}; only gelu_pytorch_tanh is known")
    if text.flag("attention_bias", False):
        raise text.error("attention_bias is true; no released Gemma-4 has it and it is not implemented")
    if text.values.get("use_bidirectional_attention") not in (None, "vision"):
        raise text.error("use_bidirectional_attention 'all' is not implemented; null and 'vision' are")
    sliding = _layer_types(text, num_layers)
    shared = text.integer("num_kv_shared_layers", default=0, low=0)
    if is_drafter:
        shared = _check_drafter(text, num_layers, shared)
    elif shared >= num_layers:
        raise text.error(f"num_kv_shared_layers {shared} leaves none of {num_layers} layers with a cache")
    layers = _layers(text, sliding, num_heads, num_layers - shared, is_drafter=is_drafter)
    experts = text.flag("enable_moe_block", False)
    num_experts = text.integer("num_experts") if experts else 0
    top_k = text.integer("top_k_experts") if experts else 0
    if top_k > num_experts:
        raise text.error(f"top_k_experts {top_k} is more than num_experts {num_experts}")
    vocab = text.integer("vocab_size")
    ple = text.integer("hidden_size_per_layer_input", default=0, low=0)
    ple_vocab = text.integer("vocab_size_per_layer_input") if ple else 0
    if ple and ple_vocab < vocab:
        raise text.error(f"vocab_size_per_layer_input is {ple_vocab}, which lacks some of the {vocab} tokens")
    cap = None if is_drafter else text.values.get("final_logit_softcapping")  # a drafter's head has none
    head_dims = {layer.kind: layer.head_dim for layer in layers}
    quant = read_quant_config(top)
    return ModelConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        num_q_heads=num_heads,
        layers=layers,
        rope={kind: _rope(text, kind, dim) for kind, dim in head_dims.items()},
        rms_norm_eps=text.number("rms_norm_eps"),
        logit_cap=0.0 if cap is None else text.number("final_logit_softcapping"),
        max_positions=text.integer("max_position_embeddings"),
        tied=top.flag("tie_word_embeddings", True),
        ple_size=ple,
        ple_vocab_size=ple_vocab,
        num_experts=num_experts,
        top_k_experts=top_k,
        moe_intermediate_size=text.integer("moe_intermediate_size") if experts else 0,
        bos_id=text.integer("bos_token_id", default=2, low=0),
        eos_ids=_id_list(text, "eos_token_id"),
        quant=quant,
        has_kv_scales=quant is not None and quant.kv_scales,
    )


def _check_drafter(text: Fields, num_layers: int, shared: int) -> int:
    """The constraints that transformers' Gemma4AssistantConfig enforces. Returns num_kv_shared_layers."""
    for name in ("enable_moe_block", "use_double_wide_mlp"):
        if text.flag(name, False):
            raise text.error(f"{name} is true; a drafter cannot have it")
    if text.integer("hidden_size_per_layer_input", default=0, low=0):
        raise text.error("hidden_size_per_layer_input must be 0 in a drafter")
    if shared not in (0, num_layers):
        raise text.error(f"num_kv_shared_layers is {shared}; a drafter shares all {num_layers} layers")
    return num_layers


def _layer_types(text: Fields, num_layers: int) -> list[bool]:
    """Whether each layer is sliding. The last one never is (as transformers forces it)."""
    types = text.values.get("layer_types")
    if types is None:
        sliding = [(i + 1) % 6 != 0 for i in range(num_layers)]
    else:
        if not isinstance(types, list) or len(types) != num_layers:
            raise text.error(f"layer_types names {len(types) if isinstance(types, list) else types!r} layers; "
                             f"num_hidden_layers is {num_layers}")  # fmt: skip
        if unknown := [t for t in types if t not in ("sliding_attention", "full_attention")]:
            raise text.error(f"layer_types holds {unknown[0]!r}; known: sliding_attention, full_attention")
        sliding = [t == "sliding_attention" for t in types]
    sliding[-1] = False
    return sliding


def _layers(
    text: Fields, sliding: list[bool], num_heads: int, first_shared: int, *, is_drafter: bool
) -> tuple[LayerConfig, ...]:
    """Every layer's shape. `first_shared`: the first layer that owns no cache."""
    k_eq_v = text.flag("attention_k_eq_v", False)
    heads = _heads(text, sliding, k_eq_v)
    window = text.integer("sliding_window") if any(sliding) else 0
    intermediate = text.integer("intermediate_size")
    double = text.flag("use_double_wide_mlp", False)
    layers: list[LayerConfig] = []
    for i, is_sliding in enumerate(sliding):
        dim, nkv = heads[i]
        if heads[i] != heads[same := sliding.index(is_sliding)]:
            raise text.error(
                f"layer {i} has head_dim {dim} and {nkv} KV heads, layer {same} {heads[same][0]} and {heads[same][1]}; "
                f"layers of one type ({'sliding' if is_sliding else 'full'}_attention) must agree"
            )
        if num_heads % nkv:
            raise text.error(f"layer {i}: {num_heads} query heads do not split over {nkv} KV heads")
        if dim % 2:
            raise text.error(f"layer {i}: head_dim {dim} is odd; RoPE rotates pairs")
        source = i
        if i >= first_shared and not is_drafter:
            owners = [j for j in range(first_shared) if sliding[j] == is_sliding]
            if not owners:
                raise text.error(f"layer {i} shares KV, but no layer of its type before {first_shared} owns any")
            source = owners[-1]
        layers.append(
            LayerConfig(
                index=i,
                is_sliding=is_sliding,
                head_dim=dim,
                num_kv_heads=nkv,
                window=window if is_sliding else 0,
                intermediate_size=intermediate * (2 if double and i >= first_shared else 1),
                v_is_k=k_eq_v and not is_sliding,
                kv_source=-1 if is_drafter else source,
            )
        )
    return tuple(layers)


def _heads(text: Fields, sliding: list[bool], k_eq_v: bool) -> list[tuple[int, int]]:
    """head_dim and KV heads of every layer: as per_layer_config says, or the flat keys where there is none.

    The flat keys (global_head_dim, num_global_key_value_heads) are how the models were released. transformers from 5.20
    on writes per_layer_config in their place, and then reads nothing else.
    """
    dim, kv_heads = text.integer("head_dim"), text.integer("num_key_value_heads")
    if "per_layer_config" in text.values:
        heads = [(dim, kv_heads)] * len(sliding)
        for i, layer in _layer_overrides(text, len(sliding)).items():
            heads[i] = (
                layer.integer("head_dim") if "head_dim" in layer.values else dim,
                layer.integer("num_key_value_heads") if "num_key_value_heads" in layer.values else kv_heads,
            )
        return heads
    full = text.integer("global_head_dim", default=DEFAULT_GLOBAL_HEAD_DIM), kv_heads
    if k_eq_v:
        full = full[0], text.integer("num_global_key_value_heads", default=kv_heads)
    return [(dim, kv_heads) if is_sliding else full for is_sliding in sliding]


def _layer_overrides(text: Fields, num_layers: int) -> dict[int, Fields]:
    """per_layer_config by layer. What a layer, or the whole object, does not name has its global value.

    Keys are layer numbers, zero-padded to one width ("05"); transformers leaves out what equals the global value.
    Source: its integrations/heterogeneity/configuration_utils.py.
    """
    if text.values["per_layer_config"] is None:
        return {}
    found: dict[int, Fields] = {}
    section = text.section("per_layer_config")
    for key in section.values:
        layer = section.section(key)
        index = int(key) if key.isascii() and key.isdecimal() and len(key) <= 9 else num_layers
        if index >= num_layers:
            raise section.error(f"{key[:80]!r} is not a layer; num_hidden_layers is {num_layers}")
        if index in found:
            raise section.error(f"layer {index} is there twice")
        for name, value in layer.values.items():
            is_global = value == ([] if name == "skip" else text.values.get(name))
            if name not in ("head_dim", "num_key_value_heads") and not is_global:
                raise layer.error(f"{name} differs from the model's; only head_dim and num_key_value_heads may")
        found[index] = layer
    return found


def _rope(text: Fields, kind: str, head_dim: int) -> RopeConfig:
    rope = text.section("rope_parameters", default=DEFAULT_ROPE).section(f"{kind}_attention")
    theta, factor = rope.number("rope_theta"), rope.number("factor", default=1.0)
    match rope.get("rope_type"):
        case "default":
            return RopeConfig(theta, head_dim // 2, 1.0)
        case "proportional":
            part = rope.number("partial_rotary_factor", default=1.0)
            if part > 1:
                raise rope.error(f"partial_rotary_factor is {part}; it must be at most 1")
            return RopeConfig(theta, int(part * head_dim // 2), factor)
        case other:
            raise rope.error(f"rope_type is {other!r}; known: default, proportional")
