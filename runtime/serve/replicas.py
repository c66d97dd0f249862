"""Several engines that look like one: each request goes to one of them, and one that dies is started again.

Each has a process, a GPU or several, and a cache of its own, and knows nothing of the others. A request stays where it
was sent; where (routing.py) follows from what each was sent before and has not yet answered. If its engine dies before
its first token, it is sent once more, to another: nobody has seen anything of it, and its seed, which every request
has, draws the same tokens there. Once only, for it may be the request that killed the engine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace

from kerngen.errors import KerngenError, UsageError
from kerngen.runtime.cache import KINDS, PAGE_SIZE
from kerngen.runtime.engine import Load
from kerngen.runtime.engine.pages import page_keys
from kerngen.runtime.media.input import Block
from kerngen.runtime.serve.engine_client import EngineClient
from kerngen.runtime.serve.engine_process import Made, Options, Ready, TokenRequest
from kerngen.runtime.serve.engines import EngineFailed, EngineStopped, OnLoad, ReplicaState
from kerngen.runtime.serve.metrics import cache_usage
from kerngen.runtime.serve.routing import Candidate, PrefixIndex, choose

BACKOFF_S, MOST_BACKOFF_S = 1.0, 60.0  # before an engine is started again; doubled each time that it fails at once
STEADY_S = 60.0  # an engine that has served so long has not failed at once
MOST_FAILURES = 5  # in a row, of every engine: then nothing will change by trying again
ANSWER_TOKENS = 256  # of an answer, before any has ended
_MEMORY = 32  # answers that the mean length of answers remembers


def device_groups(num_replicas: int, device: str | None, backend: str, each: int = 1) -> tuple[tuple[str, ...], ...]:
    """Devices of each of `num_replicas` engines, `each` GPUs that follow each other for one: those that `device` lists
    ("cuda:0,cuda:1"; one alone is the first of all), else the first GPUs; the CPU for all of them where it says so, or
    the backend is torch, or there is no GPU.

    Raises UsageError where there are fewer GPUs, or where they are not so many for each. Loads nothing and touches no
    GPU.
    """
    import torch

    named = [] if device is None else [name.strip() for name in device.split(",")]
    count, wanted = torch.cuda.device_count(), num_replicas * each
    if named == ["cpu"] or (not named and (backend == "torch" or (backend == "auto" and not count))):
        return (("cpu",),) * num_replicas
    indices = [_index(name, device or "", wanted) for name in named] or [0]
    if len(indices) == 1:
        indices = list(range(indices[0], indices[0] + wanted))
    if len(indices) != wanted:
        raise UsageError(f"--device names {len(indices)} GPUs, and {_asked(num_replicas, each)} take {wanted}",
                         hint=f"--device {_first(wanted)}")  # fmt: skip
    if len(set(indices)) < wanted:
        raise UsageError(f"--device {device}: each replica has GPUs of its own", hint="name each once")
    groups = [indices[at : at + each] for at in range(0, wanted, each)]
    if apart := [g for g in groups if g != list(range(g[0], g[0] + each))]:
        raise UsageError(f"--device {device}: the ranks of one model take GPUs that follow each other, not {apart[0]}",
                         hint="CUDA_VISIBLE_DEVICES puts GPUs into another order")  # fmt: skip
    if lacking := [index for index in indices if index >= count]:
        raise UsageError(f"{_asked(num_replicas, each)} take {wanted} GPUs: there is no cuda:{lacking[0]}, this "
                         f"machine has {count} GPU{'' if count == 1 else 's'}",
                         hint="take fewer" if count else "--device cpu shares the cores")  # fmt: skip
    return tuple(tuple(f"cuda:{index}" for index in group) for group in groups)


def _index(name: str, device: str, wanted: int) -> int:
    kind, _, index = name.partition(":")
    if kind != "cuda" or not (index or "0").isdecimal():
        raise UsageError(f"--device {device}: {name!r} is no GPU", hint=f"--device {_first(wanted)}, or cpu")
    return int(index or 0)


def _asked(num_replicas: int, each: int) -> str:
    divided = f"--tensor-parallel {each}" if each > 1 else ""
    return " and ".join(filter(None, (f"--replicas {num_replicas}", divided)))


def _first(count: int) -> str:
    return ",".join(f"cuda:{i}" for i in range(count))


@dataclass(eq=False, slots=True)
class _Work:
    """A request at an engine. prompt_tokens: that are still to be prefilled; all at once, as its first token shows.
    room: tokens that its answer may still have.
    """

    prompt_tokens: int
    room: int


@dataclass(slots=True)
class _Replica:
    """An engine, of which one process at a time is there. failures: in a row, at once. num_preempted: of the processes
    before.
    """

    number: int
    options: Options
    client: EngineClient | None = None
    ready: Ready | None = None  # None: down
    prefixes: PrefixIndex = field(default_factory=lambda: PrefixIndex(0))
    works: set[_Work] = field(default_factory=set)
    up_since: float = 0.0
    why: str = "it is being started"
    failures: int = 0
    num_requests: int = 0
    num_restarts: int = 0
    num_preempted: int = 0

    @property
    def name(self) -> str:
        return f"replica {self.number} ({self.device})"

    @property
    def device(self) -> str:
        return ", ".join(self.options.devices)

    @property
    def is_up(self) -> bool:
        """Also before `_keep` has noticed that it is not."""
        return self.ready is not None and self.client is not None and self.client.is_alive

    @property
    def load(self) -> Load:
        """After its last step; of nothing where it is down."""
        if not self.is_up or self.client is None or self.ready is None:
            nothing = dict.fromkeys(KINDS, 0)
            return Load(0, 0, 0, 0, 0, nothing, nothing)
        pages = dict(self.ready.num_pages)
        return self.client.load or Load(0, 0, 0, 0, 0, pages, pages)

    @property
    def num_preemptions(self) -> int:
        """Of all its processes: a counter never goes back."""
        load = None if self.ready is None or self.client is None else self.client.load
        return self.num_preempted + (0 if load is None else load.num_preemptions)

    async def start(self, on_load: OnLoad | None = None) -> Ready:
        """Raises EngineFailed, UsageError."""
        self.client = EngineClient(self.options, on_load)
        try:
            ready = await self.client.start()
        except OSError as e:  # no more processes, or descriptors
            raise EngineFailed(f"its process cannot be started: {e}") from e
        self.ready, self.why, self.up_since = ready, "", time.monotonic()
        self.prefixes = PrefixIndex(ready.num_pages["full"])
        return ready

    def went_down(self, why: str) -> None:
        if self.ready is None or time.monotonic() - self.up_since < STEADY_S:
            self.failures += 1
        else:
            self.failures = 1
        self.num_preempted = self.num_preemptions
        self.ready, self.why = None, why

    @property
    def pause_s(self) -> float:
        """Before it is started again."""
        return float(min(BACKOFF_S * 2 ** (self.failures - 1), MOST_BACKOFF_S))

    def pending_tokens(self, answer_tokens: float) -> float:
        """answer_tokens: that an answer has in the mean."""
        return sum(work.prompt_tokens + min(work.room, answer_tokens) for work in self.works)

    @contextmanager
    def working(self, work: _Work) -> Iterator[None]:
        self.num_requests += 1
        works = self.works
        works.add(work)
        try:
            yield
        finally:
            works.discard(work)


class ReplicaPool:
    """The engines of one server (`Engines`), an entry of `options` each; one where its model is divided. `start`, then
    from one event loop alone.

    say: is told in words what becomes of them.
    """

    def __init__(self, options: Sequence[Options], on_load: OnLoad | None, say: Callable[[str], None]) -> None:
        self._replicas = [_Replica(number, each) for number, each in enumerate(options)]
        self._shares_prefixes = not options[0].reproducible  # a reproducible engine computes each prompt whole
        self._on_load, self._say = on_load, say
        self._turn = 0
        self._answer_tokens = float(ANSWER_TOKENS)
        self._closing = False
        self._keepers: list[asyncio.Future[None]] = []

    async def start(self) -> Ready:
        """The first alone: it builds the kernels that the others find, and keeps the weights that they read."""
        first, *others = self._replicas
        told = _Progress(self._on_load)
        try:
            came = [await self._start(first, self._on_load)]
            came += await asyncio.gather(*(self._start(r, told.of(r.number)) for r in others))
        except BaseException:
            await self.close()
            raise
        self._keepers = [asyncio.ensure_future(self._keep(r)) for r in self._replicas]
        boards = {r.ready.board for r in self._replicas if r.ready is not None}
        if len(boards) > 1:
            self._say(f"replicas are on unequal boards ({', '.join(sorted(boards))}): each gets as much as it can do")
        where = "; ".join(dict.fromkeys(ready.where for ready in came))
        if not others:
            return came[0]
        return replace(
            came[0],
            max_len=min(ready.max_len for ready in came),
            max_batch=sum(ready.max_batch for ready in came),
            num_pages={kind: sum(ready.num_pages[kind] for ready in came) for kind in came[0].num_pages},
            where=f"{len(came)} replicas, {where}",
            load_s=came[0].load_s + max(ready.load_s for ready in came[1:]),
            ready_s=came[0].ready_s + max(ready.ready_s for ready in came[1:]),
        )

    async def _start(self, replica: _Replica, on_load: OnLoad | None) -> Ready:
        try:
            return await replica.start(on_load)
        except (EngineFailed, UsageError) as e:
            raise type(e)(f"{replica.name}: {e.message}", hint=e.hint) from e

    async def _keep(self, replica: _Replica) -> None:
        """Start it again whenever it has ended, until the pool is closed."""
        while True:
            assert replica.client is not None
            await replica.client.ended.wait()
            replica.went_down(replica.client.why_dead)
            while replica.ready is None:
                self._say(f"{replica.name} has ended: {replica.why}; it is started again in {replica.pause_s:g} s, "
                          f"and {self._num_up} of {len(self._replicas)} serve")  # fmt: skip
                await replica.client.close()  # what is left of it
                await asyncio.sleep(replica.pause_s)
                replica.why = "it is being started again"
                try:
                    ready = await replica.start()
                except KerngenError as e:
                    replica.went_down(e.message)
                else:
                    replica.num_restarts += 1
                    self._say(f"{replica.name} serves again, after {ready.load_s + ready.ready_s:.1f} s")

    # -- what is asked of one engine

    @property
    def _num_up(self) -> int:
        return sum(r.is_up for r in self._replicas)

    @property
    def is_alive(self) -> bool:
        return not self._closing and self._num_up > 0

    @property
    def is_lost(self) -> bool:
        return not self._closing and all(not r.is_up and r.failures >= MOST_FAILURES for r in self._replicas)

    @property
    def why_dead(self) -> str:
        if self._closing or self._num_up:
            return ""
        return "no replica serves: " + "; ".join(f"{r.name}: {r.why or 'it has ended'}" for r in self._replicas)

    @property
    def load(self) -> Load:
        loads = [r.load for r in self._replicas]
        return Load(
            num_waiting=sum(load.num_waiting for load in loads),
            num_prefilling=sum(load.num_prefilling for load in loads),
            num_running=sum(load.num_running for load in loads),
            num_preemptions=sum(r.num_preemptions for r in self._replicas),
            num_graphs=sum(load.num_graphs for load in loads),
            free_pages={kind: sum(load.free_pages[kind] for load in loads) for kind in KINDS},
            num_pages={kind: sum(load.num_pages[kind] for load in loads) for kind in KINDS},
            key_tiles=_together([load.key_tiles for load in loads]),
        )

    @property
    def replicas(self) -> Sequence[ReplicaState]:
        return [self._state(r) for r in self._replicas]

    def _state(self, replica: _Replica) -> ReplicaState:
        load = replica.load
        return ReplicaState(
            replica=replica.number,
            device=replica.device,
            up=replica.is_up,
            running=load.num_running + load.num_prefilling,
            waiting=load.num_waiting,
            pending_tokens=round(replica.pending_tokens(self._answer_tokens)),
            kv_cache_usage=cache_usage(load),
            requests=replica.num_requests,
            restarts=replica.num_restarts,
            why="" if replica.is_up else replica.why or "it has ended",
        )

    async def stream(
        self, request: TokenRequest, enough: Callable[[], bool] = lambda: False
    ) -> AsyncGenerator[Made, None]:
        """As `EngineClient.stream`. Raises EngineFailed, too, where no engine serves."""
        # All but one token at most are found: its logits are wanted.
        may_share = self._shares_prefixes and request.prompt_logprobs is None
        keys = _page_keys(request) if self._shares_prefixes else []
        findable = keys[: (len(request.prompt) - 1) // PAGE_SIZE] if may_share else []
        is_again = False
        while True:
            replica = self._choose(findable)
            client, tokens, has_begun = replica.client, list[int](), False
            assert client is not None
            found = replica.prefixes.count(findable) * PAGE_SIZE
            replica.prefixes.note(keys)
            work = _Work(len(request.prompt) - found, request.max_new_tokens)
            try:
                with replica.working(work):
                    async with aclosing(client.stream(request, enough)) as stream:
                        async for made in stream:
                            has_begun = True
                            tokens += made.tokens
                            work.prompt_tokens, work.room = 0, request.max_new_tokens - len(tokens)
                            if made.reason:
                                self._ended(replica, client, request, keys, tokens)
                            yield made
                return
            except EngineStopped:
                raise
            except EngineFailed as e:
                if client.is_alive:  # the request's own fault
                    raise
                if has_begun or is_again or not self._num_up:
                    raise EngineFailed(f"{replica.name}: {e.message}", hint=e.hint) from e
                is_again = True

    def _choose(self, keys: Sequence[bytes]) -> _Replica:
        if not (up := [r for r in self._replicas if r.is_up]):
            raise EngineFailed(self.why_dead or "the server stops")
        candidates = [
            Candidate(
                pending_tokens=r.pending_tokens(self._answer_tokens),
                num_found=r.prefixes.count(keys) * PAGE_SIZE,
                has_row=r.ready is not None and len(r.works) < r.ready.max_batch,
            )
            for r in up
        ]
        at = next((at for at, r in enumerate(up) if r.number >= self._turn), 0)
        replica = up[choose(candidates, at)]
        self._turn = (replica.number + 1) % len(self._replicas)
        return replica

    def _ended(
        self, replica: _Replica, client: EngineClient, request: TokenRequest, keys: Sequence[bytes], tokens: list[int]
    ) -> None:
        """An answer is part of the prompt of the next turn."""
        self._answer_tokens += (len(tokens) - self._answer_tokens) / _MEMORY
        if self._shares_prefixes and replica.client is client:
            replica.prefixes.note(_page_keys(request, tokens, keys))

    def end(self, why: str) -> None:
        for replica in self._replicas:
            if replica.client is not None:
                replica.client.end(why)

    async def close(self) -> None:
        self._closing = True
        for keeper in self._keepers:
            keeper.cancel()
        ended = await asyncio.gather(*self._keepers, return_exceptions=True)
        await asyncio.gather(*(r.client.close() for r in self._replicas if r.client is not None))
        for error in ended:
            if isinstance(error, Exception):
                raise error


def _page_keys(request: TokenRequest, tokens: Sequence[int] = (), known: Sequence[bytes] = ()) -> list[bytes]:
    """Of the full pages of a prompt and the `tokens` that answer it; images are told apart by what they show."""
    blocks = [Block(placed.start, placed.end, placed.media.digest, sees_itself=False) for placed in request.media]
    return page_keys([*request.prompt, *tokens], PAGE_SIZE, known, blocks)


class _Progress:
    """What several engines tell of their loading, as one: the sums of their bytes."""

    def __init__(self, on_load: OnLoad | None) -> None:
        self._on_load = on_load
        self._bytes: dict[int, tuple[int, int]] = {}

    def of(self, number: int) -> OnLoad | None:
        if (on_load := self._on_load) is None:
            return None

        def told(done: int, total: int, kernel: str) -> None:
            if kernel:
                on_load(done, total, kernel)
                return
            self._bytes[number] = done, total
            on_load(sum(d for d, _ in self._bytes.values()), sum(t for _, t in self._bytes.values()), "")

        return told


def _together(each: Sequence[dict[int, tuple[int, int]]]) -> dict[int, tuple[int, int]]:
    """Load.key_tiles of all of them."""
    layers = sorted(set().union(*each))
    of_each = {layer: [tiles[layer] for tiles in each if layer in tiles] for layer in layers}
    return {layer: (sum(kept for kept, _ in of), sum(every for _, every in of)) for layer, of in of_each.items()}
