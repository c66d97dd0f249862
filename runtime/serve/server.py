"""Server lifecycle: starts the engine process and uvicorn, and shuts both down in order."""

from __future__ import annotations

import asyncio
import math
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import uvicorn

from kerngen.errors import ToolchainError, UsageError
from kerngen.runtime.cache import PAGE_SIZE
from kerngen.runtime.config import Keeping, read_model_config, read_sampling
from kerngen.runtime.config_fields import is_gguf
from kerngen.runtime.conversation import DEFAULT_CONTEXT
from kerngen.runtime.hub import find_checkpoint
from kerngen.runtime.media.opening import open_support
from kerngen.runtime.media.options import MediaOptions, MediaSupport
from kerngen.runtime.sampling import Sampling
from kerngen.runtime.serve.app import make_app
from kerngen.runtime.serve.choice_stream import usual_values
from kerngen.runtime.serve.connections import ACCEPTED_AT_ONCE, BACKLOG, Connection, Places, saying_what_is_lacking
from kerngen.runtime.serve.engine_client import EngineClient
from kerngen.runtime.serve.engine_process import Options, Ready, keep_out_of_collections
from kerngen.runtime.serve.engine_start import BegunEngine
from kerngen.runtime.serve.engines import Engines, OnLoad
from kerngen.runtime.serve.origins import allowed
from kerngen.runtime.serve.replicas import ReplicaPool
from kerngen.runtime.serve.service import Limits, Service
from kerngen.runtime.serve.tracing import open_tracing
from kerngen.runtime.session import Session, stop_ids_of
from kerngen.runtime.text import TextCodec
from kerngen.system.cancellation import Cancellation

WATCH_S = 0.5  # how often it is seen that the engine has died
TOLD_S = 2.0  # in which those are told whose answers have not ended when the server must


@dataclass(frozen=True, slots=True)
class Settings:
    """load, opens, reproducible: see `Options`. control_tokens: see `Service`. drain_s: how long answers may take once
    the server is told to stop. traces: where spans go (tracing.py). origins, hosts: whose pages may ask where there are
    no keys, and by which names, besides the server's own. replicas: the devices of each of several engines; () for one,
    where `load` says. begun: that one's process; None for one that is begun when it is needed.
    """

    load: Mapping[str, Any]
    host: str = "127.0.0.1"
    port: int = 8000
    names: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    context: int | None = None
    max_batch: int = 64
    limits: Limits = field(default_factory=Limits)
    drain_s: float = 60.0
    traces: str | None = None
    opens: Callable[..., Session] | None = None
    reproducible: bool = False
    control_tokens: bool = False
    origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    replicas: tuple[tuple[str, ...], ...] = ()
    begun: BegunEngine | None = None


def run(
    settings: Settings,
    *,
    on_load: OnLoad | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> int:
    """Serve until a signal says so. Returns the exit code: 1 where the engine died. Raises UsageError, EngineFailed."""
    return asyncio.run(_run(settings, on_load, say))


async def _run(settings: Settings, on_load: OnLoad | None, say: Callable[[str], None]) -> int:
    tracing = open_tracing(settings.traces)
    allowed(settings.origins, settings.hosts, settings.host)  # what is no origin is known before the weights are there
    listening = _listen(settings.host, settings.port)  # a port that is taken is known before the weights are there
    try:
        service = await _open(settings, on_load, say)
        service.tracing = tracing
        try:
            return await _serve(service, settings, listening, say)
        finally:
            await service.client.close()
            service.close()
    finally:
        listening.close()


def _listen(host: str, port: int) -> socket.socket:
    """Bound, so that nobody else gets the port while the weights load; whoever connects is refused until `_answer`."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listening = socket.socket(family, socket.SOCK_STREAM)
    except (OSError, UnicodeError) as e:
        raise UsageError(f"--host {host}: {getattr(e, 'strerror', None) or e}") from e
    try:
        try:
            listening.bind(address)  # alone: of several that may share a port all would load, and one would listen
        except OSError:  # it may be held by connections of a server that has just ended
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
    except OSError as e:
        listening.close()
        raise _not_there(host, port, e) from e
    return listening


def _answer(listening: socket.socket) -> None:
    """Let clients connect, whose connections are not to keep the port from the next server."""
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.listen(BACKLOG)
    except OSError as e:
        host, port = listening.getsockname()[:2]
        raise _not_there(host, port, e) from e


def _not_there(host: str, port: int, error: OSError) -> UsageError:
    return UsageError(f"{host} port {port}: {error.strerror or error}", hint="--port takes another one, 0 any")


def _cache_labels(load: Mapping[str, Any], ready: Ready) -> dict[str, str]:
    """By vLLM's names where it has one: num_gpu_blocks are pages of full-attention layers."""
    kept = Keeping.of(load)
    return {"block_size": str(PAGE_SIZE), "cache_dtype": kept.kv_cache_dtype, "cache_layout": kept.kv_cache_layout,
            "num_gpu_blocks": str(ready.num_pages["full"])}  # fmt: skip


async def _open(settings: Settings, on_load: OnLoad | None, say: Callable[[str], None]) -> Service:
    folder = find_checkpoint(settings.load["folder"])
    config = read_model_config(folder)
    codec = TextCodec(folder, config.bos_id)
    load = {**settings.load, "folder": str(folder)}
    context = settings.context or min(config.max_positions, DEFAULT_CONTEXT)
    if context > config.max_positions:
        raise UsageError(f"--context {context}: the model takes {config.max_positions:,} tokens")
    suggested = read_sampling(folder)
    options = Options(load, context, settings.max_batch, settings.opens, settings.reproducible,
                      Sampling(**usual_values(suggested)))  # fmt: skip
    client: Engines = EngineClient(options, on_load, settings.begun)
    if settings.replicas:
        num_sharing = sum(devices == ("cpu",) for devices in settings.replicas)
        each = [replace(options, devices=devices, num_sharing=num_sharing) for devices in settings.replicas]
        client = ReplicaPool(each, on_load, say)
    media = open_support(folder, settings.load.get("media") or MediaOptions())
    _require_pillow(media.options)
    ready, _, _ = await asyncio.gather(
        client.start(), asyncio.to_thread(codec.prepare), asyncio.to_thread(_begin_decoding, media)
    )
    for warning in ready.warnings:
        say(f"warning: {warning}")
    say(_summary(ready))
    keep_out_of_collections()
    return Service(
        client=client,
        ready=ready,
        codec=codec,
        config=config,
        names=settings.names or (_name(settings.load["folder"]),),
        suggested=suggested,
        stop_ids=stop_ids_of(folder, config, codec),
        limits=settings.limits,
        control_tokens=settings.control_tokens,
        media=media,
        cache=_cache_labels(load, ready),
        created=int(time.time()),
    )


def _require_pillow(options: MediaOptions) -> None:
    """Raises ToolchainError where images are to be read from the start and none could be, which requests would find
    out one by one. WAV is read without more.
    """
    if "vision" in options.parts and not options.at_first_use and find_spec("PIL") is None:
        raise ToolchainError("images need Pillow, which is not installed", hint="pip install 'kerngen[media]'")


def _begin_decoding(media: MediaSupport) -> None:
    """Its processes take their seconds beside the weights."""
    if media.prepare is not None and not media.options.at_first_use:
        media.prepare((), Cancellation())


def _name(model: str) -> str:
    """A name on the hub as it is, a folder by its own, a GGUF file without its ending."""
    path = Path(model)
    if not path.exists():
        return model
    return path.stem if is_gguf(path) else path.resolve().name


def _summary(ready: Ready) -> str:
    drafting = f", drafts by {ready.drafter}" if ready.drafter else ""
    return (f"{ready.where}{drafting}; loaded in {ready.load_s:.1f} s, kernels ready in {ready.ready_s:.1f} s; "
            f"{ready.max_batch} sequences of up to {ready.max_len:,} tokens")  # fmt: skip


async def _serve(service: Service, settings: Settings, listening: socket.socket, say: Callable[[str], None]) -> int:
    may_ask = allowed(settings.origins, settings.hosts, settings.host)
    protocol: Any = partial(Connection, Places.there_are())  # which uvicorn calls, as it would a class
    config = uvicorn.Config(
        make_app(service, settings.keys, may_ask), http=protocol, ws="none", log_config=None, log_level="error",
        access_log=False, lifespan="off", timeout_keep_alive=30, backlog=ACCEPTED_AT_ONCE,
        timeout_graceful_shutdown=math.ceil(settings.drain_s + TOLD_S), h11_max_incomplete_event_size=65536,
    )  # fmt: skip
    asyncio.get_running_loop().set_exception_handler(saying_what_is_lacking(say))
    server = _Server(config, service, settings.drain_s)
    _answer(listening)
    host, port = listening.getsockname()[:2]
    serving, is_said = asyncio.ensure_future(server.serve(sockets=[listening])), False
    while not serving.done():
        if server.started and not is_said:
            is_said = True
            listening.listen(BACKLOG)  # as uvicorn has told the socket how many to accept at once
            say(f"serving {', '.join(service.names)} at http://{f'[{host}]' if ':' in host else host}:{port} "
                "(the page), /v1 (OpenAI's API); Ctrl-C ends it")  # fmt: skip
        if service.client.is_lost and not server.should_exit:
            say(f"the engine has ended: {service.client.why_dead}")
            server.should_exit = server.force_exit = True
        await asyncio.wait([serving], timeout=WATCH_S if is_said else 0.01)
    await serving
    return 1 if service.client.is_lost else 0


class _Server(uvicorn.Server):
    """Tells the service that it drains, so that nobody is let in on a connection that is kept, and those who still wait
    after `drain_s` seconds, or when Ctrl-C comes again, that their answers end. A signal that ended it has done what it
    was for: uvicorn would raise it once more.
    """

    def __init__(self, config: uvicorn.Config, service: Service, drain_s: float) -> None:
        super().__init__(config)
        self._service, self._drain_s = service, drain_s

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.is_draining = True
        ending = asyncio.ensure_future(self._end_answers())
        try:
            await super().shutdown(sockets)
            if self.force_exit:  # which waits for nobody
                await ending
        finally:
            ending.cancel()

    async def _end_answers(self) -> None:
        end = time.monotonic() + self._drain_s
        while time.monotonic() < end and not self.force_exit:
            await asyncio.sleep(0.05)
        self._service.client.end("the server has stopped before the answer's end")
        end = time.monotonic() + TOLD_S
        while self.server_state.tasks and time.monotonic() < end:
            await asyncio.sleep(0.05)
