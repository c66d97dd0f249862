"""Which kernels the parts will ask for in this process of vLLM, so that all are there before its first forward."""

from __future__ import annotations

import logging
import time
from collections import Counter
from typing import Any

import torch
from vllm.config import get_current_vllm_config_or_none

from kerngen.ops import load_ahead

log = logging.getLogger("vllm.kerngen")
MOST_TOKENS = 8192  # of a forward, where no configuration of vLLM's says it


class Ahead:
    """What is asked for and not loaded yet: kernels by their folders, problems at any number of tokens."""

    def __init__(self) -> None:
        self._asked: Counter[tuple[str, Any]] = Counter()
        self._most_tokens = 0

    def ask(self, kernel: str, problem: Any) -> None:
        """Have `problem` served for as many tokens as vLLM's current configuration sends in a forward."""
        self._asked[kernel, problem] += 1
        config = get_current_vllm_config_or_none()
        tokens = MOST_TOKENS if config is None else int(config.scheduler_config.max_num_batched_tokens)
        self._most_tokens = max(self._most_tokens, tokens)

    def withdraw(self, kernel: str, problem: Any) -> None:
        """Take back one `ask`."""
        self._asked[kernel, problem] -= 1

    def load(self, device: torch.device) -> None:
        """Compile and load on a CUDA device what is asked for. Raises as `kerngen.ops.load_ahead`."""
        asked = list(+self._asked)
        self._asked.clear()
        if not asked:
            return
        began = time.monotonic()
        sources = load_ahead(asked, self._most_tokens, device)
        kernels = ", ".join(sorted({kernel for kernel, _ in asked}))
        log.info("kerngen: %d kernels for %d shapes of %s, up to %d tokens, in %.1f s: %s",
                 sources.total(), len(asked), kernels, self._most_tokens, time.monotonic() - began,
                 ", ".join(f"{count} of {source}" for source, count in sources.most_common()))  # fmt: skip


AHEAD = Ahead()
