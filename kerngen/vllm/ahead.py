"""Which kernels the parts will ask for in this process of vLLM, so that all are there before its first forward."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import torch
from vllm.config import get_current_vllm_config_or_none

from kerngen.ops import load_ahead

log = logging.getLogger("vllm.kerngen")
MOST_TOKENS = 8192  # of a forward, where no configuration of vLLM's says it
T = TypeVar("T")


class Grid(Protocol):
    """Problems that are listed when they are loaded, once for all layers that ask for grids which are equal."""

    def problems(self) -> Iterable[tuple[str, Any]]:
        """(kernel, problem): exactly these."""
        ...


class Ahead:
    """What is asked for and not loaded yet: kernels by their folders, problems at any number of tokens, and grids."""

    def __init__(self) -> None:
        self._asked: Counter[tuple[str, Any]] = Counter()
        self._grids: dict[Grid, None] = {}
        self._most_tokens = 0

    def ask(self, kernel: str, problem: Any) -> None:
        """Have `problem` served for as many tokens as vLLM's current configuration sends in a forward."""
        self._asked[kernel, problem] += 1
        config = get_current_vllm_config_or_none()
        tokens = MOST_TOKENS if config is None else int(config.scheduler_config.max_num_batched_tokens)
        self._most_tokens = max(self._most_tokens, tokens)

    def ask_all(self, grid: Grid) -> None:
        """Have the grid's problems served as they are."""
        self._grids[grid] = None

    def withdraw(self, kernel: str, problem: Any) -> None:
        """Take back one `ask`."""
        self._asked[kernel, problem] -= 1

    def load(self, device: torch.device) -> None:
        """Compile and load on a CUDA device what is asked for. Raises as `kerngen.ops.load_ahead`."""
        asked = list(+self._asked)
        self._asked.clear()
        if not asked and not self._grids:
            return
        began = time.monotonic()
        exactly = [each for grid in self._grids for each in grid.problems()]
        self._grids.clear()
        sources = kept_in_sleep(device, lambda: load_ahead(asked, self._most_tokens, device, exactly))
        kernels = ", ".join(sorted({kernel for kernel, _ in (*asked, *exactly)}))
        log.info("kerngen: %d kernels for %d shapes of %s, up to %d tokens, in %.1f s: %s",
                 sources.total(), len(asked) + len(exactly), kernels, self._most_tokens, time.monotonic() - began,
                 ", ".join(f"{count} of {source}" for source, count in sources.most_common()))  # fmt: skip


def kept_in_sleep(device: torch.device, make: Callable[[], T]) -> T:
    """What `make` gives, with the memory that it allocates on a CUDA device outside of what vLLM's sleep mode empties.

    With --enable-sleep-mode a model is loaded into a pool of vLLM's, which level 2 throws away. What a wake-up and a
    reload fill again are parameters and buffers: not the scratch memory of kernels, which begins as zeros, and not the
    addresses of peers. Torch's pools are a thread's own, so another thread allocates.
    """
    config = get_current_vllm_config_or_none()
    if config is None or not getattr(config.model_config, "enable_sleep_mode", False):
        return make()

    def made() -> T:
        with torch.cuda.device(device):
            torch.zeros(1, device=device)  # makes torch's primary context this thread's, too
            found = make()
            torch.cuda.synchronize(device)  # the thread's stream is not the one that it is used on
        return found

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(made).result()


AHEAD = Ahead()
