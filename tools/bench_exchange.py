"""Times exchange_norm and exchange_best between the GPUs of this host, beside what NCCL takes for the same.

    python -m tools.bench_exchange --ranks 2

Each rank is a process with a GPU. A figure is microseconds a call, in a CUDA graph of 120 calls right behind each
other, of the slowest rank, median of 20 replays. Ranks begin together: before each replay that is timed goes one that
is not. "behind" has a product of 58 MB of weights by cuBLAS before each call, as a step has; what that takes alone is a
column. What is timed is checked first: against the reference, and that all ranks hold the same bits.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import click

from kerngen.errors import KerngenError, NumericsError, UsageError
from kerngen.runtime.world import World

CALLS, SAMPLES, WARM_UP = 120, 20, 3
TOKENS = (1, 4, 8, 32, 64, 128, 512)
HEAD = 4096  # rows of a rank's output head
PRODUCT = "product alone"


@dataclass(frozen=True, slots=True)
class Row:
    """us: of a call of `what` for `tokens` tokens, of the slowest rank; behind: with a product before each."""

    what: str
    tokens: int
    behind: bool
    us: float


def slowest(of_ranks: Sequence[Mapping[tuple[str, int, bool], float]]) -> list[Row]:
    """One row for each thing timed, in the order of the first rank."""
    return [Row(*key, max(times[key] for times in of_ranks)) for key in of_ranks[0]]


def table(rows: Sequence[Row]) -> str:
    """A line for each number of tokens, a column for each thing timed."""
    columns = list(dict.fromkeys((r.what, r.behind) for r in rows))
    us = {(r.what, r.behind, r.tokens): f"{r.us:.2f}" for r in rows}
    names = [f"{what}{', behind' if behind and what != PRODUCT else ''}" for what, behind in columns]
    lines = [f"{'tokens':>6}  " + "  ".join(names)]
    for tokens in dict.fromkeys(r.tokens for r in rows):
        cells = (us.get((*c, tokens), "-").rjust(len(n)) for c, n in zip(columns, names, strict=True))
        lines.append(f"{tokens:>6}  " + "  ".join(cells))
    return "\n".join(lines)


def in_ranks(ranks: int, backend: str, work: Callable[..., Any], *given: Any) -> list[Any]:
    """What work(world, *given) gives in a process of each rank, joined in one group of torch.distributed.

    Both are picklable; results go by files as JSON. Raises KerngenError where one fails, with the tracebacks of those
    that did, since others may fail for want of it; all are ended.
    """
    import torch.multiprocessing as mp

    with tempfile.TemporaryDirectory(prefix="kerngen-ranks-") as folder:
        try:
            mp.spawn(_in_rank, (ranks, folder, backend, work, given), nprocs=ranks)
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as e:
            told = [path.read_text() for path in sorted(Path(folder).glob("*.error"))]
            raise KerngenError(f"a rank failed: {' '.join(told) or e}") from e
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(ranks)]


def _in_rank(
    rank: int, ranks: int, folder: str, backend: str, work: Callable[..., Any], given: tuple[Any, ...]
) -> None:
    import torch.distributed as dist

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # what is gathered on the host stays on it
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    try:
        result = work(World(rank, ranks), *given)
    except Exception:
        (Path(folder) / f"{rank}.error").write_text(f"rank {rank}: {traceback.format_exc()}")
        raise
    (Path(folder) / f"{rank}.json").write_text(json.dumps(result))
    dist.barrier(dist.new_group(backend="gloo"))  # nobody's memory goes away before all are done
    dist.destroy_process_group()


def timed_rank(world: World, tokens: Sequence[int], hidden: int, products: bool) -> dict[str, Any]:
    """Of one rank: times as [what, tokens, behind, us], the board, and why peers' memory is not shared if it is not."""
    import torch

    torch.cuda.set_device(world.rank)
    from kerngen.runtime.executors.peer_memory import PeerMemory, gather_by
    from kerngen.templates.exchange_best.spec import POSTED
    from kerngen.timing.measure import environment, target_here

    refused, memories = "", []
    try:
        for width in (hidden, POSTED):
            memories.append(PeerMemory(world, gather_by(), hidden=width, max_rows=max(tokens)))
    except KerngenError as e:
        refused, memories = str(e), []
    dtype = target_here().arch.dtype
    times: list[list[Any]] = []
    for count in tokens:
        calls = _calls(world, count, hidden, dtype, *(m.peers for m in memories))
        times += [[what, count, False, _replayed(call)] for what, call in calls.items()]
        if products:
            product = _product(world, count, hidden, dtype)
            times.append([PRODUCT, count, True, _replayed(product)])
            times += [[what, count, True, _replayed(partial(_both, product, call))] for what, call in calls.items()]
    torch.cuda.synchronize()
    for memory in memories:
        memory.close()
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return {"times": times, "refused": refused, "environment": {**environment(), "nccl": nccl}}


def _both(first: Callable[[], object], second: Callable[[], object]) -> None:
    first()
    second()


def _calls(world: World, tokens: int, hidden: int, dtype: str, *peers: Any) -> dict[str, Callable[[], object]]:
    """What is timed, checked. peers: of memory for rows, and for choices; or none."""
    import torch
    import torch.distributed as dist

    from kerngen.runtime.executors.collectives import Distributed
    from kerngen.runtime.ops import dense_weights
    from kerngen.runtime.ops.fallbacks import logit_of
    from kerngen.templates.add_norm.op import add_norm
    from kerngen.templates.common.rows.torch_rows import Draw
    from kerngen.templates.exchange_best.op import exchange_best
    from kerngen.templates.exchange_best.reference import best
    from kerngen.templates.exchange_norm.op import exchange_norm
    from kerngen.templates.exchange_norm.reference import expected_of

    device = torch.device("cuda", world.rank)
    shared, own = Draw(tokens, device), Draw(1000 * (world.rank + 1) + tokens, device)
    residual = shared.normal(tokens, hidden, dtype="fp32" if dtype == "fp16" else dtype)
    weights = [shared.normal(hidden, dtype=dtype, mean=1.0, std=0.25) for _ in range(2)]
    h = own.normal(tokens, hidden, dtype=dtype, std=0.5)
    zeros = torch.zeros_like(h)  # summed in place 120 times: a sum of anything else would be infinite
    norm = _loaded(add_norm(residual.clone(), zeros, weights[0], None, weights[1], 1e-6))

    # in eighths: a logit is the same in any order of its sum
    x, head = (d.normal(n, hidden, dtype=dtype, std=8.0).round_().div_(8) for d, n in ((shared, tokens), (own, HEAD)))
    rows, first = own.integers(0, HEAD, tokens), HEAD * world.rank
    collectives = Distributed(world)

    def nccl() -> None:
        dist.all_reduce(zeros)
        norm()

    def choice() -> None:
        collectives.best_of_ranks(logit_of(x, dense_weights(head), rows), rows + first)

    found: dict[str, Callable[[], object]] = {"add_norm": norm}
    if peers:
        of_rows, of_choices = peers
        for name, two_shot_from in (("exchange_norm", 0), ("exchange_norm in two shots", 1)):
            shots = replace(of_rows, two_shot_from=two_shot_from)

            def asked(given: Any = shots) -> Any:
                return exchange_norm(residual.clone(), h, weights[0], None, weights[1], 1e-6, given)

            call = asked()
            given = [{**call.arguments, "h": of} for of in _of_ranks(world, h)]
            _check(world, call, expected_of(call.problem, given))
            found[name] = _loaded(asked())
        call = exchange_best(x, head, rows, first, of_choices)
        _check(
            world, call, best(_of_ranks(world, logit_of(x, dense_weights(head), rows)), _of_ranks(world, rows + first))
        )
        found["exchange_best"] = _loaded(call)
    return found | {"NCCL and add_norm": nccl, "a choice by NCCL": choice}


def _of_ranks(world: World, mine: Any) -> Any:
    """[ranks, ...] of each rank's."""
    import torch
    import torch.distributed as dist

    parts = [torch.empty_like(mine) for _ in range(world.size)]
    dist.all_gather(parts, mine)
    return torch.stack(parts)


def _loaded(call: Any) -> Callable[[], None]:
    """What launches `call`, in its default configuration, as a forward does."""
    from kerngen.templates import find_kernel
    from kerngen.timing.measure import load, target_here

    kernel = find_kernel(call.kernel)
    function = load(kernel, call.problem, kernel.default_config(call.problem, target_here()))
    return partial(function.run, call.problem, call.arguments, in_forward=True, alone=True)


def _check(world: World, call: Any, expected: dict[str, Any]) -> None:
    """Raises NumericsError where a launch is not as `expected`, or ranks hold other bits."""
    import torch

    from kerngen.runtime.executors.peer_memory import gather_by
    from kerngen.templates import find_kernel
    from kerngen.timing.measure import compare

    kernel = find_kernel(call.kernel)
    _loaded(call)()
    torch.cuda.synchronize()
    result = compare(kernel, kernel.cases.case_for(call.problem), dict(call.arguments), expected)
    outputs = [call.arguments[n].view(torch.uint8).cpu().numpy().tobytes() for n in kernel.outputs]
    said = [
        json.loads(text)
        for text in gather_by()(json.dumps([result.message, hashlib.sha256(b"".join(outputs)).hexdigest()]).encode())
    ]
    if wrong := [f"rank {rank}: {message}" for rank, (message, _) in enumerate(said) if message]:
        raise NumericsError("; ".join(wrong))
    if len({digest for _, digest in said}) > 1:
        raise NumericsError(f"{call.problem}: ranks hold other bits")


def _product(world: World, tokens: int, hidden: int, dtype: str) -> Callable[[], object]:
    """x W^T, of two matrices in turn, so that none is in L2 already."""
    import torch

    from kerngen.templates.common.rows.torch_rows import Draw

    draw = Draw(1, torch.device("cuda", world.rank))
    x = draw.normal(tokens, hidden, dtype=dtype)
    matrices = [draw.normal(hidden, 5376, dtype=dtype) for _ in range(2)]
    out = torch.empty(tokens, 5376, dtype=x.dtype, device=x.device)
    turn = iter(range(sys.maxsize))
    return lambda: torch.mm(x, matrices[next(turn) % 2], out=out)


def _replayed(call: Callable[[], object]) -> float:
    """Microseconds a call on this rank."""
    import torch

    from kerngen.runtime.executors.peer_memory import gather_by

    together, stream = gather_by(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            call()
        torch.cuda.synchronize()
        together(b"")
        graph = torch.cuda.CUDAGraph()
        # NCCL's watchdog looks at events of its own meanwhile
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for _ in range(CALLS):
                call()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        times = []
        for sample in range(-WARM_UP, SAMPLES):
            together(b"")
            graph.replay()  # the ranks meet in it
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if sample >= 0:
                times.append(start.elapsed_time(end) * 1e3 / CALLS)
    torch.cuda.synchronize()
    return median(times)


def _numbers(_: object, option: click.Parameter, text: str) -> tuple[int, ...]:
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise UsageError(f"--{option.name} {text!r} is no list of positive numbers", hint="--tokens 1,8,32")
    return found


@click.command(help=(__doc__ or "").split("\n")[0])
@click.option("--ranks", type=int, default=0, help="GPUs of this host; all of them where it is left out.")
@click.option("--tokens", default=",".join(map(str, TOKENS)), callback=_numbers, help="Numbers of tokens.")
@click.option("--hidden", default=5376, help="Elements of a row, a multiple of 8.")
@click.option("--products/--no-products", default=True, help="Time each behind a product, too.")
@click.option("--json", "as_json", is_flag=True, help="Print the rows and what they were timed on as JSON.")
def main(ranks: int, tokens: tuple[int, ...], hidden: int, products: bool, as_json: bool) -> None:
    import torch

    there = torch.cuda.device_count()
    ranks = ranks or there
    if not 2 <= ranks <= min(there, 8):
        raise UsageError(f"{ranks} ranks; torch sees {there} GPUs, and 2 to 8 exchange", hint="--ranks 2")
    found = in_ranks(ranks, "cpu:gloo,cuda:nccl", timed_rank, tokens, hidden, products)
    times = [{(what, count, behind): us for what, count, behind, us in f["times"]} for f in found]
    rows = slowest(times)
    for reason in sorted({f["refused"] for f in found if f["refused"]}):
        print(reason, file=sys.stderr)
    if as_json:
        named = {"ranks": ranks, "hidden": hidden, "environment": found[0]["environment"]}
        print(json.dumps({**named, "rows": [asdict(row) for row in rows]}))
    else:
        print(table(rows))


if __name__ == "__main__":
    from kerngen.cli import run_command

    sys.exit(run_command(main, "python -m tools.bench_exchange"))
