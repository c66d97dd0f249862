"""The workload of a model: every (kernel, problem) of its decode, verification, prefill and drafting steps.

A workload is a record: the model's own code runs over the grid below on tensors without storage, and each call of each
step is written down (steps.py). Released models are folders of configurations in runtime/released; any other
folder with a config.json will do. Token counts lie on the grid; between two points the runtime uses the tuned point
above, beyond the last it uses the default.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from kerngen.arch import Arch, Target
from kerngen.errors import UnknownName, UsageError
from kerngen.runtime.config import (
    AS_STORED,
    ASSISTANT,
    DrafterConfig,
    Keeping,
    ModelConfig,
    read_drafter_config,
    read_model_config,
)
from kerngen.runtime.config_fields import config_path, is_gguf, read_config
from kerngen.runtime.dflash_config import DflashConfig
from kerngen.runtime.gguf.place import place_of_model
from kerngen.runtime.media.config import MediaConfig, read_media_config
from kerngen.runtime.world import World, most_rows
from kerngen.templates import find_kernel
from kerngen.templates.attn_prefill.spec import Problem as Prefill
from kerngen.templates.centroid_head.spec import Problem as CentroidHead
from kerngen.templates.exchange_norm.spec import Problem as ExchangeNorm
from kerngen.templates.greedy_head.spec import Problem as GreedyHead
from kerngen.templates.greedy_head.spec import bits_for, most_tokens
from kerngen.templates.kernel import Kernel
from kerngen.templates.kv_write.spec import Problem as KvWrite
from kerngen.templates.qkv_norm_rope.spec import Problem as NewHeads
from kerngen.workload.steps import Fuses, Kind, Recorder, Step, recorder

BATCHES = (1, 2, 4, 8, 16, 32)
VERIFY_LENS = (4, 5)  # tokens a sequence at every batch and context: the last known one and 3 or 4 drafts
OTHER_VERIFY_BATCHES = (1, 8)  # of the other lengths that a drafter may be asked for,
OTHER_VERIFY_CONTEXTS = (512, 8192, 131072)  # at these contexts
CHUNK_TOKENS = (1, 64, 512, 2048, 8192)  # of a prefill, for each of
CHUNK_KEYS = tuple(1 << i for i in range(7, 19))  # these many keys, its own included
PREFILL_TOKENS = (512, 1024, 2048, 4096, 8192)  # whole prompts
MOST_PAIRS = 1 << 28  # tokens x keys of a chunk: more keys come in smaller chunks
CONTEXTS = (64, 512, 2048, 8192, 32768, 131072, 262144)  # keys of a sequence in decode
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, *PREFILL_TOKENS)  # points of num_tokens: covers every batch x verify length
MOST_KEYS = 1 << 20  # of all sequences together: more KV than that fits no GPU at 31B
RELEASED = Path(__file__).resolve().parents[1] / "runtime" / "released"
MODELS = tuple(sorted(p.name for p in RELEASED.iterdir() if (p / "config.json").is_file()))
ENGINES = ("kerngen", "vllm")  # that run models; inside vLLM kerngen serves some of it (kerngen.vllm)


@dataclass(frozen=True, slots=True)
class Use:
    """Where in the model a problem occurs. phase: decode, verify, prefill or draft. count: launches in one step.

    batch, q_len (tokens a sequence; 0 in prefill), chunk (tokens of a prefill's; else 0), context (keys of a sequence,
    its chunk's own included): the step for which `count` holds; context 0 means any. A count of 0: the step asks for it
    only where it samples, or on a board where it is faster, or slower, to ask one kernel in place of several.
    """

    where: str
    phase: str
    batch: int
    q_len: int
    count: int
    context: int = 0
    chunk: int = 0

    @property
    def kind(self) -> Kind:
        """Of the step, whatever its context."""
        return self.phase, self.batch, self.q_len, self.chunk


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
    """The problems of one model on one arch.

    missing: what the model computes that no kernel of ours serves, by its name in `runtime.fallbacks.FALLBACKS`.
    steps: what was recorded. images_see_themselves: whether the tokens of an image see each other in sliding layers.
    of_towers: (kernel, problem) of what embeds images, which are built, and not tuned with the model.
    """

    model: str
    arch: str
    items: tuple[Item, ...]
    missing: tuple[str, ...] = ()
    steps: tuple[Step, ...] = ()
    images_see_themselves: bool = False
    of_towers: tuple[tuple[str, Any], ...] = ()
    _lines: dict[tuple[Any, ...], list[Item]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def only(self, kernels: Iterable[str]) -> Workload:
        """The part that concerns `kernels`. Raises UnknownName for one that the workload does not have."""
        wanted = list(kernels)
        have = sorted({i.kernel for i in self.items})
        require_among(wanted, have, self.model, "needs", f" on {self.arch}")
        return replace(self, items=tuple(i for i in self.items if i.kernel in wanted),
                       of_towers=tuple(asked for asked in self.of_towers if asked[0] in wanted))  # fmt: skip

    def with_images(self, problem: Any) -> Iterator[Any]:
        """`problem`, and what a prompt with images asks in its place, if that is another. What is tuned serves both."""
        yield problem
        if self.images_see_themselves and isinstance(problem, Prefill) and problem.window:
            yield replace(problem, ends=True)

    def step(
        self, phase: str, batch: int, context: int, q_len: int = 1, *, chunk: int = 0
    ) -> Iterator[tuple[Item, int]]:
        """(item, launches) of a step; the least recorded context that is no shorter stands for it, or the longest.

        chunk: tokens of a prefill's, which has no q_len; another size of chunk is another step.
        """
        wanted = (phase, batch, 0 if chunk else q_len, chunk)
        here = [(i, u) for i in self.items for u in i.uses if u.kind == wanted and u.count]
        recorded = {u.context for _, u in here}
        stands = min((c for c in recorded if c >= context), default=max(recorded, default=0))
        counts: dict[int, tuple[Item, int]] = {}  # by identity: items are long to hash, and in their order here
        for item, use in here:
            if use.context in (0, stands):
                counts[id(item)] = item, counts.get(id(item), (item, 0))[1] + use.count
        yield from counts.values()

    def serving(self, kernel: str, problem: Any) -> Item | None:
        """The tuned problem whose winner serves a call: the nearest above along its kernel's line, as in the runtime.

        None where the grid has none: the runtime uses the default configuration then.
        """
        if not self._lines:
            for item in self.items:
                self._lines.setdefault(_line(item.kernel, item.problem), []).append(item)
        at = _place(problem)
        above = [item for item in self._lines.get(_line(kernel, problem), ()) if at <= _place(item.problem)]
        return min(above, key=lambda item: _place(item.problem), default=None)


def _line(kernel: str, problem: Any) -> tuple[Any, ...]:
    """What problems have in common that differ along their kernel's line alone."""
    cls: Any = type(problem)
    return kernel, *(getattr(problem, name) for name in _off_line(cls))


@cache
def _off_line(problem_type: Any) -> tuple[str, ...]:
    return tuple(f.name for f in fields(problem_type) if f.name != problem_type.DYNAMIC)


def _place(problem: Any) -> int:
    return getattr(problem, problem.DYNAMIC) if problem.DYNAMIC else 0


@dataclass(frozen=True, slots=True)
class Model:
    """A target with the drafter that goes with it, if any. engine: of ENGINES, which runs it. media: what the model
    takes beside text, None for nothing.
    """

    name: str
    target: ModelConfig
    drafter: DrafterConfig | DflashConfig | None
    engine: str = ENGINES[0]
    media: MediaConfig | None = None

    @property
    def images_see_themselves(self) -> bool:
        """Whether the tokens of an image see each other in sliding layers."""
        return self.media is not None and self.media.images_see_themselves

    def on(self, engine: str) -> Model:
        """The same on that engine. Raises UsageError for what is not served there."""
        if engine == self.engine:
            return self
        if self.target.kv_format != "plain" or self.target.kv_is_shared:
            raise UsageError("inside vLLM caches are vLLM's, in the activations' dtype",
                             hint="leave --kv-cache-dtype and --kv-cache-layout out")  # fmt: skip
        if self.target.sparse is not None:
            raise UsageError("inside vLLM prompts read all keys", hint="leave --sparse-prefill out")
        if isinstance(self.drafter, DflashConfig):
            raise UsageError("inside vLLM a DFlash drafter is vLLM's alone: kerngen serves nothing of it there",
                             hint="leave --draft out, or name the model's assistant")  # fmt: skip
        if self.target.quant is None:
            raise UsageError(f"{self.name} has no W4A16 layers: kerngen serves nothing of it inside vLLM",
                             hint="a W4A16 checkpoint of the model, or --engine kerngen")  # fmt: skip
        return replace(self, name=f"{self.name}-vllm", engine=engine)

    def divided(self, world: World) -> Model:
        """What a rank has of it. Raises UsageError where it does not divide among so many."""
        target = self.target.divided(world)
        return replace(self, target=target, drafter=None if self.drafter is None else self.drafter.divided(target))

    def ranks(self, size: int) -> list[Model]:
        """What ranks have of it that differ in sizes, named after their number and, where they differ, the first of
        their kind ("gemma-4-26b-a4b-tp4-rank2"); the model itself in a world of one. Raises as `divided`.
        """
        if size == 1:
            return [self]
        found: dict[tuple[Any, ...], tuple[int, Model]] = {}
        for rank in range(size):
            mine = self.divided(World(rank, size))
            found.setdefault(_sizes(mine.target), (rank, mine))
        alike = len(found) == 1
        return [
            replace(mine, name=f"{self.name}-tp{size}" if alike else f"{self.name}-tp{size}-rank{rank}")
            for rank, mine in found.values()
        ]


def _sizes(config: ModelConfig) -> tuple[Any, ...]:
    """What ranks of one model may differ in, wherever in the whole their parts begin."""
    each = [(layer.num_kv_heads, layer.intermediate_size) for layer in config.layers]
    return config.num_q_heads, config.moe_intermediate_size, config.vocab_span.size, *each


def find_model(name: str, drafter: str | None = None, kept: Keeping = AS_STORED) -> Model:
    """A released model by name, or the one in a Hugging Face folder or a GGUF file, whose configuration is checked.

    drafter: folder of the assistant, or of a DFlash drafter, that goes with a folder; of a released model
    "assistant", which None means, or "dflash". kept: how its tensors and the cache are. Raises UnknownName,
    CheckpointError or UsageError.
    """
    found = _find_model(name, drafter)
    if name in MODELS and kept.kv_cache_dtype == "fp8":  # its shapes are those of checkpoints with scales, too
        found = replace(found, target=replace(found.target, has_kv_scales=True))
    if found.drafter is not None:
        return replace(found, target=found.target.keeping(kept), drafter=found.drafter.keeping(kept))
    if not kept.drafts_as_stored:
        raise UsageError(f"--draft-weights {kept.draft_weights}: no drafter goes with {name} by itself",
                         hint="name it: --draft FOLDER")  # fmt: skip
    return replace(found, target=found.target.keeping(kept))


def _find_model(name: str, drafter: str | None) -> Model:
    if name in MODELS:
        known = drafters_of(name)
        if (asked := drafter or ASSISTANT) not in known:
            raise UsageError(f"{name}, a released model, has no drafter called {asked}",
                             hint=f"--draft {' or '.join(known)}")  # fmt: skip
        target = read_model_config(RELEASED / name)
        own = name if asked == ASSISTANT else f"{name}-{asked}"
        return Model(own, target, read_drafter_config(RELEASED / name / asked, target), media=find_media(name))
    folder = place_of_model(Path(name))
    if not folder.exists() and "/" not in name and not is_gguf(folder):
        raise UnknownName("model", name, [*MODELS, "or a model's folder or GGUF file"])
    target = read_model_config(folder)
    with_drafter = read_drafter_config(Path(drafter), target) if drafter else None
    return Model(name, target, with_drafter, media=find_media(name))


def drafters_of(name: str) -> list[str]:
    """What the drafters of a released model are called."""
    return sorted(place.parent.name for place in (RELEASED / name).glob("*/config.json"))


def find_media(name: str) -> MediaConfig | None:
    """What a released model, or the one in a folder, takes beside text; None of a model of text alone.

    Raises CheckpointError, UsageError where it is no folder.
    """
    folder = RELEASED / name if name in MODELS else place_of_model(Path(name))
    return read_media_config(read_config(folder), str(config_path(folder)))


def require_among(names: Iterable[str], have: Sequence[str], who: str, verb: str, where: str = "") -> None:
    """Raises UsageError for a kernel that is not in `have`: "`who` `verb` no NAME`where`", with those that are.

    UnknownName for one that does not exist at all, which is the clearer complaint.
    """
    for name in names:
        if name not in have:
            find_kernel(name)
            raise UsageError(f"{who} {verb} no {name}{where}", hint=f"it {verb}: {', '.join(have)}")


def workload(model: Model, arch: Arch) -> Workload:
    """Every problem that `model` needs on `arch`, in its dtype (fp16 on sm70 and sm75, else bf16), each once."""
    if model.engine == "vllm":
        return _inside_vllm(model, arch)
    from kerngen.workload.towers import tower_problems  # which needs torch

    recorded = _recorded(recorder(model.target, model.drafter, arch))
    return Workload(model.name, arch.name, *recorded, images_see_themselves=model.images_see_themselves,
                    of_towers=() if model.media is None else tower_problems(model.media, arch))  # fmt: skip


def _inside_vllm(model: Model, arch: Arch) -> Workload:
    """What kerngen.vllm asks: the linear layers' products one by one, a layer's norms with its residual, its experts
    with their routing, attention over pages of K and V, and the head of its drafter, if it has one.

    vLLM has K once more as V where V is K, and what serves its attention may do without. Gate and up are here with the
    gate and without too: its release and its configuration decide. Of a divided model norms are here with the sum over
    ranks and without: where GPUs reach each other's memory decides.
    """
    alone = replace(model.target, share=None)  # kerngen's own engine asks for other sums over ranks
    v_rows = {layer.num_kv_heads * layer.head_dim for layer in alone.layers if layer.v_is_k}
    items, _, steps = _recorded(recorder(alone, None, arch), _never)
    made: list[Item] = []
    for item in items:
        p = item.problem
        if item.kernel in ("attn_decode", "attn_prefill", "qkv_norm_rope"):
            made += _attention_inside_vllm(item)
        elif item.kernel == "w4a16_gemm":
            made += [replace(item, problem=replace(p, gated=gated)) for gated in sorted({False, p.gated})]
            made += (_with_v(item, rows) for rows in v_rows if any(map(_is_q_k, item.uses)))
        elif item.kernel == "add_norm" and p.has_next and not p.has_scalar:  # the norm after attention: one a layer
            norms = list(_norms_inside_vllm(item, model.target.ple_size > 0))
            made += _with_sums_inside_vllm(norms, model.target)
        elif item.kernel == "moe_w4a16":
            made.append(item)
        elif item.kernel == "moe_router" and model.target.world.size == 1:
            made.append(replace(item, problem=replace(p, residual_dtype=p.dtype)))
        elif item.kernel == "moe_combine":
            made += _ends_inside_vllm(item, model.target.world.size)
    if isinstance(model.drafter, DrafterConfig):
        made += _drafts_inside_vllm(model.drafter, arch)
    uses: dict[tuple[str, Any], tuple[Use, ...]] = {}  # layers that vLLM asks alike may not be alike elsewhere
    for item in made:
        uses[item.kernel, item.problem] = uses.get((item.kernel, item.problem), ()) + item.uses
    merged = tuple(Item(kernel, problem, places) for (kernel, problem), places in uses.items())
    return Workload(model.name, arch.name, merged, (), steps, model.images_see_themselves)


def _is_q_k(use: Use) -> bool:
    return use.where.startswith("q_proj+k_proj (")


def _with_v(item: Item, v_rows: int) -> Item:
    """The product of a layer whose V is K, with as many rows of K once more as V's."""
    uses = (replace(u, where=u.where.replace("k_proj", "k_proj+v_proj")) for u in item.uses if _is_q_k(u))
    return Item(item.kernel, replace(item.problem, n=item.problem.n + v_rows), tuple(uses))


def _attention_inside_vllm(item: Item) -> Iterator[Item]:
    """Attention of heads that are normed and rotated, after K and V of the new ones are written, in pages that have the
    heads of both. The cache is written with the norms and RoPE, or without: vLLM's configuration decides.
    """
    p = item.problem
    pages = {"page_heads": 2 * p.num_kv_heads}
    attention, cache, heads = (
        tuple(replace(u, where=f"{what} {u.where[u.where.rindex('(') :]}") for u in item.uses)
        for what in ("attention", "cache", "head norms, RoPE, cache")
    )
    if item.kernel == "attn_prefill":
        yield Item("attn_prefill", replace(p, **pages), attention)
    if item.kernel == "attn_decode":
        yield Item("attn_decode", replace(p, source="q", num_rotated_pairs=0, **pages), attention)
    writes = p.owns_kv if item.kernel == "attn_decode" else item.kernel == "qkv_norm_rope" and not p.q_only
    if writes:
        tokens = p.batch * p.q_len if item.kernel == "attn_decode" else p.num_tokens
        written = KvWrite(p.num_kv_heads, p.head_dim, p.page_size, p.dtype, tokens, **pages)
        yield Item("kv_write", _on_grid(written), cache)
        v_is_k = p.source == "qk" if item.kernel == "attn_decode" else p.k_eq_v
        for without_v in sorted({False, v_is_k}):
            made = NewHeads(p.num_q_heads, p.num_kv_heads, p.head_dim, p.num_rotated_pairs, p.page_size, p.dtype,
                            without_v, num_tokens=tokens, **pages)  # fmt: skip
            yield Item("qkv_norm_rope", _on_grid(made), heads)


def _drafts_inside_vllm(drafter: DrafterConfig, arch: Arch) -> Iterator[Item]:
    """The greedy head, for as many drafts at once as it takes: of a rank's part of the vocabulary, or with centroids of
    all of it. Attention over the model's pages is not here, nor are matrices, which vLLM multiplies.
    """
    hidden = drafter.text.hidden_size
    problem: Any
    if count := drafter.num_centroids:
        kernel, where, most = "centroid_head", "centroid head (drafter)", BATCHES[-1]
        problem = CentroidHead(count, drafter.text.vocab_size // count, drafter.centroid_top_k, hidden, arch.dtype)
    else:
        kernel, where, most = "greedy_head", "greedy token (drafter)", most_tokens(Target.of(arch))
        problem = GreedyHead(drafter.text.vocab_span.size, hidden, arch.dtype, bits=bits_for(hidden, likely=True))
    for batch in BATCHES:
        if batch <= most:
            yield Item(kernel, replace(problem, num_tokens=batch), (Use(where, "draft", batch, 1, 1),))


def _norms_inside_vllm(after_attention: Item, has_ple: bool) -> Iterator[Item]:
    """All of a layer's, in the order in which it runs them. The last layer of a rank has no norm behind it."""
    p = replace(after_attention.problem, residual_dtype=after_attention.problem.dtype)
    uses = after_attention.uses
    ends = tuple(replace(u, where=u.where.replace("residual and norms", "end of layer")) for u in uses)
    yield Item("add_norm", p, uses)
    if has_ple:
        yield Item("add_norm", replace(p, has_next=False), uses)
    yield Item("add_norm", replace(p, has_scalar=True), ends)
    yield Item("add_norm", replace(p, has_scalar=True, has_next=False), tuple(replace(u, count=1) for u in ends))


def _with_sums_inside_vllm(norms: Iterable[Item], model: ModelConfig) -> Iterator[Item]:
    """The same; of a divided model those behind a sum of few tokens only where there is no launch that sums, too. What
    experts end with is summed before; on one rank it is `_ends_inside_vllm`'s unless a part of kerngen.vllm is off.
    """
    ranks = model.world.size
    for item in norms:
        p = item.problem
        ends_with_experts = model.num_experts > 0 and p.has_scalar
        if ranks == 1 and ends_with_experts:
            yield _beside(item)
        elif ranks == 1 or p.num_tokens > most_rows(p.hidden) or ends_with_experts:
            yield item
        else:
            summed = ExchangeNorm(ranks, p.hidden, p.dtype, p.residual_dtype, 0, p.has_scalar, p.has_next, p.num_tokens)
            yield Item("exchange_norm", summed, item.uses)
            yield _beside(item)


def _ends_inside_vllm(item: Item, ranks: int) -> Iterator[Item]:
    """The experts' sum: with the norms behind it on one rank, where no part of kerngen.vllm is off; else alone, since
    what is behind it is vLLM's.
    """
    with_norms = replace(item.problem, residual_dtype=item.problem.dtype)
    alone = replace(item, problem=replace(with_norms, has_norms=False))
    if ranks == 1:
        yield replace(item, problem=with_norms)
        alone = _beside(alone)
    yield alone


def _beside(item: Item) -> Item:
    """The same, asked only where vLLM's configuration wants it."""
    return replace(item, uses=tuple(replace(u, count=0) for u in item.uses))


def _never(kernel: Kernel, problem: Any) -> bool:
    """Of what replaces several kernels: nothing does."""
    return False


def joined(loads: Sequence[Workload]) -> Workload:
    """The first, with the problems of the others that it lacks."""
    have = {(item.kernel, item.problem): item for load in reversed(loads) for item in load.items}
    return loads[0] if len(loads) == 1 else replace(loads[0], items=tuple(have.values()))


@cache
def find_workload(model: str, arch: Arch) -> Workload:
    """The workload of a model given by name or folder."""
    return workload(find_model(model), arch)


# -- the record


@dataclass(slots=True)
class _Notes:
    """Calls by (kernel, problem), in the order of the model, each with the steps that it was met in."""

    step: Step | None = None
    met: dict[tuple[str, Any], dict[tuple[str, Kind], dict[int, int]]] = field(default_factory=dict)
    contexts: dict[Kind, set[int]] = field(default_factory=dict)
    # of this step: a place and a problem, by identity, as often as its layers are alike; and its part of `met`
    again: dict[tuple[int, str], tuple[Any, dict[int, int]]] = field(default_factory=dict)

    def begin(self, step: Step) -> None:
        self.step = step
        self.again.clear()
        self.contexts.setdefault(step.kind, set()).add(step.context)

    def call(self, kernel: str, problem: Any, where: str) -> None:
        self._met(kernel, problem, where, 1)

    def beside(self, kernel: str, problem: Any, where: str) -> None:
        """A call that stands beside the step's own: what sampling asks in place of greedy, or another board of the arch
        where one kernel replaces several.
        """
        self._met(kernel, problem, where, 0)

    def _met(self, kernel: str, problem: Any, where: str, count: int) -> None:
        if (step := self.step) is None:
            raise TypeError("a call was noted before any step began")
        if (known := self.again.get((id(problem), where))) is None:
            use = self.met.setdefault((kernel, _on_grid(problem)), {}).setdefault((where, step.kind), {})
            known = self.again[id(problem), where] = problem, use
        use = known[1]
        use[step.context] = use.get(step.context, 0) + count

    def items(self) -> Iterator[Item]:
        for (kernel, problem), places in self.met.items():
            yield Item(kernel, problem, tuple(self._uses(places)))

    def _uses(self, places: dict[tuple[str, Kind], dict[int, int]]) -> Iterator[Use]:
        for (where, kind), counts in places.items():
            phase, batch, q_len, chunk = kind
            if set(counts) == self.contexts[kind] and len(set(counts.values())) == 1:
                counts = {0: next(iter(counts.values()))}  # whatever the context
            for context, count in sorted(counts.items()):
                yield Use(where, phase, batch, q_len, count, context, chunk)


def _on_grid(problem: Any) -> Any:
    """`problem` at the tuned point that serves it, where its points lie along num_tokens."""
    if problem.DYNAMIC != "num_tokens":
        return problem
    above = next((t for t in TOKENS if t >= problem.num_tokens), problem.num_tokens)
    return problem if above == problem.num_tokens else replace(problem, num_tokens=above)


@cache
def _recorded(
    model: Recorder, fuses: Fuses | None = None
) -> tuple[tuple[Item, ...], tuple[str, ...], tuple[Step, ...]]:
    """The items of one model, what went past the kernels, and the steps. fuses: as in Recorder.record."""
    steps = tuple(_steps(model))
    notes = _Notes()
    for step in steps:
        notes.begin(step)
        model.record(step, notes.call, notes.beside, other=notes.beside, fuses=fuses)
    return tuple(notes.items()), tuple(model.outside), steps


def _steps(model: Recorder) -> Iterator[Step]:
    config, policy = model.config, model.policy
    verified = [1 + count for count in policy.lengths] or VERIFY_LENS
    for batch in BATCHES:
        for q_len in range(1, model.most_drafts + 2):  # single steps, and the verification of every number of drafts
            for context in _contexts(config, batch):
                if q_len in (1, *verified) or (batch in OTHER_VERIFY_BATCHES and context in OTHER_VERIFY_CONTEXTS):
                    yield Step.decode(batch, context) if q_len == 1 else Step.verify(batch, q_len, context)
    chunks = {(t, t) for t in PREFILL_TOKENS}
    for keys in CHUNK_KEYS:
        sizes = {t for t in CHUNK_TOKENS if t < keys} | {min(keys, CHUNK_TOKENS[-1])}
        chunks |= {(t, keys) for t in sizes if t * keys <= MOST_PAIRS}
    yield from (Step.prefill(t, keys) for t, keys in sorted(chunks) if keys <= config.max_positions)
    if model.has_drafter:
        yield from (Step.draft(batch, context) for batch in BATCHES for context in _contexts(config, batch))
    for count in range(2, policy.max_drafts if policy.block else 0):  # of a block that is as ever but for its head
        usual = BATCHES if count in policy.lengths else OTHER_VERIFY_BATCHES
        yield from (Step.draft(batch, OTHER_VERIFY_CONTEXTS[0], count) for batch in usual)


def _contexts(config: ModelConfig, batch: int) -> Iterator[int]:
    most = max(config.max_positions, CONTEXTS[0])
    return (c for c in CONTEXTS if c <= most and c * batch <= MOST_KEYS)
