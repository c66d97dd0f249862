"""A server whose model takes a fixed time a step and no processor: what is left is the host's part.

    python tests/host/paced.py 80

puts so many streams on it, and prints what each process takes of a core for an event and for a step.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from kerngen.loadgen.asking import Shape, follow, prepared
from kerngen.loadgen.http import Server, ServerGone
from kerngen.runtime.engine import Engine
from kerngen.runtime.engine.plan import StepPlan
from kerngen.runtime.engine.runner import Result, Runner, StepOutput, Wait
from kerngen.runtime.session import Session, load

TINY = Path(__file__).parents[2] / "examples" / "tiny" / "gemma-4-tiny-w4a16"
STEP_S = 0.02  # of a decode step
CHUNK_S, TOKEN_S = 0.004, 85e-6  # of a prefill, and of each of its tokens


class PacedRunner(Runner):
    """Says random tokens, as late as a GPU would that does one thing after the other."""

    _free_at = 0.0

    def _takes(self, seconds: float, rows: int) -> Wait:
        self._free_at = ends = max(self._free_at, time.perf_counter()) + seconds
        tokens = [[random.randrange(300, 1000)] for _ in range(rows)]

        def wait() -> Result:
            if (left := ends - time.perf_counter()) > 0:
                time.sleep(left)
            return Result(tokens, [True] * rows, seconds)

        return Wait(wait, lambda: ends <= time.perf_counter())

    def run(self, plan: StepPlan) -> StepOutput:
        self.update(plan.update)
        decoded, rows = None, plan.num_running if plan.decode is not None else 0
        seconds = STEP_S
        if plan.chunks:
            count = rows + sum(len(c.tokens) for c in plan.chunks)
            seconds = CHUNK_S + TOKEN_S * count
        if rows:
            decoded = self._takes(seconds, rows)
        if not (done := [c for c in plan.chunks if c.new_row is not None]) and rows:
            return StepOutput(decoded)
        first = self._takes(0.0 if rows else seconds, len(done))
        if not rows:
            self._prefills.append((count, self._free_at - seconds, self._free_at))
        if done:
            self.join(plan.num_running, done)
        return StepOutput(decoded, first if done else None)


class PacedSession(Session):
    def reserve(self, length: int, batch: int = 1) -> Engine:
        engine = Engine(self.model, max_len=length, max_batch=batch, async_depth=1, num_draft_tokens=0)
        engine.runner.__class__ = PacedRunner
        return engine


@torch.inference_mode()
def paced_session(folder: str, **others: Any) -> Session:
    session = load(folder, draft=False, backend="torch")
    return PacedSession(**{f.name: getattr(session, f.name) for f in fields(session) if f.init})


def _server(port: int) -> None:
    from kerngen.runtime.serve.server import Settings, run

    settings = Settings({"folder": str(TINY)}, port=port, context=2048, max_batch=128, opens=paced_session)
    sys.exit(run(settings, say=lambda line: print(line, file=sys.stderr, flush=True)))


def cpu_s(pid: int) -> float:
    """Seconds of a processor that `pid` has had, its threads' included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def _load(streams: int, answer: int, port: int, pids: Sequence[int], way: str) -> None:
    server = Server("127.0.0.1", port)
    asked = await prepared(server, "gemma-4-tiny-w4a16", Shape(64, answer, vocab_size=1000, way=way), range(streams))
    before, began, mine = [cpu_s(p) for p in pids], time.perf_counter(), time.process_time()
    outcomes = await asyncio.gather(*(follow(server, one, 600) for one in asked))
    seconds = time.perf_counter() - began
    assert not any(o.error for o in outcomes), outcomes[0].error
    took = [cpu_s(p) - b for p, b in zip(pids, before, strict=True)]
    tokens, chunks = sum(o.num_tokens for o in outcomes), sum(len(o.at) for o in outcomes)
    print(f"{streams} streams, {way}: {tokens} tokens in {chunks} events, {chunks / seconds:.0f} events/s, "
          f"the client {1e6 * (time.process_time() - mine) / chunks:.0f} us of a core an event")  # fmt: skip
    print(
        f"  HTTP process: {1e6 * took[0] / tokens:.0f} us of a core a token, so {tokens / took[0]:.0f} tokens/s at most"
    )
    print(f"  engine process: {1e3 * took[1] / answer:.2f} ms of a core a step of {1e3 * STEP_S:.0f} ms")


def main() -> None:
    streams, answer = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 400
    port = random.randrange(20000, 30000)
    process = multiprocessing.get_context("spawn").Process(target=_server, args=(port,))
    process.start()
    server = Server("127.0.0.1", port)

    async def ready() -> None:
        while process.is_alive():
            try:
                await server.ask("GET", "/health")
                return
            except ServerGone:
                await asyncio.sleep(0.2)

    try:
        asyncio.run(ready())
        assert process.pid is not None
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        (engine,) = [int(c) for c in children if b"spawn_main" in Path(f"/proc/{c}/cmdline").read_bytes()]
        for way in ("ids", "chat"):
            asyncio.run(_load(streams, answer, port, (process.pid, engine), way))
    finally:
        process.terminate()
        process.join()


if __name__ == "__main__":
    main()
