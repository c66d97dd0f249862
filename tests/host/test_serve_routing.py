"""Which replica a request goes to, and what becomes of it where that dies. No process is started."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest
import torch
from command import ROOT
from hypothesis import given
from hypothesis import strategies as st
from played_engine import played_service
from starlette.testclient import TestClient

from kerngen.errors import UsageError
from kerngen.runtime.cache import PAGE_SIZE
from kerngen.runtime.engine import Load, Stats
from kerngen.runtime.media.values import Media, Placed
from kerngen.runtime.sampling import Sampling
from kerngen.runtime.serve import replicas
from kerngen.runtime.serve.app import make_app
from kerngen.runtime.serve.engine_process import Made, Options, Ready, TokenRequest
from kerngen.runtime.serve.engines import EngineFailed
from kerngen.runtime.serve.replicas import ANSWER_TOKENS, MOST_FAILURES, ReplicaPool, _page_keys, device_groups
from kerngen.runtime.serve.routing import Candidate, PrefixIndex, choose

DIED = "the engine's process died (exit code -9)"


# -- the choice


@given(st.integers(1, 5), st.lists(st.tuples(st.integers(0, 3), st.integers(0, 12), st.integers(0, 3)), max_size=60))
def test_no_replica_gets_more_than_a_request_ahead_of_the_idlest(count: int, asked: list[tuple[int, int, int]]) -> None:
    """Of prompts that share beginnings as they like, where none ends: the longest prompt bounds what is uneven."""
    pending, caches, longest, turn = [0] * count, [PrefixIndex(1000) for _ in range(count)], 0, 0
    for family, num_shared, num_own in asked:
        number = sum(len(cache) for cache in caches)
        keys = [b"%d shared %d" % (family, i) for i in range(num_shared)]
        keys += [b"%d own %d" % (number, i) for i in range(num_own)]
        size = len(keys) * 64 + 1
        found = [64 * cache.count(keys) for cache in caches]
        at = choose([Candidate(p, f, True) for p, f in zip(pending, found, strict=True)], turn)
        turn, longest = (at + 1) % count, max(longest, size)
        pending[at] += size - found[at]
        caches[at].note(keys)
        assert max(pending) - min(pending) <= longest


def test_a_match_is_followed_as_far_as_it_saves() -> None:
    def chosen(pending_of_match: int, saved: int = 128) -> int:
        return choose([Candidate(pending_of_match, saved, True), Candidate(0, 0, True)], 0)

    assert [chosen(0), chosen(127), chosen(129)] == [0, 0, 1]
    assert [chosen(128), choose([Candidate(128, 128, True), Candidate(0, 0, True)], 1)] == [0, 1], "a tie: in rotation"
    assert choose([Candidate(0, 1000, False), Candidate(5000, 0, True)], 0) == 1, "no row is worse than no prefix"
    assert choose([Candidate(9, 0, False), Candidate(8, 0, False)], 0) == 1


@given(st.integers(1, 8), st.lists(st.lists(st.integers(0, 3), max_size=6), max_size=30))
def test_what_was_sent_last_is_known(capacity: int, sent: list[list[int]]) -> None:
    index = PrefixIndex(capacity)
    for path in sent:
        keys = [bytes(path[: i + 1]) for i in range(len(path))]  # a key stands for all before it, too
        index.note(keys)
        assert len(index) <= capacity
        assert index.count(keys) == min(len(keys), capacity), "of one that is too long the beginning"
        assert index.count([b"none", *keys]) == 0


# -- the pool, with engines that are played


class PlayedClient:
    """In place of EngineClient: a token whenever `goes_on` is set, and an end when it is told to die."""

    made: list[PlayedClient]
    fails_to_start: str | None = None

    def __init__(self, options: Options, on_load: object) -> None:
        self.device = options.devices[0]
        self.is_alive, self.why_dead, self.load = True, "", None
        self.ended, self.goes_on = asyncio.Event(), asyncio.Event()
        self.asked: list[TokenRequest] = []
        self.says: str | None = None
        PlayedClient.made.append(self)

    async def start(self) -> Ready:
        await asyncio.sleep(0)
        if PlayedClient.fails_to_start is not None:
            self.die(PlayedClient.fails_to_start)
            raise EngineFailed(PlayedClient.fails_to_start)
        return Ready(1024, 32, {"full": 100, "sliding": 50}, f"played on {self.device}", 1.0, 0.5, None,
                     board="H" if self.device == "cuda:0" else "L")  # fmt: skip

    async def stream(self, request: TokenRequest, enough: Callable[[], bool]) -> AsyncIterator[Made]:
        self.asked.append(request)
        for at in range(request.max_new_tokens):
            while not self.goes_on.is_set() and self.is_alive:
                await asyncio.sleep(0)
            if self.says or not self.is_alive:
                raise EngineFailed(self.says or self.why_dead)
            is_last = at == request.max_new_tokens - 1
            stats = Stats(len(request.prompt), at, at, 0, at, 0.1, 0.2) if is_last else None
            yield Made(0, [7], reason="length" if is_last else "", stats=stats)

    def die(self, why: str = DIED) -> None:
        self.is_alive, self.why_dead = False, why
        self.ended.set()

    def end(self, why: str) -> None:
        """Nobody waits here."""

    async def close(self) -> None:
        self.is_alive = False


@pytest.fixture(autouse=True)
def _played(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "EngineClient", PlayedClient)
    monkeypatch.setattr(replicas, "BACKOFF_S", 0.001)
    PlayedClient.made, PlayedClient.fails_to_start = [], None


def _run(
    act: Callable[[ReplicaPool, list[PlayedClient], list[str]], Coroutine[Any, Any, None]],
    count: int = 2,
    **options: Any,
) -> None:
    async def run() -> None:
        said: list[str] = []
        pool = ReplicaPool(
            [Options({}, 1024, 32, devices=(f"cuda:{i}",), **options) for i in range(count)], None, said.append
        )
        assert (await pool.start()).max_batch == 32 * count
        try:
            await asyncio.wait_for(act(pool, PlayedClient.made, said), 20)
        finally:
            await pool.close()

    asyncio.run(run())


async def _tokens(pool: ReplicaPool, prompt: Sequence[int], count: int = 3, **more: Any) -> list[int]:
    request = TokenRequest(prompt, count, Sampling(), **more)
    async with aclosing(pool.stream(request)) as stream:
        return [token async for made in stream for token in made.tokens]


async def _until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        await asyncio.sleep(0.001)


def test_who_has_not_begun_is_sent_again_and_who_has_is_told() -> None:
    async def act(pool: ReplicaPool, made: list[PlayedClient], said: list[str]) -> None:
        new = asyncio.ensure_future(_tokens(pool, [2, 3]))
        await asyncio.sleep(0)
        made[1].goes_on.set()
        begun = pool.stream(TokenRequest([2, 4], 9, Sampling()))
        assert (await anext(begun)).tokens == [7]
        assert [len(m.asked) for m in made] == [1, 1], "they were spread"
        made[0].die()
        assert await new == [7, 7, 7]
        assert made[1].asked[-1].prompt == [2, 3], "whole, elsewhere"
        assert (await anext(begun)).tokens == [7], "unharmed"
        made[1].die()
        with pytest.raises(EngineFailed, match=r"replica 1 \(cuda:1\): the engine's process died"):
            await anext(begun)
        with pytest.raises(EngineFailed, match=r"no replica serves: replica 0 \(cuda:0\): .*; replica 1"):
            await _tokens(pool, [2])
        assert not pool.is_alive
        assert not pool.is_lost
        await _until(lambda: all(state.up for state in pool.replicas))
        assert [state.restarts for state in pool.replicas] == [1, 1]
        assert any("replica 1 (cuda:1) serves again" in line for line in said)
        PlayedClient.made[-1].goes_on.set()
        PlayedClient.made[-2].goes_on.set()
        assert await _tokens(pool, [2]) == [7, 7, 7]

    _run(act)


def test_what_kills_one_engine_kills_two_at_most() -> None:
    async def act(pool: ReplicaPool, made: list[PlayedClient], said: list[str]) -> None:
        asking = asyncio.ensure_future(_tokens(pool, [2, 3]))
        for at in range(2):
            await _until(lambda: any(m.asked and m.is_alive for m in made))
            next(m for m in made if m.asked and m.is_alive).die()
            assert not asking.done(), at
        with pytest.raises(EngineFailed, match="died"):
            await asking
        assert sum(len(m.asked) for m in made) == 2

    _run(act, 4)


def test_what_is_the_requests_own_fault_is_not_sent_again() -> None:
    async def act(pool: ReplicaPool, made: list[PlayedClient], said: list[str]) -> None:
        for client in made:
            client.goes_on.set()
            client.says = "NaN"
        with pytest.raises(EngineFailed, match=r"^NaN$"):
            await _tokens(pool, [2, 3])
        assert sum(len(m.asked) for m in made) == 1

    _run(act)


def test_an_engine_that_never_comes_back_ends_the_server_once_none_is_left() -> None:
    async def act(pool: ReplicaPool, made: list[PlayedClient], said: list[str]) -> None:
        PlayedClient.fails_to_start = "out of memory"
        made[0].die()
        await _until(lambda: len(PlayedClient.made) > 2 + MOST_FAILURES)
        made[1].goes_on.set()
        assert await _tokens(pool, [2]) == [7, 7, 7]
        assert pool.is_alive
        assert not pool.is_lost
        assert [(state.up, state.why) for state in pool.replicas][1] == (True, "")
        made[1].die()
        await _until(lambda: pool.is_lost)
        assert "out of memory" in pool.why_dead
        assert len(PlayedClient.made) < 40, "with pauses that grow"

    _run(act)


def test_the_next_turn_goes_where_the_last_one_was() -> None:
    """Its prompt has the last one's answer in it. A new engine knows nothing of what the old one was sent."""

    async def act(pool: ReplicaPool, made: list[PlayedClient], said: list[str]) -> None:
        for client in made:
            client.goes_on.set()
        talks = [[family] * (2 * PAGE_SIZE - 2) for family in range(6)]
        for talk in talks:
            talk += await _tokens(pool, talk)
        where = [[m.asked[i].prompt[0] for i in range(len(m.asked))] for m in made]
        assert [len(w) for w in where] == [3, 3]
        for talk in reversed(talks):
            await _tokens(pool, [*talk, 1])
        assert [[r.prompt[0] for r in m.asked[3:]] for m in made] == [w[::-1] for w in where]
        made[0].die()
        await _until(lambda: len(PlayedClient.made) == 3 and pool.replicas[0].up)
        PlayedClient.made[2].goes_on.set()
        for talk in (talks[0], talks[2]):  # both were with the one that died
            await _tokens(pool, [*talk, 1])
        assert [len(made[1].asked), len(PlayedClient.made[2].asked)] == [7, 1]

    _run(act)


@pytest.mark.parametrize("options", [{}, {"reproducible": True}])
def test_who_share_a_system_prompt_do_not_share_one_replica(options: dict[str, Any]) -> None:
    async def act(pool: ReplicaPool, made: list[PlayedClient], said: list[str]) -> None:
        shared = [9] * (8 * PAGE_SIZE)
        asking = [asyncio.ensure_future(_tokens(pool, [*shared, i], 1000)) for i in range(20)]
        await asyncio.sleep(0)
        counts = [len(m.asked) for m in made]
        assert sum(counts) == 20
        ahead = 0 if options else 8 * PAGE_SIZE // ANSWER_TOKENS + 1  # as much as the match saves
        assert abs(counts[0] - counts[1]) <= ahead, counts
        assert [state.pending_tokens > 0 for state in pool.replicas] == [True, True]
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        assert [state.pending_tokens for state in pool.replicas] == [0, 0], "who leaves weighs nothing"

    _run(act, **options)


def test_health_and_metrics_say_what_is_so() -> None:
    service, _ = played_service()

    async def act(pool: ReplicaPool, made: list[PlayedClient], said: list[str]) -> None:
        assert any("unequal boards (H, L)" in line for line in said)
        behind, _ = played_service()
        behind.client = pool
        behind.__post_init__()
        with TestClient(make_app(behind)) as client:

            def metric(name: str, more: str = "") -> float:
                text = client.get("/metrics").text
                return float(text.partition(f'{name}{{model_name="tiny"{more}}} ')[2].split("\n")[0])

            made[0].load = Load(2, 1, 3, 5, 0, {"full": 25, "sliding": 50}, {"full": 100, "sliding": 50})
            made[1].load = Load(0, 0, 1, 7, 0, {"full": 100, "sliding": 50}, {"full": 100, "sliding": 50})
            told = client.get("/health")
            assert (told.status_code, told.json()["status"]) == (200, "ok")
            first = told.json()["replicas"][0]
            assert (first["up"], first["running"], first["waiting"], first["device"]) == (True, 4, 2, "cuda:0")
            assert metric("vllm:num_requests_running") == 5
            assert metric("vllm:num_requests_waiting") == 2
            assert metric("vllm:kv_cache_usage_perc") == pytest.approx(0.375)
            assert metric("vllm:num_preemptions_total") == 12
            assert metric("kerngen:replica_kv_cache_usage_perc", ',replica="0"') == 0.75
            assert client.head("/health").status_code == 200
            dashboard = (ROOT / "examples" / "serving" / "grafana.json").read_text()
            assert (drawn := set(re.findall(r"kerngen:\w+", dashboard)))
            assert drawn <= set(re.findall(r"^# TYPE (\S+)", client.get("/metrics").text, re.M))
            PlayedClient.fails_to_start = "out of memory"
            made[0].die()
            assert pool.load.num_preemptions == 12, "nobody has noticed yet"
            told = client.get("/health")
            assert (told.status_code, told.json()["status"]) == (200, "degraded")
            await _until(lambda: "out of memory" in pool.replicas[0].why)
            assert [metric("kerngen:replica_up", f',replica="{i}"') for i in range(2)] == [0, 1]
            assert metric("vllm:num_requests_running") == 1
            assert metric("vllm:num_preemptions_total") == 12, "what was, was"
            made[1].die()
            told = client.get("/health")
            assert (told.status_code, told.json()["status"]) == (503, "down")
            told = client.post("/v1/completions", json={"prompt": "a"})
            assert (told.status_code, told.json()["error"]["code"]) == (503, "unavailable")
            assert "no replica serves: replica 0" in told.json()["error"]["message"]
            PlayedClient.fails_to_start = None
            await _until(lambda: pool.is_alive)
            assert client.get("/health").status_code == 200
            behind.is_draining = True
            assert client.get("/health").status_code == 503

    _run(act)
    with TestClient(make_app(service)) as client:
        assert (client.get("/health").status_code, client.get("/health").content) == (200, b"")
        assert "kerngen:" not in client.get("/metrics").text, "of one engine all is as it was"


# -- devices


def test_each_replica_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert device_groups(2, None, "auto") == device_groups(2, "cuda, cuda:1", "cuda") == (("cuda:0",), ("cuda:1",))
    assert device_groups(2, "cuda:2,cuda:0", "auto") == (("cuda:2",), ("cuda:0",))
    assert device_groups(2, None, "torch") == device_groups(2, "cpu", "auto") == (("cpu",), ("cpu",))
    assert device_groups(2, "cuda:1", "auto") == (("cuda:1",), ("cuda:2",))
    for count, device, says in (
        (4, None, "--replicas 4 take 4 GPUs: there is no cuda:3, this machine has 3 GPUs"),
        (2, "cuda:1,cuda:3", "no cuda:3"), (2, "cuda:2", "no cuda:3"),
        (1, "cuda:0,cuda:1", "--device names 2 GPUs, and --replicas 1 take 1"),
        (2, "cuda:1,cuda:1", "GPUs of its own"), (2, "cuda,cuda:0", "GPUs of its own"),
        (2, "cpu,cuda:0", "'cpu' is no GPU"), (2, "cuda:x,cuda:0", "'cuda:x' is no GPU"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=says):
            device_groups(count, device, "auto")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert device_groups(3, None, "auto") == (("cpu",),) * 3
    with pytest.raises(UsageError, match="this machine has 0 GPUs"):
        device_groups(2, None, "cuda")


def test_each_divided_model_has_gpus_that_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    both = ("cuda:0", "cuda:1"), ("cuda:2", "cuda:3")
    assert device_groups(2, None, "auto", 2) == device_groups(2, "cuda:0,cuda:1,cuda:2,cuda:3", "auto", 2) == both
    assert device_groups(2, "cuda:2,cuda:3,cuda:0,cuda:1", "auto", 2) == both[::-1]
    assert device_groups(1, "cuda:1", "auto", 2) == (("cuda:1", "cuda:2"),)
    assert device_groups(2, None, "torch", 2) == (("cpu",), ("cpu",))
    for count, device, says in (
        (2, "cuda:1", "--replicas 2 and --tensor-parallel 2 take 4 GPUs: there is no cuda:4"),
        (1, "cuda:0,cuda:2", r"follow each other, not \[0, 2\]"), (1, "cuda:1,cuda:0", "follow each other"),
        (2, "cuda:0,cuda:1", "names 2 GPUs"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=says):
            device_groups(count, device, "auto", 2)


def test_pages_of_other_images_are_other_pages() -> None:
    """Their tokens are the same: a replica that saw one image has nothing of another."""
    prompt = [2, *[9] * PAGE_SIZE, *[7] * PAGE_SIZE, *[9] * PAGE_SIZE]

    def keys(shade: int) -> list[bytes]:
        media = Media.of("image", np.full((PAGE_SIZE, 3), shade, np.uint8), (PAGE_SIZE, 1), PAGE_SIZE)
        return _page_keys(TokenRequest(prompt, 1, Sampling(), media=(Placed(PAGE_SIZE + 1, media),)))

    assert keys(1) == keys(1)
    assert [a == b for a, b in zip(keys(1), keys(2), strict=True)] == [True, False, False]
