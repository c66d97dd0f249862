"""The engine's process as the server sees it, without the process."""

from __future__ import annotations

import asyncio
import signal
from multiprocessing import Pipe
from queue import SimpleQueue

import pytest
import torch

from kerngen.errors import UsageError
from kerngen.runtime.engine import Stats
from kerngen.runtime.sampling import Sampling
from kerngen.runtime.serve.engine_client import EngineClient
from kerngen.runtime.serve.engine_process import (
    Cancel,
    Failed,
    Loading,
    Made,
    Options,
    Ready,
    TokenRequest,
    Told,
    _open,
    serve,
)
from kerngen.runtime.serve.engines import EngineFailed
from kerngen.runtime.session import Session


def _breaks(**_: object) -> Session:
    raise RuntimeError("planted")


def test_what_breaks_an_engine_is_in_its_log(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    mine, theirs = Pipe()
    serve(theirs, Options({}, 64, 1, opens=_breaks))
    assert mine.recv() == Failed("RuntimeError: planted")
    err = capfd.readouterr().err
    assert "in _breaks" in err
    assert err.endswith("RuntimeError: planted\n")


def test_engines_that_share_the_cores_divide_torchs_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, object] = {}
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: found.update(threads=count))

    def opens(**load: object) -> Session:
        found.update(load)
        raise UsageError("seen")

    with pytest.raises(UsageError, match="seen"):
        _open(Pipe()[0], Options({"folder": "x", "device": None}, 64, 1, opens, devices=("cpu",), num_sharing=3))
    assert (found["threads"], found["device"], found["folder"]) == (2, "cpu", "x")
    found.clear()
    with pytest.raises(UsageError, match="seen"):
        _open(Pipe()[0], Options({"device": "cuda:1"}, 64, 1, opens))
    assert ("threads" in found, found["device"]) == (False, "cuda:1")


async def _told(steps: list[list[Made]]) -> tuple[list[Made], Exception | None, list[object]]:
    """What somebody gets who comes back to the loop once all of `steps` were told; and what the engine was told."""
    client = EngineClient(Options({}, 64, 1))
    client._outbox = SimpleQueue()
    stream = client.stream(TokenRequest([1], 8, Sampling()))
    first = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    for made in steps:
        client._heed(Told(made))
    got, error = [], None
    try:
        got.append(await first)
        async for made in stream:
            got.append(made)
    except EngineFailed as e:
        error = e
    finally:
        await stream.aclose()
    outbox = []
    while not client._outbox.empty():
        outbox.append(client._outbox.get())
    return got, error, outbox


def test_nobody_is_told_how_weights_load_once_ctrl_c_has_come() -> None:
    client = EngineClient(Options({}, 64, 1))
    client._connection, theirs = Pipe()
    client._loop = asyncio.new_event_loop()
    client._ready = client._loop.create_future()
    client._ready.cancel()
    client._heed(Ready(64, 1, {}, "", 0.0, 0.0, None))
    client._loop.close()
    theirs.send(Loading(1, 2))
    client._read()


def test_what_waits_goes_out_together() -> None:
    steps = [[Made(0, [5])], [Made(0, [6, 7])], [Made(0, [8], reason="length")]]
    got, error, outbox = asyncio.run(_told(steps))
    assert [(m.tokens, m.reason) for m in got] == [([5, 6, 7, 8], "length")]
    assert error is None
    assert not any(isinstance(o, Cancel) for o in outbox)


@pytest.mark.parametrize("last", ["cancelled", "length", "error", "stopped"])
def test_what_is_enough_ends_with_what_the_engine_says_of_it(last: str) -> None:
    """It may have come to its end by itself meanwhile, or have died: the answer is whole."""
    stats = Stats(1, 3, 2, 0, 3, 0.1, 0.2) if last in ("cancelled", "length") else None

    async def run() -> None:
        client = EngineClient(Options({}, 64, 1))
        client._outbox = SimpleQueue()
        stream = client.stream(TokenRequest([1], 8, Sampling()), lambda: True)
        first = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        client._heed(Told([Made(0, [5])]))
        assert (await first).tokens == [5]
        rest = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        assert [client._outbox.get() for _ in range(2)][1] == Cancel(0)
        client._heed(Told([Made(0, [6]), Made(0, [7], reason=last, stats=stats)]))
        assert await rest == Made(0, [], reason="stop", stats=stats)
        assert [made async for made in stream] == []
        assert client._outbox.empty()

    asyncio.run(run())


def test_an_answer_that_has_ended_stays_one() -> None:
    """Its engine dies before somebody has come back for the end."""
    got, error, _ = asyncio.run(_told([[Made(0, [5], reason="stop")], [Made(0, [], reason="error", error="died")]]))
    assert [(m.tokens, m.reason) for m in got] == [([5], "stop")]
    assert error is None


def test_tokens_before_an_error_are_not_lost() -> None:
    got, error, _ = asyncio.run(_told([[Made(0, [5])], [Made(0, [6])], [Made(0, [], reason="error", error="NaN")]]))
    assert [m.tokens for m in got] == [[5, 6]]
    with pytest.raises(EngineFailed, match="NaN"):
        raise error or AssertionError
