"""Ranks that exchange through memory, whose launches are threads of this process (kernel_on_cpu.py)."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import kernel_on_cpu
import torch

from kerngen.arch import Target, find_arch
from kerngen.compiler.render import render
from kerngen.templates import Kernel
from kerngen.templates.exchange_norm.spec import NUM_PHASES, exchange_bytes

TARGET = Target.of(find_arch("sm80"))
Given = Sequence[list[dict[str, Any]]]  # by launch and rank


class RanksOnCpu:
    """All ranks of one problem. `own_inputs` of a test's class gives those of each rank."""

    def __init__(
        self,
        kernel: Kernel,
        problem: Any,
        config: Any,
        folder: Path,
        *,
        width: int,
        max_rows: int,
        most_blocks: int,
        changed: tuple[str, str] = ("", ""),
    ) -> None:
        """width, max_rows: of the memory. most_blocks: of a launch, which take several rows each beyond. changed: of
        the source, in place of another text, what is to be shown not to work.
        """
        self.kernel, self.problem, self.config = kernel, problem, config
        self.max_rows, self._most_blocks = max_rows, most_blocks
        source, polls = str(render(kernel, problem, config, TARGET)), "POLLS_A_LOOK = 1024"
        assert polls in source
        assert changed[0] in source
        # a poll takes the host's threads a thousand times as long
        source = source.replace(*changed).replace(polls, "POLLS_A_LOOK = 16")
        self.library = kernel_on_cpu.on_cpu(source, kernel.name, folder, threads=True)
        self.abort = torch.zeros(1, dtype=torch.int32)
        self._slots = 4 * problem.ranks * max_rows * width  # bytes, before the epochs
        size = exchange_bytes(problem.ranks, max_rows, width)
        self.memory = torch.zeros(problem.ranks, size, dtype=torch.uint8)
        self.addresses = torch.tensor([*(m.data_ptr() for m in self.memory), self.abort.data_ptr()])

    def launch(self, inputs: dict[str, Any], pause_us: int = 0) -> None:
        problem = replace(self.problem, num_tokens=inputs["num_tokens"])
        (launch,) = self.kernel.launches(problem, self.config, TARGET)
        args = self.kernel.body(self.config, TARGET.arch).args[self.kernel.name]
        values = kernel_on_cpu.arguments_of(args, inputs)
        self.library.run(min(launch.grid[0], self._most_blocks), launch.block[0], pause_us, *values)

    def run(self, given: Given, pauses_us: Sequence[Sequence[int]]) -> None:
        """Each rank's launches in order; ranks run ahead of those that pause. pauses_us: by launch and rank."""

        def run(rank: int) -> None:
            for inputs, pauses in zip(given, pauses_us, strict=True):
                self.launch(inputs[rank], pauses[rank])

        with ThreadPoolExecutor(self.problem.ranks) as pool:
            list(pool.map(run, range(self.problem.ranks)))

    def run_with_a_late_rank(self, given: Given, patience_s: float) -> None:
        """Two exchanges, of which a rank polls the first when the others have long posted the second."""
        timer = threading.Timer(patience_s, lambda: self.abort.fill_(1))  # where words are lost none would end
        timer.start()
        self.run(given, [[2_000_000, *(0 for _ in given[0][1:])], [0 for _ in given[0]]])
        timer.cancel()

    def launch_aborted(self, inputs: dict[str, Any]) -> None:
        """A launch whose peers are gone, when it has been told."""
        self.abort.fill_(1)
        try:
            self.launch(inputs)
        finally:
            self.abort.zero_()
            self.memory.zero_()

    def words_left(self) -> int:
        """Bytes that are not zero, of all slots that another rank posts to."""
        ranks = self.problem.ranks
        slots = self.memory[:, : self._slots].view(ranks, NUM_PHASES, ranks, -1)
        return int(slots.count_nonzero()) - int(slots.diagonal(dim1=0, dim2=2).count_nonzero())
