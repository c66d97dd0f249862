"""Runs of load: when requests come, and how many are at work at once."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kerngen.errors import UsageError
from kerngen.loadgen.asking import Asked, Outcome, Shape, first_model, follow, prepared
from kerngen.loadgen.figures import figures
from kerngen.loadgen.http import Server
from kerngen.loadgen.metrics import drafting, read_metrics

WARM_CHUNKS = 48  # from when all of the warm-up's answers have begun until the last is left
MOST_WARM_CHUNKS = 512  # after which none waits for the others: a server may not take as many at once
Say = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """concurrency: requests at work at once, None for any number. requests: of a run, the most; seconds: in which they
    come, where they come at a rate. warmup: requests before the first run, which are left early.
    """

    shape: Shape
    concurrency: int | None
    requests: int
    seconds: float
    warmup: int
    timeout_s: float
    model: str | None = None


def delays(rate: float | None, count: int, seed: int) -> list[float]:
    """When each of `count` requests comes, in seconds: of a Poisson process at `rate` a second, stretched so that the
    last comes at count / rate, as vLLM's bench does; all at once where rate is None.
    """
    if rate is None:
        return [0.0] * count
    draw = random.Random(f"{seed} arrivals")
    at, found = 0.0, []
    for _ in range(count):
        at += draw.expovariate(rate)
        found.append(at)
    return [t * count / rate / at for t in found]


async def runs(
    server: Server, plan: Plan, rates: Sequence[float | None], sweep: int, say: Say
) -> AsyncGenerator[dict[str, Any], None]:
    """What each of `rates` came to, in order; None: all at once. sweep: in their place as many rates as it says, evenly
    below what all at once came to, after that. Raises ServerGone, UsageError.
    """
    model = plan.model or await first_model(server)
    await _probe(server, model, plan)
    await _warm(server, model, plan, say)
    first = plan.warmup + 1
    left: list[float | None] = [None] if sweep else list(rates)
    while left:
        rate = left.pop(0)
        count = plan.requests if rate is None else min(plan.requests, max(math.ceil(rate * plan.seconds), 1))
        row = await _run(server, model, plan, rate, range(first, first + count), say)
        first += count
        if sweep and rate is None:
            if not row["completed"]:
                raise UsageError(f"no request was answered: {', '.join(row['errors'])}")
            left = [row["requests_per_s"] * (i + 1) / (sweep + 1) for i in range(sweep)]
        yield row


async def _probe(server: Server, model: str, plan: Plan) -> None:
    """One request, alone: a server that answers none is no server to time."""
    (asked,) = await prepared(server, model, plan.shape, [0])
    outcome = await follow(server, asked, plan.timeout_s, leaves=lambda chunks: chunks >= 2)
    if outcome.error:
        raise UsageError(f"the first request was not answered: {outcome.error}",
                         hint="--vocab, --prompt-tokens, --answer-tokens and --image say what is asked")  # fmt: skip


async def _warm(server: Server, model: str, plan: Plan, say: Say) -> None:
    """Requests that leave one after the other, once all are answered, so that batches of all sizes were run before any
    is timed.
    """
    if not plan.warmup:
        return
    say(0, plan.warmup, "warm-up")
    asked = await prepared(server, model, plan.shape, range(1, plan.warmup + 1))
    step = WARM_CHUNKS / plan.warmup
    waiting = set(range(plan.warmup))  # for their first token

    async def one(i: int, request: Asked) -> None:
        had = None  # chunks, when all were answered

        def leaves(chunks: int) -> bool:
            nonlocal had
            waiting.discard(i)
            if had is None and (not waiting or chunks >= MOST_WARM_CHUNKS):
                had = chunks
            return had is not None and chunks > had + i * step

        await follow(server, request, plan.timeout_s, leaves)
        waiting.discard(i)

    await asyncio.gather(*(one(i, request) for i, request in enumerate(asked)))


async def _run(
    server: Server, model: str, plan: Plan, rate: float | None, numbers: Sequence[int], say: Say
) -> dict[str, Any]:
    text = "all at once" if rate is None else f"{rate:.3g} a second"
    say(0, len(numbers), text)
    asked = await prepared(server, model, plan.shape, numbers)
    room = asyncio.Semaphore(plan.concurrency or len(asked))
    outcomes: list[Outcome] = []

    async def one(request: Asked) -> None:
        async with room:
            outcomes.append(await follow(server, request, plan.timeout_s))
        say(len(outcomes), len(asked), text)

    before, began = await read_metrics(server), time.perf_counter()
    tasks = []
    for request, at in zip(asked, delays(rate, len(asked), plan.shape.seed), strict=True):
        if (wait := began + at - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        tasks.append(asyncio.ensure_future(one(request)))
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    seconds = time.perf_counter() - began
    drafted = drafting(before, await read_metrics(server))
    head = {"rate": rate, "concurrency": plan.concurrency, "requests": len(asked)}
    return head | figures(outcomes, seconds) | {"drafting": drafted}
