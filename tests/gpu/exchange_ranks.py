"""Ranks of exchange_norm and exchange_best: several on one GPU as streams, or two processes with a GPU each that share
memory by IPC.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from kerngen.runtime.world import World
from kerngen.templates import Case, Kernel, find_kernel
from kerngen.templates.exchange_best import spec as best
from kerngen.templates.exchange_norm import spec as norm
from kerngen.templates.exchange_norm.spec import NUM_PHASES, exchange_bytes
from kerngen.timing.measure import compare, load, target_here

PATIENCE_S = 60.0
CYCLES_A_US = 1500  # about


@dataclass(frozen=True, slots=True)
class Exchange:
    """A kernel whose ranks exchange. own: what each rank has of its own. width: of rows in the memory. expected: of all
    ranks' inputs.
    """

    kernel: Kernel
    own: tuple[str, ...]
    width: Callable[[Any], int]
    expected: Callable[[Any, Sequence[dict[str, Any]]], dict[str, Tensor]]

    def case(self, problem: Any) -> Case:
        found: Case = self.kernel.cases.case_for(problem)
        return found


_NORM, _BEST = find_kernel("exchange_norm"), find_kernel("exchange_best")
EXCHANGES = {
    norm.Problem: Exchange(
        _NORM,
        ("h", "routed", "topk_weights", "out", "residual_out"),
        lambda p: int(p.hidden),
        _NORM.reference.expected_of,
    ),
    best.Problem: Exchange(
        _BEST, ("x", "table", "rows", "ids", "values"), lambda _: best.POSTED, _BEST.reference.expected_of
    ),
}


def exchange_of(problem: Any) -> Exchange:
    return EXCHANGES[type(problem)]


def inputs_of(problem: Any, seed: int, rank: int, **given: Any) -> dict[str, Any]:
    """Of a rank: some inputs and the outputs of its own, all else as on the others. given: in place of what it has."""
    exchange, device = exchange_of(problem), torch.device("cuda", torch.cuda.current_device())
    case, draws = exchange.case(problem), exchange.kernel.cases.inputs
    shared = draws(replace(case, seed=1000 * seed), device)
    own = draws(replace(case, seed=1000 * seed + 1 + rank), device)
    given |= {"rank": rank, "first_row": 1000 * rank}
    return {**shared, **{n: own[n] for n in exchange.own}, **{n: v for n, v in given.items() if n in shared}}


class Streams:
    """Ranks as streams of this GPU, each with memory of its own. The abort word ends launches that wait for ever."""

    def __init__(self, ranks: int, max_rows: int, width: int) -> None:
        self.ranks, self.max_rows, self.width = ranks, max_rows, width
        size = exchange_bytes(ranks, max_rows, width)
        self.memory = [torch.zeros(size, dtype=torch.uint8, device="cuda") for _ in range(ranks)]
        self.abort = torch.zeros(4, dtype=torch.int32).pin_memory()
        addresses = [*(m.data_ptr() for m in self.memory), self.abort.data_ptr()]
        self.addresses = torch.tensor(addresses, dtype=torch.int64, device="cuda")
        self.streams = [torch.cuda.Stream() for _ in range(ranks)]
        torch.cuda._sleep(1)  # loaded before anything waits: loading waits for what runs
        torch.cuda.synchronize()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Within it launches are made; behind it they have ended. Those that do not are aborted, and so fail."""
        timer = threading.Timer(PATIENCE_S, lambda: self.abort.fill_(1))
        timer.start()
        try:
            yield
        finally:
            torch.cuda.synchronize()
            timer.cancel()
        assert not self.abort[0], "ranks waited for each other for ever"

    def require_clean(self) -> None:
        """No word is left in any slot that another rank posts to."""
        slots = 4 * self.ranks * self.max_rows * self.width
        for rank, memory in enumerate(self.memory):
            of_ranks = memory[:slots].view(NUM_PHASES, self.ranks, -1)
            left = of_ranks[:, [r for r in range(self.ranks) if r != rank]]
            assert not left.any(), f"rank {rank} has words left, which its next launch would take"

    def require_leaving(self, launch: Callable[[], None]) -> None:
        """launch: of rank 0 alone. It waits until it is told that the other is gone, and then ends at once."""
        torch.cuda.synchronize()
        with torch.cuda.stream(self.streams[0]):
            launch()
        done = self.streams[0].record_event()
        time.sleep(0.3)
        assert not done.query(), "nobody has posted what it waits for"
        self.abort.fill_(1)
        start = time.monotonic()
        done.synchronize()
        assert time.monotonic() - start < 1.0


class OneGpu(Streams):
    """All ranks of a problem of exchange_norm or exchange_best."""

    def __init__(self, problem: Any, max_rows: int, config: Any = None) -> None:
        super().__init__(problem.ranks, max_rows, exchange_of(problem).width(problem))
        kernel = exchange_of(problem).kernel
        self.function = load(kernel, problem, config or kernel.default_config(problem, target_here()))

    def given(self, problem: Any, seed: int, two_shot_from: int = 0) -> list[dict[str, Any]]:
        peers = {"addresses": self.addresses, "max_rows": self.max_rows, "two_shot_from": two_shot_from}
        return [inputs_of(problem, seed, rank, **peers) for rank in range(self.ranks)]

    def launch(self, problem: Any, inputs: dict[str, Any]) -> None:
        """On torch's current stream."""
        self.function.run(problem, inputs, in_forward=True, alone=True)


def require_right(problem: Any, of_ranks: list[dict[str, Any]], what: str) -> None:
    """As the reference, and the same bits on all ranks."""
    exchange = exchange_of(problem)
    expected = exchange.expected(problem, of_ranks)
    for rank, inputs in enumerate(of_ranks):
        result = compare(exchange.kernel, exchange.case(problem), inputs, expected)
        assert result.ok, f"rank {rank} {what}: {result.message}"
        for name in expected:
            assert torch.equal(inputs[name], of_ranks[0][name]), f"rank {rank} {what}: other bits of {name}"


def sequence(problem: Any, tokens: tuple[int, ...]) -> list[Any]:
    return [replace(problem, num_tokens=t) for t in tokens]


class Repeated:
    """A graph of one rank: launches of several problems, with and without pauses between, whose outputs are compared
    with those of a first run on the device. `wrong` counts replays that differ.
    """

    def __init__(self, launch: Any, problems: list[Any], given: list[dict[str, Any]], draw: Random) -> None:
        """launch(problem, inputs). Nothing has run; all ranks make theirs before any of them runs."""
        self._launch, self._problems, self._given = launch, problems, given
        self.wrong = torch.zeros(1, dtype=torch.int64, device="cuda")
        self._pauses = [draw.choice((0, 0, 1, 5, 20)) for _ in problems]
        self._first: list[Tensor] = []

    @property
    def _outputs(self) -> list[Tensor]:
        names = exchange_of(self._problems[0]).kernel.outputs
        return [g[n] for g in self._given for n in names if g[n] is not None]

    def run(self) -> None:
        for problem, inputs, pause in zip(self._problems, self._given, self._pauses, strict=True):
            if pause:
                torch.cuda._sleep(pause * CYCLES_A_US)
            self._launch(problem, inputs)

    def keep(self) -> None:
        """What there is now is right."""
        self._first = [o.clone() for o in self._outputs]

    def captured(self, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for output in self._outputs:
                output.fill_(float("nan") if output.is_floating_point() else -(2**62))
            self.run()
            for output, first in zip(self._outputs, self._first, strict=True):
                self.wrong.add_((output != first).any())  # NaN differs from itself
        return graph


def require_right_when_replayed(
    gpu: OneGpu, problems: list[Any], each: list[list[dict[str, Any]]], draw: Random, replays: int
) -> None:
    """Launches of `problems` behind each other, of every rank as a graph that is replayed, with ranks that pause at
    random. each: of a problem, the inputs of all ranks.
    """
    repeated = [Repeated(gpu.launch, problems, [given[r] for given in each], draw) for r in range(gpu.ranks)]
    torch.cuda.synchronize()
    with gpu.watched():
        for rank, stream in enumerate(gpu.streams):
            with torch.cuda.stream(stream):
                repeated[rank].run()
    for p, given in zip(problems, each, strict=True):
        require_right(p, given, "first run")
    for r in repeated:
        r.keep()
    graphs = [r.captured(stream) for r, stream in zip(repeated, gpu.streams, strict=True)]
    with gpu.watched():
        for replay in range(replays):
            for rank in draw.sample(range(gpu.ranks), gpu.ranks):
                with torch.cuda.stream(gpu.streams[rank]):
                    if draw.random() < 0.3:
                        torch.cuda._sleep(draw.randrange(60_000))
                    graphs[rank].replay()
            if replay % 50 == 49:
                torch.cuda.synchronize()
    assert [int(r.wrong) for r in repeated] == [0] * gpu.ranks, f"of {replays} replays"
    gpu.require_clean()


# ---- a process of each rank


def _two_gpus(world: World, name: str, folder: str, replays: int, dies_after: int, told: Any) -> None:
    """A rank's process: `replays` replays of kernel `name`, and what came of them in a file `RANK`. dies_after: replays
    after which rank 1 kills itself, as kill -9 does; -1 for never. told: a shared byte, not zero once a rank has died.
    """
    torch.cuda.set_device(world.rank)
    import torch.distributed as dist

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=world.rank, world_size=world.size)
    from kerngen.runtime.executors.peer_memory import PeerMemory, gather_by

    together, draw = gather_by(), Random(world.rank)
    dtype = target_here().arch.dtype
    problem: Any = best.Problem(world.size, 5376, dtype, num_tokens=8)
    if name == "exchange_norm":
        problem = norm.Problem(world.size, 5376, dtype, "fp32", num_tokens=8)
    exchange = exchange_of(problem)
    memory = PeerMemory(world, together, hidden=exchange.width(problem), max_rows=8)
    if dies_after >= 0:

        def abort_when_told() -> None:
            while not told.value:
                time.sleep(0.001)
            memory.abort()

        threading.Thread(target=abort_when_told, daemon=True).start()
    problems = sequence(problem, (1, 3, 8))
    peers = {"addresses": memory.peers.addresses, "max_rows": memory.peers.max_rows, "two_shot_from": 8}
    given = [inputs_of(p, i, world.rank, **peers) for i, p in enumerate(problems)]
    everyones = [[inputs_of(p, i, rank) for rank in range(world.size)] for i, p in enumerate(problems)]
    function = load(exchange.kernel, problem, exchange.kernel.default_config(problem, target_here()))
    repeated = Repeated(lambda p, inputs: function.run(p, inputs, in_forward=True, alone=True), problems, given, draw)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        repeated.run()
        torch.cuda.synchronize()
        for p, mine, all_of in zip(problems, given, everyones, strict=True):
            result = compare(exchange.kernel, exchange.case(p), mine, exchange.expected(p, all_of))
            assert result.ok, result.message
        repeated.keep()
        graph, last = repeated.captured(stream), given[-1][exchange.kernel.outputs[-1]]
        together(b"captured")
        outcome = ""
        try:
            for replay in range(replays):
                if draw.random() < 0.05:
                    torch.cuda._sleep(draw.randrange(200 * CYCLES_A_US))
                graph.replay()
                if replay % 100 == 99:
                    torch.cuda.synchronize()  # no more than so many are under way
                if world.rank == 1 and replay == dies_after:
                    os.kill(os.getpid(), signal.SIGKILL)
                if told.value:
                    break
            torch.cuda.synchronize()
            outcome = f"{int(repeated.wrong)} of {replay + 1} wrong, NaN: {bool(last.isnan().any())}"
        except RuntimeError as e:  # the dead rank's memory may be gone: an error that says so ends the wait as well
            outcome = f"error: {e}"
    (Path(folder) / str(world.rank)).write_text(outcome)
    if dies_after < 0:
        memory.close()
        dist.destroy_process_group()
    else:
        os._exit(0)  # nobody answers: nothing is given back together


def in_processes(name: str, folder: Path, replays: int, dies_after: int) -> tuple[list[str], list[int | None], float]:
    """What each rank left, exit codes, and seconds from a rank's death to the other's end."""
    context = multiprocessing.get_context("spawn")
    # Not an Event: its set() waits for the answer of each process that waits for it, also of one that was killed.
    told = context.RawValue("b", 0)
    ranks = [
        context.Process(target=_two_gpus, args=(World(r, 2), name, str(folder), replays, dies_after, told))
        for r in range(2)
    ]
    for p in ranks:
        p.start()
    try:
        ranks[1].join(400)
        died = time.monotonic()
        if dies_after >= 0:
            time.sleep(0.5)  # the other has noticed nothing yet: it polls
            told.value = 1
        ranks[0].join(60)
        took = time.monotonic() - died
    finally:
        for p in ranks:
            if p.is_alive():
                p.kill()
            p.join()
    left = [(folder / str(r)).read_text() if (folder / str(r)).exists() else "" for r in range(2)]
    return left, [p.exitcode for p in ranks], took
