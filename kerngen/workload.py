"""What a model asks of the kernels: every (kernel, problem) of its decode, verification, prefill and drafting steps.

Geometry comes from the released configurations (by name) or from a config.json (by folder). Token counts lie on the
grid below; between two points the runtime uses the tuned point above, beyond the last it uses the default.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from kerngen.arch import Arch
from kerngen.errors import UnknownName, UsageError
from kerngen.runtime.config import (
    DrafterConfig,
    LayerConfig,
    ModelConfig,
    QuantConfig,
    RopeConfig,
    read_drafter_config,
    read_model_config,
)
from kerngen.templates import find_kernel, kernel_names
from kerngen.templates.kernel import fields_of

BATCHES = (1, 2, 4, 8, 16, 32)
VERIFY_LENS = (4, 5)  # tokens a sequence: the last known one and 3 or 4 drafts
PREFILL_TOKENS = (512, 1024, 2048, 4096, 8192)
CHUNK_TOKENS = (64, 512, 2048, 8192)  # of a prefill's attention, for each of
CHUNK_KEYS = tuple(1 << i for i in range(7, 19))  # these many keys, its own included
MOST_PAIRS = 1 << 28  # tokens x keys of a chunk: more keys come in smaller chunks
DECODE_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # covers every batch x verify length
CONTEXTS = (64, 512, 2048, 8192, 32768, 131072, 262144)  # keys of a sequence in decode
MOST_KEYS = 1 << 20  # of all sequences together: more KV than that fits no GPU at 31B
PAGE_SIZE = 64
GROUP_SIZE = 32


@dataclass(frozen=True, slots=True)
class Use:
    """Where in the model a problem occurs. phase: decode, verify, prefill or draft. count: launches in one step.

    batch, context: the step for which `count` holds; context 0 means any.
    """

    where: str
    phase: str
    batch: int
    count: int
    context: int = 0


@dataclass(frozen=True, slots=True)
class Item:
    """One problem to tune, with all its uses."""

    kernel: str
    problem: Any
    uses: tuple[Use, ...] = ()

    @property
    def where(self) -> str:
        """The distinct places, in the order of the model."""
        return ", ".join(dict.fromkeys(u.where for u in self.uses))


@dataclass(frozen=True, slots=True)
class Workload:
    """The problems of one model on one arch. missing: kernels that the model needs and this kerngen does not have."""

    model: str
    arch: str
    items: tuple[Item, ...]
    missing: tuple[str, ...] = ()

    def only(self, kernels: Iterable[str]) -> Workload:
        """The part that concerns `kernels`. Raises UnknownName for one that the workload does not have."""
        wanted = list(kernels)
        have = sorted({i.kernel for i in self.items})
        for name in wanted:
            if name not in have:
                find_kernel(name)  # a kernel that does not exist at all is the clearer complaint
                raise UsageError(f"{self.model} needs no {name} on {self.arch}", hint=f"it needs: {', '.join(have)}")
        return Workload(self.model, self.arch, tuple(i for i in self.items if i.kernel in wanted), self.missing)

    def step(self, phase: str, batch: int, context: int) -> Iterator[tuple[Item, int]]:
        """(item, launches) of one step; of attention, the least tuned context at or above `context` stands for it."""
        here = [(i, u) for i in self.items for u in i.uses if u.phase == phase and u.batch == batch]
        tuned: dict[str, list[int]] = {}
        for _, u in here:
            tuned.setdefault(u.where, []).append(u.context)
        stands = {w: min((c for c in cs if c >= context), default=max(cs)) for w, cs in tuned.items()}
        for item in self.items:
            count = sum(u.count for i, u in here if i is item and u.context in (0, stands[u.where]))
            if count:
                yield item, count


@dataclass(frozen=True, slots=True)
class Model:
    """A target with the drafter that goes with it, if any."""

    name: str
    target: ModelConfig
    drafter: DrafterConfig | None


# -- released models: shapes as published in their config.json files


def _layers(
    kinds: list[bool], kv_heads: tuple[int, int], window: int, intermediate: int, shared: int, *,
    k_eq_v: bool = False, double: bool = False,
) -> tuple[LayerConfig, ...]:  # fmt: skip
    """kinds: whether each layer slides. kv_heads: of sliding and full layers. shared: last layers, which own no KV."""
    first_shared = len(kinds) - shared
    layers = []
    for i, sliding in enumerate(kinds):
        owners = [j for j in range(first_shared) if kinds[j] == sliding]
        layers.append(
            LayerConfig(
                index=i,
                is_sliding=sliding,
                head_dim=256 if sliding else 512,
                num_kv_heads=kv_heads[0] if sliding else kv_heads[1],
                window=window if sliding else 0,
                intermediate_size=intermediate * (2 if double and i >= first_shared else 1),
                v_is_k=k_eq_v and not sliding,
                kv_source=i if i < first_shared else owners[-1] if owners else -1,
            )
        )
    return tuple(layers)


_ROPE = {"sliding": RopeConfig(1e4, 128, 1.0), "full": RopeConfig(1e6, 64, 1.0)}
VOCAB = 262144


def _text(
    hidden: int, heads: int, layers: tuple[LayerConfig, ...], *, cap: float, quant: bool, **more: int
) -> ModelConfig:
    return ModelConfig(
        vocab_size=VOCAB, hidden_size=hidden, num_q_heads=heads, layers=layers, rope=_ROPE, rms_norm_eps=1e-6,
        logit_cap=cap, max_positions=more.get("max_positions", 262144), tied=True, ple_size=more.get("ple_size", 0),
        ple_vocab_size=VOCAB if more.get("ple_size") else 0, num_experts=more.get("num_experts", 0),
        top_k_experts=more.get("top_k", 0), moe_intermediate_size=more.get("moe_intermediate", 0), bos_id=2,
        eos_ids=(1, 106), quant=QuantConfig(GROUP_SIZE, ()) if quant else None,
    )  # fmt: skip


def _released(
    hidden: int, intermediate: int, num_layers: int, heads: int, kv_heads: tuple[int, int], *, every: int = 6,
    window: int = 1024, shared: int = 0, k_eq_v: bool = True, double: bool = False, draft: tuple[int, int, int],
    **more: int,
) -> tuple[ModelConfig, DrafterConfig]:  # fmt: skip
    """every: one full layer in so many. draft: hidden size, intermediate size and centroids of the assistant."""
    kinds = [(i + 1) % every != 0 for i in range(num_layers)]
    layers = _layers(kinds, kv_heads, window, intermediate, shared, k_eq_v=k_eq_v, double=double)
    target = _text(hidden, heads, layers, cap=30.0, quant=True, **more)
    draft_hidden, draft_intermediate, centroids = draft
    draft_heads = 4 if centroids else heads
    draft_layers = _layers([True, True, True, False], kv_heads, window, draft_intermediate, 4, k_eq_v=k_eq_v)
    text = _text(draft_hidden, draft_heads, draft_layers, cap=0.0, quant=False)
    return target, DrafterConfig(text, hidden, centroids, 32 if centroids else 0)


MODELS: dict[str, tuple[ModelConfig, DrafterConfig]] = {
    "gemma-4-31b": _released(5376, 21504, 60, 32, (16, 4), draft=(1024, 8192, 0)),
    "gemma-4-26b-a4b": _released(
        2816, 2112, 30, 16, (8, 2), draft=(1024, 8192, 0), num_experts=128, top_k=8, moe_intermediate=704
    ),
    "gemma-4-12b": _released(3840, 15360, 48, 16, (8, 1), draft=(1024, 8192, 0)),
    "gemma-4-e4b": _released(
        2560, 10240, 42, 8, (2, 2), window=512, shared=18, k_eq_v=False, draft=(256, 2048, 2048), ple_size=256,
        max_positions=131072,
    ),
    "gemma-4-e2b": _released(
        1536, 6144, 35, 8, (1, 1), every=5, window=512, shared=20, k_eq_v=False, double=True, draft=(256, 2048, 2048),
        ple_size=256, max_positions=131072,
    ),
}  # fmt: skip


def find_model(name: str, drafter: str | None = None) -> Model:
    """A released model by name, or the one in a Hugging Face folder, whose config.json is read and checked.

    drafter: folder of the assistant that goes with a folder. Raises UnknownName, CheckpointError or UsageError.
    """
    if name in MODELS:
        if drafter is not None:
            raise UsageError(f"{name} is a released model, with a drafter of its own: --draft goes with a folder")
        return Model(name, *MODELS[name])
    folder = Path(name)
    if not folder.exists() and "/" not in name:
        raise UnknownName("model", name, [*MODELS, "or a model folder"])
    target = read_model_config(folder)
    return Model(name, target, read_drafter_config(Path(drafter), target) if drafter else None)


# -- from a model to its problems


@dataclass(slots=True)
class _Collector:
    """Gathers uses by (kernel, problem), in the order of the model."""

    arch: Arch
    found: dict[tuple[str, Any], list[Use]] = field(default_factory=dict)
    missing: dict[str, None] = field(default_factory=dict)

    @property
    def dtype(self) -> str:
        return "bf16" if self.arch.has_bf16 else "fp16"

    @property
    def residual_dtype(self) -> str:
        return "bf16" if self.arch.has_bf16 else "fp32"

    def add(self, kernel: str, use: Use, **fields: Any) -> None:
        if kernel not in kernel_names():
            self.missing[kernel] = None
            return
        problem = find_kernel(kernel).problem_type(dtype=self.dtype, **fields)
        self.found.setdefault((kernel, problem), []).append(use)


@dataclass(frozen=True, slots=True)
class _Step:
    """One kind of step. tokens: rows of the activations. q_len: tokens a sequence, 0 in prefill."""

    phase: str
    batch: int
    q_len: int
    tokens: int


def workload(model: Model, arch: Arch) -> Workload:
    """Every problem that `model` needs on `arch`, in its dtype (fp16 on sm70 and sm75, else bf16), each once."""
    out = _Collector(arch)
    steps = [_Step("decode", b, 1, b) for b in BATCHES]
    steps += [_Step("verify", b, q, b * q) for b in BATCHES for q in VERIFY_LENS]
    steps += [_Step("prefill", 1, 0, t) for t in PREFILL_TOKENS]
    for step in steps:
        _target(out, model.target, step)
    for layer, count, kind in _groups(model.target):
        _prefill_attention(out, model.target, layer, f"attention ({kind})", count)
    if model.drafter is not None:
        for batch in BATCHES:
            _drafter(out, model.drafter, model.target, _Step("draft", batch, 1, batch))
    items = tuple(Item(kernel, problem, tuple(uses)) for (kernel, problem), uses in out.found.items())
    return Workload(model.name, arch.name, items, tuple(out.missing))


def _bucket(tokens: int) -> int:
    """The tuned number of tokens that serves `tokens`."""
    return next((t for t in (*DECODE_TOKENS, *PREFILL_TOKENS) if t >= tokens), tokens)


def _groups(config: ModelConfig) -> Iterator[tuple[LayerConfig, int, str]]:
    """Layers that need the same problems: one of them, how many there are, and what to call them."""
    groups: dict[tuple[Any, ...], list[LayerConfig]] = {}
    for layer in config.layers:
        groups.setdefault((layer.kind, layer.owns_kv, layer.intermediate_size), []).append(layer)
    for (kind, owns_kv, _), members in groups.items():
        yield members[0], len(members), kind if owns_kv or members[0].kv_source < 0 else f"{kind}, shared KV"


def _target(out: _Collector, config: ModelConfig, step: _Step) -> None:
    tokens = _bucket(step.tokens)
    hidden, residual = config.hidden_size, out.residual_dtype

    def use(where: str, count: int, context: int = 0) -> Use:
        return Use(where, step.phase, step.batch, count, context)

    def linear(where: str, n: int, k: int, count: int) -> None:
        if config.quant is not None:
            out.add("w4a16_gemm", use(where, count), n=n, k=k, group_size=config.quant.group_size, num_tokens=tokens)

    out.add(
        "embed", use("embedding", 1), hidden=hidden, vocab_size=config.vocab_size, residual_dtype=residual,
        num_tokens=tokens,
    )  # fmt: skip
    if config.ple_size:
        linear("per-layer inputs", len(config.layers) * config.ple_size, hidden, 1)
    out.add("rmsnorm", use("first norm", 1), hidden=hidden, residual_dtype=residual, num_tokens=tokens)
    for layer, count, kind in _groups(config):
        dim, nq, nkv = layer.head_dim, config.num_q_heads, layer.num_kv_heads
        heads = nq + (0 if not layer.owns_kv else nkv if layer.v_is_k else 2 * nkv)
        linear(f"qkv ({kind})", heads * dim, hidden, count)
        out.add(
            "qkv_norm_rope", use(f"q, k, v norms and RoPE ({kind})", count), num_q_heads=nq,
            num_kv_heads=nkv if layer.owns_kv else 0, head_dim=dim,
            num_rotated_pairs=config.rope[layer.kind].num_rotated, page_size=PAGE_SIZE,
            k_eq_v=layer.v_is_k and layer.owns_kv, q_only=not layer.owns_kv, num_tokens=tokens,
        )  # fmt: skip
        _attention(out, config, layer, step, f"attention ({kind})", count)
        linear(f"o ({kind})", hidden, nq * dim, count)
        linear(f"gate_up ({kind})" if "shared" in kind else "gate_up", 2 * layer.intermediate_size, hidden, count)
        out.add("gelu_gate", use("GELU gate", count), width=layer.intermediate_size, num_tokens=tokens)
        linear("down", hidden, layer.intermediate_size, count)
    num_layers = len(config.layers)
    norm = {"hidden": hidden, "residual_dtype": residual, "num_tokens": tokens}
    out.add("add_norm", use("residual after attention", num_layers), **norm)
    if config.ple_size:
        out.add("add_norm", use("residual after MLP", num_layers), has_next=False, **norm)
        linear("per-layer gate", config.ple_size, hidden, num_layers)
        linear("per-layer projection", hidden, config.ple_size, num_layers)
    out.add("add_norm", use("end of layer", num_layers), has_scalar=True, **norm)
    if config.num_experts:
        _experts(out, config, tokens, use)
    if step.phase != "prefill":
        _head(out, config.vocab_size, config.logit_cap > 0, tokens, use("logits", 1))


def _experts(out: _Collector, config: ModelConfig, tokens: int, use: Any) -> None:
    """The router, and the norms around the experts (the dense MLP's output norm among them)."""
    count = len(config.layers)
    norm = {"hidden": config.hidden_size, "num_tokens": tokens}
    out.add("rmsnorm", use("router norm", count), residual_dtype=out.residual_dtype, has_weight=False, **norm)
    out.add("rmsnorm", use("expert norms", count), residual_dtype=out.residual_dtype, **norm)
    out.add("rmsnorm", use("expert norms", 2 * count), residual_dtype=out.dtype, **norm)
    out.add(
        "moe_route", use("router", count), num_experts=config.num_experts, top_k=config.top_k_experts,
        logits_dtype=out.dtype, num_tokens=tokens,
    )  # fmt: skip


def _head(out: _Collector, vocab: int, has_cap: bool, tokens: int, use: Use) -> None:
    """What greedy decoding needs, and the capped logits that sampling needs."""
    shape = {"vocab_size": vocab, "logits_dtype": out.dtype, "has_cap": has_cap, "round_steps": False}
    out.add("softcap_argmax", use, num_tokens=tokens, **shape)
    sampled = Use(f"{use.where}, sampled", use.phase, use.batch, 0)
    out.add("softcap_argmax", sampled, num_tokens=tokens, write_capped=True, **shape)


def _attention(out: _Collector, config: ModelConfig, layer: LayerConfig, step: _Step, where: str, count: int) -> None:
    shape = {
        "head_dim": layer.head_dim, "num_q_heads": config.num_q_heads, "num_kv_heads": layer.num_kv_heads,
        "page_size": PAGE_SIZE, "window": layer.window, "batch": step.batch,
    }  # fmt: skip
    if step.phase == "prefill":
        return
    for context in _contexts(config, layer, step.batch):
        use = Use(where, step.phase, step.batch, count, context)
        out.add("attn_decode", use, q_len=step.q_len, kv_len=context, **shape)


def _prefill_attention(out: _Collector, config: ModelConfig, layer: LayerConfig, where: str, count: int) -> None:
    """Chunks of one sequence: the whole prompt, or what follows keys that are in the cache already."""
    for keys in CHUNK_KEYS:
        sizes = {t for t in CHUNK_TOKENS if t < keys} | {min(keys, CHUNK_TOKENS[-1])}
        for tokens in sorted(t for t in sizes if t * keys <= MOST_PAIRS):
            out.add(
                "attn_prefill", Use(where, "prefill", 1, count, keys), head_dim=layer.head_dim,
                num_q_heads=config.num_q_heads, num_kv_heads=layer.num_kv_heads, page_size=PAGE_SIZE,
                window=layer.window, batch=1, num_tokens=tokens, kv_len=keys,
            )  # fmt: skip


def _contexts(config: ModelConfig, layer: LayerConfig, batch: int) -> tuple[int, ...]:
    """Keys at which decode attention is tuned. A full window is the same at any context: its two ends stand for it."""
    points = [c for c in CONTEXTS if c <= max(config.max_positions, CONTEXTS[0]) and c * batch <= MOST_KEYS]
    past = [c for c in points if c > layer.window]
    if layer.window and len(past) > 2:
        points = [c for c in points if c not in past[1:-1]]
    return tuple(points)


def _drafter(out: _Collector, drafter: DrafterConfig, target: ModelConfig, step: _Step) -> None:
    """One draft step: four layers without K and V of their own, reading the target's caches."""
    config, tokens = drafter.text, _bucket(step.tokens)
    norm = {"hidden": config.hidden_size, "residual_dtype": out.residual_dtype, "num_tokens": tokens}

    def use(where: str, count: int) -> Use:
        return Use(f"drafter {where}", step.phase, step.batch, count)

    out.add(
        "embed", use("embedding", 1), hidden=target.hidden_size, vocab_size=target.vocab_size,
        residual_dtype=out.residual_dtype, num_tokens=tokens,
    )  # fmt: skip
    out.add("rmsnorm", use("first norm", 1), **norm)
    for layer, count, kind in _groups(config):
        out.add(
            "qkv_norm_rope", use(f"q norm and RoPE ({kind})", count), num_q_heads=config.num_q_heads, num_kv_heads=0,
            head_dim=layer.head_dim, num_rotated_pairs=config.rope[layer.kind].num_rotated, page_size=PAGE_SIZE,
            q_only=True, num_tokens=tokens,
        )  # fmt: skip
        # The drafter's window holds one key more than the target's (runtime/drafting.py).
        read = _with_window(layer, layer.window + 1 if layer.is_sliding else 0)
        _attention(out, config, read, step, f"drafter attention ({kind})", count)
        out.add("gelu_gate", use("GELU gate", count), width=layer.intermediate_size, num_tokens=tokens)
    out.add("add_norm", use("residual after attention", len(config.layers)), **norm)
    out.add("add_norm", use("end of layer", len(config.layers)), has_scalar=True, **norm)
    if not drafter.num_centroids:
        _head(out, config.vocab_size, False, tokens, use("logits", 1))


def _with_window(layer: LayerConfig, window: int) -> LayerConfig:
    return LayerConfig(**(fields_of(layer) | {"window": window}))


@cache
def find_workload(model: str, arch: Arch) -> Workload:
    """The workload of a model given by name or folder."""
    return workload(find_model(model), arch)
