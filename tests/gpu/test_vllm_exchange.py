"""Sums over ranks inside vLLM on GPUs: in CUDA graphs that are replayed with launches between, of kernels that were
loaded ahead. With ranks as streams of one GPU, and as two processes in a group of vLLM's.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from exchange_ranks import Streams
from torch import Tensor

from kerngen.templates import find_kernel
from kerngen.templates.add_norm.spec import Problem as AddNorm
from kerngen.templates.exchange_norm.spec import Problem
from kerngen.templates.values import Peers
from kerngen.timing.measure import compare, target_here
from kerngen.vllm.plugin import PARTS, release_of

vllm = pytest.importorskip("vllm", reason="vLLM is not installed here")
if release_of(vllm.__version__) not in PARTS["exchange"].releases:
    pytest.skip(f"the part `exchange` is not for vLLM {vllm.__version__}", allow_module_level=True)

KERNEL = find_kernel("exchange_norm")
FEW, MANY = (1, 3, 8, 32), 200  # tokens; more than 128 are summed by vLLM's all-reduce
CYCLES_A_US = 1500  # about


class Sublayers:
    """Two of a rank: one with a norm behind it, then one without. hs [ranks][2] are all ranks' summands."""

    def __init__(self, tokens: int, hidden: int, ranks: int, dtype: torch.dtype) -> None:
        draw = torch.Generator("cuda").manual_seed(tokens)

        def drawn(*shape: int, mean: float = 0.0) -> Tensor:
            return (mean + torch.randn(*shape, generator=draw, device="cuda") / 2).to(dtype)

        self.residual = drawn(tokens, hidden)
        self.hs = [[drawn(tokens, hidden) for _ in range(2)] for _ in range(ranks)]
        self.post, self.after, self.scalar = drawn(hidden, mean=1.0), drawn(hidden, mean=1.0), drawn(1, mean=0.7)

    def run(self, rank: int) -> list[Tensor]:
        ops = torch.ops.kerngen_vllm
        first, second = self.hs[rank]
        stream, normed = ops.exchange_add_norm(self.residual, first, self.post, self.scalar, self.after, 1e-6)
        return [stream, normed, ops.exchange_add_post_norm(stream, second, self.post, None, 1e-6)]

    def require_right(self, found: list[Tensor]) -> None:
        """As the reference, each of what it was given."""
        stream, normed, last = found
        tokens, hidden = stream.shape
        dtype = target_here().arch.dtype
        given: dict[str, Any] = {"post_weight": self.post, "next_weight": self.after, "eps": 1e-6}
        steps = [
            (0, {"residual": self.residual, "layer_scalar": self.scalar}, {"residual_out": stream, "out": normed}),
            (1, {"residual": stream, "layer_scalar": None}, {"residual_out": last}),
        ]
        for at, own, outputs in steps:
            problem = Problem(len(self.hs), hidden, dtype, dtype, 0, own["layer_scalar"] is not None, "out" in outputs,
                              tokens)  # fmt: skip
            of_ranks = [{**given, **own, "h": hs[at]} for hs in self.hs]
            expected = KERNEL.reference.expected_of(problem, of_ranks)
            result = compare(KERNEL, KERNEL.cases.case_for(problem), outputs, expected)
            assert result.ok, f"{tokens} tokens: {result.message}"


class Replayed:
    """Sublayers of one rank in a CUDA graph. wrong: how many of its replays differ from what is right."""

    def __init__(self, layers: Sublayers, rank: int, right: list[Tensor], capture: Callable[..., Any]) -> None:
        self.wrong = torch.zeros(1, dtype=torch.int64, device="cuda")
        self.graph = torch.cuda.CUDAGraph()
        with capture(self.graph):
            found = layers.run(rank)
            for mine, its in zip(found, right, strict=True):
                self.wrong.add_((mine != its).any())  # NaN differs from itself


def _dtype() -> torch.dtype:
    return torch.bfloat16 if target_here().arch.dtype == "bf16" else torch.float16


def test_ranks_of_one_gpu_in_graphs_with_launches_between(monkeypatch: pytest.MonkeyPatch) -> None:
    from kerngen.ops import devices, use_stores
    from kerngen.vllm import ahead
    from kerngen.vllm import exchange_v0_26 as exchange

    ranks, hidden, most = 2, 512, max(FEW)
    gpu = Streams(ranks, most, hidden)
    dtype = target_here().arch.dtype
    memory = {
        (f"rank {r}", hidden): SimpleNamespace(peers=Peers(gpu.addresses, r, most, two_shot_from=8))
        for r in range(ranks)
    }
    now = SimpleNamespace(unique_name="")
    monkeypatch.setattr(exchange, "_memory", memory)
    monkeypatch.setattr(exchange, "get_tp_group", lambda: now)
    use_stores([])  # nothing of it was loaded before
    try:
        asked = ahead.Ahead()
        for problem in (
            Problem(ranks, hidden, dtype, dtype, 0, True),
            Problem(ranks, hidden, dtype, dtype, 0, False, False),
        ):
            asked.ask_all(exchange.Rows(problem, most))
        asked.load(device := torch.device("cuda", torch.cuda.current_device()))
        loaded = {f for _, _, f in devices.executor(device).launcher.functions}
        layers = [Sublayers(tokens, hidden, ranks, _dtype()) for tokens in FEW]

        def each(do: Callable[[int], Any], draw: Random) -> list[Any]:
            """Of every rank, on its stream, in any order."""
            found: dict[int, Any] = {}
            for r in draw.sample(range(ranks), ranks):
                now.unique_name = f"rank {r}"
                with torch.cuda.stream(gpu.streams[r]):
                    if draw.random() < 0.3:
                        torch.cuda._sleep(draw.randrange(20 * CYCLES_A_US))
                    found[r] = do(r)
            return [found[r] for r in range(ranks)]

        draw = Random(1)
        torch.cuda.synchronize()
        with gpu.watched():
            right = [each(its.run, draw) for its in layers]
        for its, of_ranks in zip(layers, right, strict=True):
            its.require_right(of_ranks[0])
            assert all(torch.equal(a, b) for a, b in zip(*of_ranks, strict=True)), "ranks have other bits"

        def captured(its: Sublayers, r: int, want: list[Tensor]) -> Replayed:
            now.unique_name = f"rank {r}"
            return Replayed(its, r, want, lambda graph: torch.cuda.graph(graph, stream=gpu.streams[r]))

        graphs = [[captured(its, r, want[r]) for r in range(ranks)] for its, want in zip(layers, right, strict=True)]
        with gpu.watched():
            for turn in range(500):
                replayed, between = draw.randrange(len(FEW)), draw.randrange(len(FEW))
                each(lambda r, at=replayed: graphs[at][r].graph.replay(), draw)
                if turn % 3 == 0:
                    each(layers[between].run, draw)
                if turn % 50 == 49:
                    torch.cuda.synchronize()
        assert [[int(g.wrong) for g in of] for of in graphs] == [[0] * ranks] * len(FEW)
        gpu.require_clean()
        assert {f for _, _, f in devices.executor(device).launcher.functions} == loaded
    finally:
        use_stores(None)


# -- two processes


def _share(rank: int, folder: str, hidden: int) -> torch.device:
    """Be a rank of vLLM's with the memory that is shared, kernels loaded."""
    torch.cuda.set_device(rank)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    from kerngen.vllm import exchange_v0_26 as exchange
    from kerngen.vllm.ahead import AHEAD

    dtype, device = target_here().arch.dtype, torch.device("cuda", rank)
    exchange.install()
    config: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=2, disable_custom_all_reduce=False, use_ubatching=False),
        compilation_config=SimpleNamespace(pass_config=SimpleNamespace(enable_sp=False)),
    )
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(2, rank, f"file://{folder}/store", rank)
        parallel_state.initialize_model_parallel(2)
        behind = [AddNorm(hidden, dtype, dtype, has_scalar=True), AddNorm(hidden, dtype, dtype, has_next=False)]
        if not exchange.share(hidden, ["these"], behind, config):
            raise RuntimeError("vLLM's all-reduce stays: its log says why")
        for problem in behind:
            AHEAD.ask("add_norm", problem)
        AHEAD.load(device)
    return device


def _replays(rank: int, folder: str, replays: int) -> None:
    """A rank: graphs of few tokens and of many in an order that both draw, with launches outside of graphs between."""
    from vllm.distributed import parallel_state

    device = _share(rank, folder, 5376)
    layers = [Sublayers(tokens, 5376, 2, _dtype()) for tokens in (*FEW, MANY)]
    right = [its.run(rank) for its in layers]
    for its, found in zip(layers, right, strict=True):
        its.require_right(found)
    graphs = []
    with parallel_state.graph_capture(device) as context:

        def captures(graph: torch.cuda.CUDAGraph) -> AbstractContextManager[None]:
            return torch.cuda.graph(graph, stream=context.stream)

        graphs += [Replayed(its, rank, found, captures) for its, found in zip(layers, right, strict=True)]
    draw, own = Random(1), Random(rank)
    for turn in range(replays):
        if own.random() < 0.05:
            torch.cuda._sleep(own.randrange(200 * CYCLES_A_US))
        graphs[draw.randrange(len(graphs))].graph.replay()
        if draw.random() < 0.2:
            layers[draw.randrange(len(layers))].run(rank)
        if turn % 100 == 99:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    Path(folder, str(rank)).write_text(f"wrong: {[int(g.wrong) for g in graphs]}")
    os._exit(0)  # without what libraries do together at the end


def _waits(rank: int, folder: str, _: int) -> None:
    """A rank that waits for the other on the GPU, which has ended as kill -9 ends it. SIGTERM ends it with exit code 3,
    once Python sees it.
    """
    signal.signal(signal.SIGTERM, lambda *_: os._exit(3))  # vLLM's worker raises SystemExit there
    _share(rank, folder, 5376)
    layers = Sublayers(4, 5376, 2, _dtype())
    layers.run(rank)
    torch.cuda.synchronize()
    Path(folder, f"{rank}-is-ready").touch()
    if rank == 1:
        while not Path(folder, "0-is-ready").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        layers.run(rank)
        torch.cuda.synchronize()
    except RuntimeError:  # the dead rank's memory may be gone
        pass
    time.sleep(60)


needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two processes with a GPU each need two GPUs")


def _started(target: Any, folder: Path, replays: int = 0) -> list[Any]:
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=target, args=(r, str(folder), replays)) for r in range(2)]
    for process in ranks:
        process.start()
    return ranks


def _end(ranks: list[Any]) -> None:
    for process in ranks:
        if process.is_alive():
            process.kill()
        process.join()


@needs_two
@pytest.mark.whole_gpu(smoke=False)
def test_two_processes_of_vllms_replay_graphs_with_launches_between(tmp_path: Path) -> None:
    ranks = _started(_replays, tmp_path, 20_000)
    try:
        for process in ranks:
            process.join(400)
    finally:
        _end(ranks)
    left = [(tmp_path / str(r)).read_text() if (tmp_path / str(r)).exists() else "" for r in range(2)]
    assert left == [f"wrong: {[0] * (len(FEW) + 1)}"] * 2
    assert [p.exitcode for p in ranks] == [0, 0]


@needs_two
@pytest.mark.whole_gpu(smoke=False)
def test_a_rank_that_waits_for_one_that_was_killed_sees_the_signal(tmp_path: Path) -> None:
    """As vLLM ends it: by SIGTERM. It need not be killed."""
    ranks = _started(_waits, tmp_path)
    try:
        ranks[1].join(300)
        assert ranks[1].exitcode == -signal.SIGKILL
        time.sleep(0.5)  # the other polls
        ranks[0].terminate()
        began = time.monotonic()
        ranks[0].join(30)
        assert ranks[0].exitcode == 3
        assert time.monotonic() - began < 5.0, "vLLM waits no longer"
    finally:
        _end(ranks)
