"""What a model asks of the kernels: every (kernel, problem) of its decode, verification, prefill and drafting steps.

A workload is a record: the model's own code runs over the grid below on tensors without storage, and the recording
executor writes down each call. Released models are folders of configurations in runtime/released; any other folder
with a config.json will do. Token counts lie on the grid; between two points the runtime uses the tuned point above,
beyond the last it uses the default.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kerngen.arch import Arch, Target
from kerngen.errors import UnknownName, UsageError
from kerngen.runtime.config import DrafterConfig, ModelConfig, read_drafter_config, read_model_config
from kerngen.templates import find_kernel

if TYPE_CHECKING:
    from kerngen.runtime.cache import KVCache
    from kerngen.runtime.drafting import Drafter
    from kerngen.runtime.model import Gemma4

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
RELEASED = Path(__file__).parent / "runtime" / "released"
MODELS = tuple(sorted(p.name for p in RELEASED.iterdir() if (p / "config.json").is_file()))

_Kind = tuple[str, int, int, int]  # of a step, whatever its context: phase, batch, q_len, chunk


@dataclass(frozen=True, slots=True)
class Use:
    """Where in the model a problem occurs. phase: decode, verify, prefill or draft. count: launches in one step.

    batch, q_len (tokens a sequence; 0 in prefill), chunk (tokens of a prefill's; else 0), context (keys of a sequence,
    its chunk's own included): the step for which `count` holds; context 0 means any.
    """

    where: str
    phase: str
    batch: int
    q_len: int
    count: int
    context: int = 0
    chunk: int = 0


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

    missing: what the model computes that no kernel of ours serves, by its name in `runtime.ops.outside.OUTSIDE`.
    """

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
        return replace(self, items=tuple(i for i in self.items if i.kernel in wanted))

    def step(
        self, phase: str, batch: int, context: int, q_len: int = 1, *, chunk: int = 0
    ) -> Iterator[tuple[Item, int]]:
        """(item, launches) of a step; the least recorded context that is no shorter stands for it, or the longest.

        chunk: tokens of a prefill's, which has no q_len; another size of chunk is another step.
        """
        wanted = (phase, batch, 0 if chunk else q_len, chunk)
        here = [(i, u) for i in self.items for u in i.uses if _kind(u) == wanted and u.count]
        recorded = {u.context for _, u in here}
        stands = min((c for c in recorded if c >= context), default=max(recorded, default=0))
        for item in self.items:
            count = sum(u.count for i, u in here if i is item and u.context in (0, stands))
            if count:
                yield item, count


def _kind(use: Use) -> _Kind:
    return use.phase, use.batch, use.q_len, use.chunk


@dataclass(frozen=True, slots=True)
class Model:
    """A target with the drafter that goes with it, if any."""

    name: str
    target: ModelConfig
    drafter: DrafterConfig | None


def find_model(name: str, drafter: str | None = None) -> Model:
    """A released model by name, or the one in a Hugging Face folder, whose config.json is read and checked.

    drafter: folder of the assistant that goes with a folder. Raises UnknownName, CheckpointError or UsageError.
    """
    if name in MODELS:
        if drafter is not None:
            raise UsageError(f"{name} is a released model, with a drafter of its own: --draft goes with a folder")
        target = read_model_config(RELEASED / name)
        return Model(name, target, read_drafter_config(RELEASED / name / "assistant", target))
    folder = Path(name)
    if not folder.exists() and "/" not in name:
        raise UnknownName("model", name, [*MODELS, "or a model folder"])
    target = read_model_config(folder)
    return Model(name, target, read_drafter_config(Path(drafter), target) if drafter else None)


def workload(model: Model, arch: Arch) -> Workload:
    """Every problem that `model` needs on `arch`, in its dtype (fp16 on sm70 and sm75, else bf16), each once."""
    items, missing = _recorded(model.target, model.drafter, arch.dtype, arch if arch.has_tma else None)
    return Workload(model.name, arch.name, items, missing)


@cache
def find_workload(model: str, arch: Arch) -> Workload:
    """The workload of a model given by name or folder."""
    return workload(find_model(model), arch)


# -- the record


@dataclass(slots=True)
class _Notes:
    """Calls by (kernel, problem), in the order of the model, each with the steps that it was met in."""

    now: _Kind = ("", 0, 0, 0)
    context: int = 0
    counts: bool = True  # False where the calls stand beside the step's own: what sampling asks in place of greedy
    met: dict[tuple[str, Any], dict[tuple[str, _Kind], dict[int, int]]] = field(default_factory=dict)
    contexts: dict[_Kind, set[int]] = field(default_factory=dict)
    outside: dict[str, None] = field(default_factory=dict)

    def step(self, phase: str, batch: int, q_len: int, context: int, chunk: int = 0) -> None:
        self.now, self.context = (phase, batch, q_len, chunk), context
        self.contexts.setdefault(self.now, set()).add(context)

    def call(self, kernel: str, problem: Any, where: str) -> None:
        use = self.met.setdefault((kernel, _on_grid(problem)), {}).setdefault((where, self.now), {})
        use[self.context] = use.get(self.context, 0) + self.counts

    def unserved(self, name: str) -> None:
        self.outside[name] = None

    def items(self) -> Iterator[Item]:
        for (kernel, problem), places in self.met.items():
            yield Item(kernel, problem, tuple(self._uses(places)))

    def _uses(self, places: dict[tuple[str, _Kind], dict[int, int]]) -> Iterator[Use]:
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
    target: ModelConfig, drafter_config: DrafterConfig | None, dtype: str, arch: Arch | None
) -> tuple[tuple[Item, ...], tuple[str, ...]]:
    """The items, and what went past the kernels, of one model in one dtype. arch: None for all without bulk copies,
    which ask for the same.
    """
    import torch

    from kerngen.runtime.cache import KVCache
    from kerngen.runtime.drafting import Drafter
    from kerngen.runtime.executors.record import Record
    from kerngen.runtime.model import Gemma4
    from kerngen.runtime.ops.kernels import KernelOps
    from kerngen.runtime.weights.synthetic import synthetic_drafter, synthetic_model
    from kerngen.templates.common.row_torch import TORCH_DTYPE

    notes = _Notes()
    with torch.inference_mode():
        record = Record(notes.call, notes.unserved, None if arch is None else Target.of(arch))
        ops = KernelOps(record, TORCH_DTYPE[dtype])
        model = Gemma4(target, synthetic_model(target, ops), ops)
        drafter = None
        if drafter_config is not None:
            drafter = Drafter(drafter_config, synthetic_drafter(drafter_config, ops), model)
        pool = KVCache.whole(target, ops, batch=1, max_len=1)  # of which problems show the tables alone
        _record_decode(notes, model, pool)
        _record_prefill(notes, model, pool)
        if drafter is not None:
            _record_drafts(notes, model, drafter, pool)
    return tuple(notes.items()), tuple(notes.outside)


def _contexts(config: ModelConfig, batch: int) -> Iterator[int]:
    most = max(config.max_positions, CONTEXTS[0])
    return (c for c in CONTEXTS if c <= most and c * batch <= MOST_KEYS)


def _cache(pool: KVCache, batch: int, max_len: int) -> KVCache:
    """As KVCache.whole, of the pages of `pool`."""
    import torch

    pages = -(-max_len // pool.page_size)
    return pool.with_tables(torch.empty(2, batch, pages, dtype=torch.int32, device=pool.tables.device))


def _record_decode(notes: _Notes, model: Gemma4, pool: KVCache) -> None:
    """Single steps, and the verification of every number of drafts that is permitted."""
    import torch

    from kerngen.runtime.batch import Batch

    config, ops = model.config, model.ops
    for batch in BATCHES:
        for q_len in range(1, ops.max_decode_len + 1):
            usual = q_len in (1, *VERIFY_LENS)
            for context in _contexts(config, batch):
                if not usual and (batch not in OTHER_VERIFY_BATCHES or context not in OTHER_VERIFY_CONTEXTS):
                    continue
                notes.step("decode" if q_len == 1 else "verify", batch, q_len, context)
                cache = _cache(pool, batch, context)
                ids = torch.empty(batch, q_len, dtype=torch.int64, device=ops.device)
                lengths = torch.empty(batch, dtype=torch.int64, device=ops.device)
                states = model.forward(Batch.decode(ids, lengths, cache, context, ops), cache)
                tokens = model.greedy(states).view(batch, q_len)
                drafts = torch.empty(batch, q_len - 1, dtype=torch.int64, device=ops.device)
                token, limits = torch.empty_like(lengths), torch.empty_like(lengths)
                ops.decode_advance(tokens, drafts, states, token, lengths, limits, states[:batch])
                notes.counts = False
                model.logits(states)
                ops.greedy(states, model.weights.head, config.logit_cap)  # where there is no room for a screen
                notes.counts = True


def _record_prefill(notes: _Notes, model: Gemma4, pool: KVCache) -> None:
    """Chunks of one sequence: a whole prompt, or what follows keys that are in the cache already."""
    import torch

    from kerngen.runtime.batch import Batch

    config, ops = model.config, model.ops
    chunks = {(t, t) for t in PREFILL_TOKENS}
    for keys in CHUNK_KEYS:
        sizes = {t for t in CHUNK_TOKENS if t < keys} | {min(keys, CHUNK_TOKENS[-1])}
        chunks |= {(t, keys) for t in sizes if t * keys <= MOST_PAIRS}
    for tokens, keys in sorted(c for c in chunks if c[1] <= config.max_positions):
        notes.step("prefill", 1, 0, keys, tokens)
        cache = _cache(pool, 1, keys)
        ids = torch.empty(tokens, dtype=torch.int64, device=ops.device)
        model.forward(Batch.prefill(ids, keys - tokens, cache), cache, outputs="last")


def _record_drafts(notes: _Notes, model: Gemma4, drafter: Drafter, pool: KVCache) -> None:
    import torch

    ops = model.ops
    for batch in BATCHES:
        for context in _contexts(model.config, batch):
            notes.step("draft", batch, 1, context)
            cache = _cache(pool, batch, context)
            ids = torch.empty(batch, dtype=torch.int64, device=ops.device)
            hidden = torch.empty(batch, model.config.hidden_size, dtype=ops.dtype, device=ops.device)
            y = drafter.step(ids, hidden, ids, cache, context)[0]
            drafter.greedy(y)
            if drafter.weights.centroids is None:
                notes.counts = False
                ops.greedy(y, drafter.weights.head, 0.0)
                notes.counts = True
