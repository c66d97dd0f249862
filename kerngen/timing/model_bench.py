"""Times a model's prefill and decode step on generated weights, against the bytes that a step must read."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kerngen.runtime.backend import open_backend
from kerngen.runtime.cache import KVCache
from kerngen.runtime.config import DrafterConfig, ModelConfig
from kerngen.runtime.dflash_config import DflashConfig
from kerngen.runtime.drafters import AnyDrafter
from kerngen.runtime.engine import Engine, Request
from kerngen.runtime.engine.draft_length import FIRST_LENGTH
from kerngen.runtime.engine.graphs import Graphs
from kerngen.runtime.engine.ranks import Ranks
from kerngen.runtime.executors.collectives import Collectives
from kerngen.runtime.executors.layer_dedup import OneOfEachKind
from kerngen.runtime.model import Gemma4
from kerngen.runtime.session import open_divided
from kerngen.templates.common.screen.screen_spec import bits_of, least_bytes
from kerngen.templates.values import KV_FORMATS
from kerngen.workload.forwards import Forwards
from kerngen.workload.generated import generated_model
from kerngen.workload.steps import Step

RUNS = 5


def step_bytes(model: Gemma4, context: int, batch: int = 1) -> tuple[int, int]:
    """(weight bytes, K and V bytes) that one greedy step of `batch` sequences of `context` tokens cannot avoid reading.

    Of the head its codes in few bits where it has them, of seven bits six: but for a few rows no more is read then. Of
    experts those that tokens choose, on average, where each chooses at random.
    """
    config, weights = model.config, model.weights

    screen = model.screen
    if screen is None:
        total = weights.head.num_bytes
    else:
        total = least_bytes(weights.head.out_features, weights.head.in_features, bits_of(screen.codes.shape[2]))
    total += weights.ple.projection.num_bytes if weights.ple is not None else 0
    kv = 0
    for layer, w in zip(config.layers, weights.layers, strict=True):
        total += sum(m.num_bytes for m in (w.qkv, w.out, w.gate_up, w.down))
        if w.moe is not None:
            chosen = 1 - (1 - config.top_k_experts / config.num_experts) ** batch
            total += w.moe.router.num_bytes + round(chosen * (w.moe.gate_up.num_bytes + w.moe.down.num_bytes))
        if w.ple is not None:
            total += w.ple.gate.num_bytes + w.ple.projection.num_bytes
        visible = min(context, layer.window) if layer.window else context
        form = KV_FORMATS[config.kv_format_of(config.layers[layer.kv_source])]
        kv += form.page_bytes(layer.num_kv_heads, visible, layer.head_dim, model.ops.dtype)
    return total, batch * kv


@dataclass(frozen=True, slots=True)
class _Run:
    """prefill_s: until the first token, or until all of a batch decode. step_s: a decode step's, on average.
    tokens_a_step: of one sequence.
    """

    prefill_s: float
    step_s: float
    tokens_a_step: float


def _time_one(engine: Engine, prompts: list[list[int]], most: int, tokens: int) -> _Run:
    stats = engine.generate(prompts[0], max_new_tokens=tokens).stats
    return _Run(stats.prefill_s, stats.decode_s / stats.num_steps, stats.acceptance_length)


def _time_batch(engine: Engine, prompts: list[list[int]], most: int, tokens: int) -> _Run:
    """`tokens` steps of all `prompts` together, each of which may make up to `most` tokens."""
    began = time.perf_counter()
    handles = [engine.submit(Request(prompt, most)) for prompt in prompts]
    try:
        while not all(h.tokens for h in handles):  # the last one's prefill is no decode step's
            engine.step()
        all_run = time.perf_counter()
        made = sum(len(h.tokens) for h in handles)
        for _ in range(tokens):
            engine.step()
        seconds = time.perf_counter() - all_run
        made = sum(len(h.tokens) for h in handles) - made
        if any(h.is_done for h in handles):
            raise AssertionError(f"a sequence ended within {tokens} steps")
    finally:
        for handle in handles:
            engine.cancel(handle)
    return _Run(all_run - began, seconds / tokens, made / tokens / len(prompts))


@torch.inference_mode()
def time_model(
    name: str,
    config: ModelConfig,
    drafter_config: DrafterConfig | DflashConfig | None,
    contexts: list[int],
    *,
    batch: int = 1,
    tokens: int,
    num_draft_tokens: int | None,
    assumed_acceptance: float | None = None,
    prefill_chunk: int,
    backend: str,
    device: str | None,
    db_url: str | None,
    bundle: str | None,
    seed: int,
    tensor_parallel: int = 1,
) -> dict[str, Any]:
    """A report: one row a context, medians over RUNS generations of `tokens` tokens after one that warms up.

    A step's time is the decode's wall time over its steps, host work included. Of a batch of several, prefill ends when
    all of them decode, and `tokens` steps are timed from there. num_draft_tokens: None for as many as are usual.
    assumed_acceptance: see Runner. draft_ms, verify_ms: of a step with drafts, each of its two parts by itself: all
    drafts, and the target's forward with the choice of tokens and what is accepted of them. tensor_parallel: ranks that
    the model is divided among; bytes and floor are then those of the first. Raises as open_backend and open_divided do.
    """
    began = time.perf_counter()
    opens = partial(_opened, name, config, drafter_config, backend, db_url, bundle, seed)
    if tensor_parallel == 1:
        opened = opens(None, device, None)
    else:
        opened = open_divided(tensor_parallel, config, opens, device, backend=backend)
    model, drafter, ops = opened.model, opened.drafter, opened.model.ops
    built = time.perf_counter() - began
    read_gbps, board = 0.0, "cpu"
    if ops.device.type == "cuda":
        from kerngen.runtime.launcher import probe_device
        from kerngen.timing.measure import ceilings

        read_gbps, board = ceilings().read_gbps, probe_device().name
    count = num_draft_tokens or usual_drafts(drafter)
    rows = []
    generator = torch.Generator().manual_seed(seed)
    for context in contexts:
        prompts = torch.randint(0, config.vocab_size, (batch, context), generator=generator).tolist()
        # The first may decode while the last is prefilled; a step with drafts makes several tokens.
        before = batch * (1 + -(-context // prefill_chunk))
        most = tokens if batch == 1 else (tokens + before) * (1 + count)
        engine = Engine(model, drafter, max_len=context + most, max_batch=batch, num_draft_tokens=count,
                        prefill_chunk=prefill_chunk, max_stall=None, prefix_caching=False,
                        ranks=opened.ranks)  # fmt: skip
        engine.runner.assumed_acceptance = assumed_acceptance
        if opened.ranks is not None:
            engine.make_ready()  # by all cores, on all ranks at once
        time_once = _time_one if batch == 1 else _time_batch
        time_once(engine, prompts, most, tokens)  # compiles, captures
        runs = [time_once(engine, prompts, most, tokens) for _ in range(RUNS)]
        steps = [1e3 * r.step_s for r in runs]
        weight_bytes, kv_bytes = step_bytes(model, context, batch)
        rows.append(
            {
                "context": context, "batch": batch, "runs": RUNS, "tokens": tokens,
                "prefill_ms": 1e3 * statistics.median(r.prefill_s for r in runs),
                "step_ms": statistics.median(steps), "step_ms_min": min(steps), "step_ms_max": max(steps),
                "acceptance_length": statistics.median(r.tokens_a_step for r in runs),
                "step_bytes": weight_bytes + kv_bytes,
                "density": engine.load.density,
                **_parts(model, drafter, batch, context, count, engine.runner.captures(batch * (count + 1))),
                "floor_ms": (weight_bytes + kv_bytes) / read_gbps / 1e6 if read_gbps else 0.0,
            }
        )  # fmt: skip
        del engine
    return {
        "model": name, "tensor_parallel": tensor_parallel, "device": board, "backend": ops.name,
        "dtype": str(ops.dtype).removeprefix("torch."), "num_draft_tokens": count,
        "assumed_acceptance": assumed_acceptance,
        "draft_weights": None if drafter_config is None else drafter_config.weights,
        "kv_format": config.kv_format, "kv_is_shared": config.kv_is_shared,
        "build_s": built, "weight_gb": step_bytes(model, 0)[0] / 1e9, "read_gbps": read_gbps,
        "rows": rows, "configurations": ops.sources(), "outside": ops.outside(), "kernels": _resolved(ops),
    }  # fmt: skip


def usual_drafts(drafter: AnyDrafter | None) -> int:
    """That a step verifies where nobody says: of a drafter that makes all at once all of them."""
    if drafter is None:
        return 0
    return drafter.policy.max_drafts if drafter.policy.block else FIRST_LENGTH


def _parts(
    model: Gemma4, drafter: AnyDrafter | None, batch: int, context: int, count: int, captured: bool
) -> dict[str, float]:
    """draft_ms and verify_ms of a step with `count` drafts, each part by itself; nothing without a drafter, where
    memory is short, and of a divided model, whose ranks run whole steps together. captured: such a step is a graph.
    """
    if drafter is None or model.config.world.size > 1:
        return {}
    own = drafter.policy.cache_layers
    longest = context + max(drafter.policy.block, count + 1)

    def cache_of(step: Step) -> KVCache:
        kept = model.config.window + count + 1
        return KVCache.whole(model.config, model.ops, batch=batch, max_len=longest, last=kept, drafter_layers=own)

    forwards = Forwards(model, drafter, cache_of)
    times = 1 if drafter.policy.block else count  # forwards of the drafter in a step
    draft = Step.draft(batch, longest, count if drafter.policy.block else 1)
    parts = {"draft_ms": (times, draft), "verify_ms": (1, Step.verify(batch, count + 1, longest))}
    try:
        return {
            name: times * _ms_of(model, drafter, forwards.prepare(step)[0], captured)
            for name, (times, step) in parts.items()
        }
    except torch.OutOfMemoryError:  # beside the engine's own cache
        return {}


def _ms_of(model: Gemma4, drafter: AnyDrafter, part: Callable[[], Tensor], captured: bool) -> float:
    """The median of RUNS runs. captured: as a graph."""
    if captured:
        graph, _ = Graphs(OneOfEachKind(model, drafter)).capture(part, ())
        run: Callable[[], object] = graph.replay
    else:
        run = part
    found = []
    for _ in range(RUNS + 1):
        _wait(model)
        began = time.perf_counter()
        run()
        _wait(model)
        found.append(1e3 * (time.perf_counter() - began))
    return statistics.median(found[1:])


def _wait(model: Gemma4) -> None:
    if model.ops.device.type == "cuda":
        torch.cuda.synchronize(model.ops.device)


@dataclass(slots=True, weakref_slot=True)
class _Opened:
    """What is timed, on one rank."""

    model: Gemma4
    drafter: AnyDrafter | None
    ranks: Ranks | None = None


def _opened(
    name: str, config: ModelConfig, drafter: DrafterConfig | DflashConfig | None, backend: str, db_url: str | None,
    bundle: str | None, seed: int, collectives: Collectives | None, device: str | None, advance: Any,
) -> _Opened:  # fmt: skip
    ops = open_backend(backend, device=device, db_url=db_url, bundle=bundle, collectives=collectives)
    mine = config.divided(ops.collectives.world)
    return _Opened(*generated_model(name, mine, None if drafter is None else drafter.divided(mine), ops, seed))


def _resolved(ops: Any) -> list[str]:
    """Which configuration each kernel ran and who chose it, one line each; empty for the torch backend."""
    from kerngen.templates.kernel import describe

    launcher = getattr(getattr(ops, "executor", None), "launcher", None)
    if launcher is None:
        return []
    return sorted(f"{n}{describe(p)} {describe(f.config)} from {f.source}" for n, p, f in launcher.functions)
