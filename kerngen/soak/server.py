"""Minutes of load with all that clients do wrong, and what must not come of it.

Some requests are read to their end, some are left in the middle, some are read slowly, some are none, some break off
before their body has come. Now and then one is asked again that was answered alone before all began. A fault is an
error that no client caused, an answer that does not come or is another, memory that grows, and what the server says is
still at work when nobody waits any more.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from kerngen.loadgen.asking import Asked, Shape, first_model, follow, prepared
from kerngen.loadgen.http import Server, ServerGone, why
from kerngen.loadgen.metrics import read_metrics
from kerngen.loadgen.processes import gpu_mb, processes_of, resident_mb
from kerngen.soak.faults import Faults, growth, parts_at

WAYS = (("read", 0.5), ("compared", 0.15), ("left", 0.15), ("slow", 0.05), ("bad", 0.1), ("broken off", 0.05))
SLOW_BYTES, SLOW_PAUSE_S = 512, 0.05  # of an answer that is read slowly, between two pauses
SLOW_SPARES = 5  # a slow answer may take so many times as long as others
MOST_SAMPLES = 40
IDLE = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
BAD = (
    b"{", b"[]", b'{"prompt": [], "max_tokens": 4}', b'{"prompt": "a", "max_tokens": 0}',
    b'{"prompt": [-1]}', b'{"prompt": "a", "temperature": "hot"}', b'{"prompt": "a", "max_tokens": 1000000000}',
    b'{"model": "no such model", "prompt": "a"}', b'{"prompt": "a", "guided_regex": "("}',
)  # fmt: skip
Say = Callable[[float, str], None]


@dataclass(frozen=True, slots=True)
class Settings:
    """concurrency: requests at work at once. reference: requests whose answers are compared. is_exact: an answer that
    is another than alone is a fault; else they are counted. max_growth_mb: of memory, in the second half. memory:
    whether the processes are to be watched, which must be on this machine then.
    """

    seconds: float
    shape: Shape
    concurrency: int
    reference: int = 8
    is_exact: bool = True
    max_growth_mb: float = 64.0
    timeout_s: float = 120.0
    memory: bool = True
    model: str | None = None


@dataclass(slots=True)
class Soak:
    """What came of it. counts: requests, by what became of them. parted: of each answer that is another than alone, how
    much of that one, in characters, is the same. memory: (seconds, MB of the processes, MB of GPUs).
    """

    settings: Settings
    counts: Counter[str] = field(default_factory=Counter)
    faults: Faults = field(default_factory=Faults)
    num_tokens: int = 0
    equal: int = 0
    parted: list[float] = field(default_factory=list)
    memory: list[tuple[float, dict[int, float], float | None]] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        last = self.memory[-1] if self.memory else (0.0, {}, None)
        return {
            "seconds": self.settings.seconds, "counts": dict(self.counts), "tokens": self.num_tokens,
            "equal": self.equal, "different": len(self.parted), "parted_after": self.parted_after(),
            "growth_mb": self.growth(),
            "memory": [{"at_s": at, "host_mb": sum(host.values()), "gpu_mb": gpu} for at, host, gpu in self.memory],
            "processes": list(last[1]), "faults": self.faults.shown, "num_faults": self.faults.count,
        }  # fmt: skip

    def parted_after(self) -> dict[str, float]:
        """The least, the median and the most of `parted`; {} where no answer differed. Rounding tells sooner or later,
        by chance; answers that all part at their first token were computed from something else.
        """
        if not self.parted:
            return {}
        return {"least": min(self.parted), "median": median(self.parted), "most": max(self.parted)}

    def growth(self) -> dict[str, float]:
        """By what holds it: each process, and all GPUs."""
        return growth([
            {f"process {pid}": mb for pid, mb in host.items()} | ({} if gpu is None else {"GPU": gpu})
            for _, host, gpu in self.memory
        ])  # fmt: skip


async def soak(server: Server, settings: Settings, say: Say) -> Soak:
    """Raises ServerGone where there is no server to begin with, UsageError where it answers nothing."""
    await server.ask("GET", "/health")
    model = settings.model or await first_model(server)
    run = _Run(server, model, settings, say)
    await run.all()
    return run.found


class _Run:
    def __init__(self, server: Server, model: str, settings: Settings, say: Say) -> None:
        self._server, self._model, self._settings, self._say = server, model, settings, say
        self.found = Soak(settings)
        self._draw = random.Random(f"{settings.shape.seed} soak")
        self._number = settings.reference
        self._alone: list[tuple[Asked, str]] = []
        self._began = time.monotonic()

    async def all(self) -> None:
        await self._ask_alone()
        pids = processes_of(self._server.port) if self._settings.memory else []
        if self._settings.memory and not pids:
            self.found.faults.add("no process of this user listens on the server's port: its memory was not watched "
                             "(--no-memory, where it runs elsewhere)")  # fmt: skip
        self._began = time.monotonic()
        watching = asyncio.ensure_future(self._watch(pids))
        try:
            await asyncio.gather(*(self._client() for _ in range(self._settings.concurrency)))
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        self._sample(pids)
        await self._see_idle()
        if len(resident_mb(pids)) < len(pids):
            self.found.faults.add("a process of the server has ended")
        for what, mb in self.found.growth().items():
            if mb > self._settings.max_growth_mb:
                self.found.faults.add(f"memory of {what} grew by {mb:.0f} MB after the warm-up, more than "
                                 f"{self._settings.max_growth_mb:g}")  # fmt: skip

    # -- clients

    async def _ask_alone(self) -> None:
        shape = replace(self._settings.shape, temperature=0.0)
        for i, asked in enumerate(await prepared(self._server, self._model, shape, range(self._settings.reference))):
            self._say(0, f"{i} of {self._settings.reference} asked alone")
            outcome = await follow(self._server, asked, self._settings.timeout_s)
            if outcome.error:
                self.found.faults.add(f"asked alone: {outcome.error}")
            else:
                self._alone.append((asked, outcome.text))

    async def _client(self) -> None:
        """One after the other, until time is up."""
        names, weights = zip(*WAYS, strict=True)
        ways = {"read": self._read, "compared": self._compare, "left": self._leave, "slow": self._read_slowly,
                "bad": self._ask_badly, "broken off": self._break_off}  # fmt: skip
        while (elapsed := time.monotonic() - self._began) < self._settings.seconds:
            (name,) = self._draw.choices(names, weights)
            self._say(elapsed, f"{self.found.counts.total()} requests, {self.found.num_tokens} tokens, "
                               f"{self.found.faults.count} faults")  # fmt: skip
            try:
                await ways[name]()
            except TimeoutError:
                self.found.faults.add(f"{name}: not done within {self._settings.timeout_s:g} s")
            except ServerGone as e:
                self.found.faults.add(f"{name}: {e.message}")
                await asyncio.sleep(0.1)  # where nobody listens any more
            self.found.counts[name] += 1

    async def _next(self) -> Asked:
        self._number += 1
        (asked,) = await prepared(self._server, self._model, self._settings.shape, [self._number])
        return asked

    async def _read(self) -> None:
        outcome = await follow(self._server, await self._next(), self._settings.timeout_s)
        self.found.num_tokens += outcome.num_tokens
        if outcome.error:
            self.found.faults.add(f"read: {outcome.error}")

    async def _compare(self) -> None:
        if not self._alone:
            return
        asked, alone = self._draw.choice(self._alone)
        outcome = await follow(self._server, asked, self._settings.timeout_s)
        self.found.num_tokens += outcome.num_tokens
        if outcome.error:
            self.found.faults.add(f"compared: {outcome.error}")
            return
        if (same := parts_at(outcome.text, alone)) is None:
            self.found.equal += 1
            return
        self.found.parted.append(same / max(len(alone), 1))
        if self._settings.is_exact:
            self.found.faults.add(f"compared: an answer is another than alone, from character {same} on")

    async def _leave(self) -> None:
        after = self._draw.randint(1, max(self._settings.shape.answer_tokens // 2, 1))
        asked = await self._next()
        outcome = await follow(self._server, asked, self._settings.timeout_s, lambda chunks: chunks >= after)
        if outcome.error:
            self.found.faults.add(f"left: {outcome.error}")

    async def _read_slowly(self) -> None:
        asked = await self._next()
        async with asyncio.timeout(SLOW_SPARES * self._settings.timeout_s):
            answer = await self._server.open("POST", asked.path, asked.body, receive_bytes=4096)
            try:
                said = b""
                async for data in answer.data(SLOW_BYTES):
                    said = (said + data)[-64:]
                    is_late = time.monotonic() - self._began > self._settings.seconds
                    await asyncio.sleep(0 if is_late else SLOW_PAUSE_S)  # what is left is read at once then
            finally:
                answer.leave()
        if answer.status != 200 or b"[DONE]" not in said:
            self.found.faults.add(f"slow: HTTP {answer.status}, ending in {said[-32:]!r}")

    async def _ask_badly(self) -> None:
        body = self._draw.choice(BAD)
        async with asyncio.timeout(self._settings.timeout_s):
            status, said = await self._server.ask("POST", "/v1/completions", body)
        if not 400 <= status < 500 or status == 429:
            self.found.faults.add(f"bad: {body[:60]!r} was answered by HTTP {status}: {said[:80]!r}")

    async def _break_off(self) -> None:
        """Half a request, and its end."""
        body = json.dumps((await self._next()).body).encode()
        try:
            _, writer = await asyncio.open_connection(self._server.host, self._server.port)
        except OSError as e:
            raise ServerGone(f"{self._server}: {why(e)}") from e
        try:
            head = f"POST {self._server.path}/v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body[: self._draw.randrange(len(body))])
            await writer.drain()
            await asyncio.sleep(0.05)
        except OSError:
            pass  # it was refused before its end: a key is missing, say
        finally:
            writer.transport.abort()

    # -- the server

    async def _watch(self, pids: Sequence[int]) -> None:
        while True:
            self._sample(pids)
            await asyncio.sleep(max(self._settings.seconds / MOST_SAMPLES, 0.25))

    def _sample(self, pids: Sequence[int]) -> None:
        if pids:
            self.found.memory.append((time.monotonic() - self._began, resident_mb(list(pids)), gpu_mb(list(pids))))

    async def _see_idle(self) -> None:
        """Nobody waits any more: nothing is at work, and no page is held."""
        left: dict[str, float] = {}
        end = time.monotonic() + self._settings.timeout_s
        while time.monotonic() < end:
            try:
                status, _ = await self._server.ask("GET", "/health")
                found = await read_metrics(self._server)
            except ServerGone as e:
                self.found.faults.add(f"after the load: {e.message}")
                return
            if status != 200:
                self.found.faults.add(f"/health: HTTP {status} after the load")
                return
            left = {name: found[name] for name in IDLE if found.get(name)}
            if not left:
                if not any(name in found for name in IDLE):
                    self.found.faults.add("/metrics says nothing of what is at work")
                return
            await asyncio.sleep(0.2)
        self.found.faults.add(f"nobody waits any more, and there is still {left}")
