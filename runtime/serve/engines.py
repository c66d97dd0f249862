"""What the service asks of the engine behind it, be that one process (engine_client.py) or several (replicas.py)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kerngen.errors import KerngenError

if TYPE_CHECKING:
    from kerngen.runtime.engine import Load
    from kerngen.runtime.serve.engine_process import Made, Ready, TokenRequest

OnLoad = Callable[[int, int, str], None]


class EngineFailed(KerngenError):
    """There is no engine, or it has ended in an error."""


class EngineStopped(EngineFailed):
    """The answer was ended before its end: the server stops."""


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """One of several engines, as /health and /metrics show it. up: it takes requests. running, waiting: sequences, as
    after its last step. pending_tokens: still to be computed, as far as that is known (routing.py). requests, restarts:
    since the server began. why: it is down, "" where it is up.
    """

    replica: int
    device: str
    up: bool
    running: int
    waiting: int
    pending_tokens: int
    kv_cache_usage: float
    requests: int
    restarts: int
    why: str


class Engines(Protocol):
    """One engine, or several that look like one."""

    @property
    def load(self) -> Load | None:
        """After the last step; of several engines the sums."""

    @property
    def is_alive(self) -> bool:
        """Whether requests are taken."""

    @property
    def is_lost(self) -> bool:
        """Whether no request will ever be taken again, so that the server ends. False after `close` alone."""

    @property
    def why_dead(self) -> str:
        """In words, why no requests are taken; "" where they are, and where the server stops."""

    @property
    def replicas(self) -> Sequence[ReplicaState]:
        """None of a single engine."""

    async def start(self) -> Ready:
        """Returns when requests can be taken. Raises EngineFailed, and UsageError for bad settings."""

    def stream(self, request: TokenRequest, enough: Callable[[], bool] = ...) -> AsyncGenerator[Made, None]:
        """What is made of `request`, as it comes (`EngineClient.stream`)."""

    def end(self, why: str) -> None:
        """End all that is at work: whoever waits for it is told `why`."""

    async def close(self) -> None:
        """End the engine; what still runs ends with it."""
