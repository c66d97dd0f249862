"""Sums over vLLM's tensor-parallel group with the norms behind them: ranks as processes that gloo connects, or played.

No GPU: memory that GPUs share is played, and what exchange_norm gives is its reference of all ranks' summands.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import rank, serves
from torch import Tensor

if not serves("exchange"):
    pytest.skip("the part `exchange` is not for this release of vLLM", allow_module_level=True)
import test_model
from test_model import (
    EXPERTS,
    HIDDEN,
    PER_LAYER_INPUTS,
    AttendBetween,
    Checkpoint,
    compiled_in_pieces,
    kinds,
    make,
    needs_compiler,
    ours,
    require_compiled_right,
    run,
    small_vllm,
    text_config,
)

__all__ = ["small_vllm"]  # a fixture
pytestmark = pytest.mark.usefixtures("registered", "small_vllm")

RANK = os.environ.get("KERNGEN_TEST_RANK")  # of this process, where it is one of two
FEW, MANY = 7, 131  # tokens: one launch exchanges 128
SHAPE = {
    "num_global_key_value_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 256,
}  # halves: whole groups


class Played:
    """Memory that ranks share. aborted: once it was given up."""

    def __init__(self, world: Any, gather: Any, *, hidden: int, max_rows: int, device: Any) -> None:
        from kerngen.templates.values import Peers

        addresses = torch.zeros(world.size + 1, dtype=torch.int64)
        self.peers, self.aborted = Peers(addresses, world.rank, max_rows), Event()

    def abort(self) -> None:
        self.aborted.set()


@pytest.fixture
def exchange(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, as it is before any model is made."""
    from vllm.distributed import parallel_state

    from kerngen.vllm import exchange_v0_26 as module

    monkeypatch.setattr(module, "PeerMemory", Played)
    monkeypatch.setattr(module, "_memory", {})
    monkeypatch.setattr(parallel_state, "_NODE_COUNT", 1)
    monkeypatch.setattr(test_model, "INTERMEDIATE", 128)
    return module


def divided(hf: Any, compilation: Any = None, **settings: Any) -> Any:
    """A model of ours for one of two ranks. settings: of its ParallelConfig."""
    from vllm.config import ParallelConfig

    with pytest.MonkeyPatch.context() as patch:
        made = test_model.vllm_config

        def vllm_config(*args: Any, **kwargs: Any) -> Any:
            config = made(*args, **kwargs)
            config.compilation_config.pass_config.enable_sp = settings.pop("enable_sp", False)
            config.parallel_config = ParallelConfig()
            config.parallel_config.tensor_parallel_size = 2
            for name, value in {"disable_custom_all_reduce": False, **settings}.items():  # so it is on CUDA
                setattr(config.parallel_config, name, value)
            return config

        patch.setattr(test_model, "vllm_config", vllm_config)
        return make(ours(), hf, True, Checkpoint(hf).int4, compilation=compilation)


def reduces(model: Any) -> set[tuple[bool, bool]]:
    """Whether o_proj sums over ranks, and whether down_proj does, in any layer."""
    return {(layer.self_attn.o_proj.reduce_results, layer.mlp.down_proj.reduce_results) for layer in model.model.layers}


def counted(call: Callable[[], Any]) -> tuple[Any, dict[str, int]]:
    """What it gives, and how often which of our operators ran."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        out = call()
    return out, {e.key: e.count for e in profile.key_averages() if e.key.startswith(("kerngen::", "kerngen_vllm::"))}


# -- two processes


@pytest.mark.skipif(RANK is not None, reason="this is one of the two")
@pytest.mark.parametrize("changes", [{}, EXPERTS], ids=["dense", "experts"])
def test_two_ranks_give_what_one_gives(changes: dict[str, Any], tmp_path: Path) -> None:
    own = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"{__file__}::test_of_a_rank"]
    ranks = [
        subprocess.Popen(own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={
            **os.environ, "KERNGEN_TEST_RANK": str(i), "KERNGEN_TEST_FOLDER": str(tmp_path),
            "KERNGEN_TEST_CHANGES": json.dumps(changes), "GLOO_SOCKET_IFNAME": "lo",
        })
        for i in range(2)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=400)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    for process, text in zip(ranks, said, strict=True):
        assert process.returncode == 0, text
        assert "1 passed" in text, text
    outs = [torch.load(tmp_path / f"{i}.pt") for i in range(2)]
    for tokens in outs[0]:
        assert torch.equal(outs[0][tokens], outs[1][tokens]), f"{tokens} tokens: ranks have other bits"


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """vLLM's own, of the two processes."""
    from vllm.distributed import parallel_state

    where = f"file://{os.environ['KERNGEN_TEST_FOLDER']}/store"
    torch.distributed.init_process_group("gloo", init_method=where, rank=int(RANK or 0), world_size=2)
    monkeypatch.setattr(parallel_state, "_is_torch_default_pg_managed_by_vllm", True, raising=False)
    made = parallel_state.init_model_parallel_group([[0, 1]], int(RANK or 0), "gloo", group_name="tp")
    monkeypatch.setattr(parallel_state, "_TP", made)
    yield made
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(RANK is None, reason="a part of test_two_ranks_give_what_one_gives")
def test_of_a_rank(
    exchange: Any, group: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Numbers as of one rank; few tokens by launches that are loaded ahead, many by vLLM's all-reduce."""
    from vllm.distributed import parallel_state

    from kerngen.ops.devices import CPU
    from kerngen.templates import find_kernel
    from kerngen.templates.kernel import spread
    from kerngen.vllm import ahead

    asked = ahead.Ahead()
    monkeypatch.setattr(exchange, "AHEAD", asked)
    hf = text_config(**SHAPE, **json.loads(os.environ["KERNGEN_TEST_CHANGES"]))
    experts = hf.enable_moe_block
    inputs = {tokens: torch.arange(tokens) % 60 for tokens in (FEW, MANY, 1)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel_state, "_TP", rank())
        whole = make(ours(), hf, True, Checkpoint(hf).int4)
        in_bf16 = {tokens: run(whole, ids).float() for tokens, ids in inputs.items()}
        exact = {tokens: run(whole.float(), ids) for tokens, ids in inputs.items()}
    with caplog.at_level(logging.INFO, "vllm.kerngen"):
        mine = divided(hf)
    assert reduces(mine) == {(False, experts)}
    sums = 4 if experts else 8
    assert f"kerngen: {sums} sums over 2 ranks by exchange_norm, with the norms behind them, up to 128" in caplog.text
    ran: set[tuple[str, Any]] = set()
    execute = type(CPU).run

    def run_call(self: Any, call: Any, where: str) -> Any:
        if call.kernel != exchange.KERNEL:
            return execute(self, call, where)
        ran.add((call.kernel, call.problem))
        reference, found = find_kernel(call.kernel).reference, [None, None]
        torch.distributed.all_gather_object(found, call.arguments["h"])
        of_ranks = [{**call.arguments, "h": h} for h in found]
        for _, name, value in spread(reference.expected_of(call.problem, of_ranks)):
            call.arguments[name].copy_(value)
        return call.result

    monkeypatch.setattr(type(CPU), "run", run_call)
    outs = {}
    for tokens, ids in inputs.items():
        ran_before = len(ran)
        outs[tokens], ops = counted(lambda ids=ids: run(mine, ids))
        few = tokens <= 128
        assert (len(ran) > ran_before) == few
        assert ops["kerngen_vllm::exchange_add_norm"] == sums - (not experts)
        assert ops.get("kerngen_vllm::exchange_add_post_norm", 0) == (not experts)
        assert ("kerngen::exchange_norm_functional" in ops) == few
        found, expected = (outs[tokens].float(), in_bf16[tokens]), exact[tokens]
        errors = [float((f - expected).norm() / expected.norm()) for f in found]
        assert errors[0] <= 1.5 * errors[1] < 0.1, f"{tokens} tokens: {errors}"
    loaded = {each for grid in asked._grids for each in grid.problems()}
    assert ran <= loaded
    assert {p.num_tokens for _, p in loaded} >= {1, FEW, 128}
    torch.save(outs, Path(os.environ["KERNGEN_TEST_FOLDER"]) / f"{RANK}.pt")


# -- ranks that are played


def played(monkeypatch: pytest.MonkeyPatch, exchange: Any, other: Callable[[list[Any]], list[Any]]) -> list[bytes]:
    """A group of two whose other rank says `other` of what this one says; all that this one gave."""
    from vllm.distributed import parallel_state

    gathered: list[bytes] = []

    def gather(mine: bytes) -> list[bytes]:
        gathered.append(mine)
        return [mine, json.dumps(other(json.loads(mine))).encode()]

    group = rank(0, 2)
    group.unique_name, group.cpu_group, group.device, group.device_communicator = "tp:0", None, "cpu", None
    group.all_gather = lambda part, dim: torch.cat([part, part], dim)
    monkeypatch.setattr(parallel_state, "_TP", group)
    monkeypatch.setattr(exchange, "gather_by", lambda _: gather)
    return gathered


def alike(said: list[Any]) -> list[Any]:
    """With another process id, in another place where processes are counted."""
    return [*said[:2], "elsewhere", 1]


ALONE: list[tuple[dict[str, Any], str]] = [
    ({"disable_custom_all_reduce": True}, "--disable-custom-all-reduce is given, or implied"),
    ({"enable_dbo": True}, "two batches are under way on a GPU at once (--enable-dbo, --ubatch-size)"),
    ({"enable_sp": True}, "each rank has tokens of its own between its sums (enable_sp)"),
]


@pytest.mark.parametrize(("settings", "why"), ALONE, ids=["custom", "two batches", "sequence parallel"])
def test_what_all_ranks_know_is_refused_without_asking(
    exchange: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, settings: dict[str, Any], why: str
) -> None:
    gathered = played(monkeypatch, exchange, alike)
    with caplog.at_level(logging.INFO, "vllm.kerngen"):
        model = divided(text_config(**SHAPE), **settings)
    assert gathered == []
    require_vllms(model, why, caplog)


def require_vllms(model: Any, why: str, caplog: pytest.LogCaptureFixture) -> None:
    (line,) = (r.getMessage() for r in caplog.records if "sums over" in r.getMessage())
    assert line == f"kerngen: sums over ranks stay vLLM's: {why}"
    assert reduces(model) == {(True, True)}
    assert kinds(model) == ["DecoderLayer"] * 4, "the rest is served"
    _, ops = counted(lambda: run(model))
    assert not [name for name in ops if "exchange" in name]


def test_of_several_hosts_none_is_asked_but_where_vllm_found_the_ranks_on_one(
    exchange: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A host without kerngen would not answer."""
    from vllm.distributed import parallel_state

    gathered = played(monkeypatch, exchange, alike)
    monkeypatch.setattr(parallel_state, "_NODE_COUNT", 2)
    with caplog.at_level(logging.INFO, "vllm.kerngen"):
        require_vllms(divided(text_config(**SHAPE)), "the ranks are not known to be on one host", caplog)
    assert gathered == []
    parallel_state._TP.device_communicator = SimpleNamespace(ca_comm=SimpleNamespace(disabled=True))
    assert reduces(divided(text_config(**SHAPE))) == {(True, True)}
    parallel_state._TP.device_communicator.ca_comm.disabled = False
    assert reduces(divided(text_config(**SHAPE))) == {(False, False)}


def test_left_out_it_changes_nothing(
    exchange: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(exchange, "_is_chosen", False)
    played(monkeypatch, exchange, alike)
    with caplog.at_level(logging.INFO, "vllm.kerngen"):
        require_vllms(divided(text_config(**SHAPE)), "KERNGEN_VLLM does not name exchange", caplog)


@pytest.mark.parametrize(("other", "why"), [
    (lambda said: ["sm75 has none", *alike(said)[1:]], "rank 1: sm75 has none"),
    (lambda said: [None, said[1][1:], *alike(said)[2:]], "ranks 0 and 1 would leave other sums to vLLM"),
], ids=["a kernel is missing", "other layers"])  # fmt: skip
def test_ranks_refuse_together(
    exchange: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, other: Any, why: str
) -> None:
    played(monkeypatch, exchange, other)
    with caplog.at_level(logging.INFO, "vllm.kerngen"):
        require_vllms(divided(text_config(**SHAPE)), why, caplog)
    assert exchange._memory == {}


def test_memory_that_is_out_of_reach_leaves_the_sums_to_vllm(
    exchange: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from kerngen.errors import DeviceError

    def fails(*args: Any, **kwargs: Any) -> None:
        raise DeviceError("H200 GPU-0 cannot reach the memory of rank 1's H200 GPU-1: no peer access")

    played(monkeypatch, exchange, alike)
    monkeypatch.setattr(exchange, "PeerMemory", fails)
    with caplog.at_level(logging.INFO, "vllm.kerngen"):
        require_vllms(divided(text_config(**SHAPE)), "H200 GPU-0 cannot reach the memory of rank 1's H200 GPU-1: "
                      "no peer access", caplog)  # fmt: skip


def test_too_many_ranks_and_other_weights_are_vllms(
    exchange: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert exchange._why_not_here([], 2) == "no decoder layer is kerngen's"
    behind = [exchange.AddNorm(HIDDEN, "bf16", "bf16")]
    assert exchange._why_not_here(behind, 8) is None
    assert exchange._why_not_here(behind, 9) == "ranks=9 is not in 2..8"


def test_memory_is_made_once_for_all_models(exchange: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    played(monkeypatch, exchange, alike)
    for changes in ({}, PER_LAYER_INPUTS):
        assert reduces(divided(text_config(**SHAPE, **changes))) == {(False, False)}
        (kept,) = exchange._memory.items()
        assert kept[0] == ("tp:0", HIDDEN)
    monkeypatch.setattr(exchange, "PeerMemory", None)
    divided(text_config(**SHAPE))


def test_graphs_with_the_sums_are_not_taken_for_those_without(exchange: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's key of compiled graphs, by which it takes them without tracing the model, says nothing of either."""
    from vllm.compilation.caching import aot_compile_hash_factors

    from kerngen.vllm import plugin

    monkeypatch.setattr(plugin, "_in_graphs", ["as registered"])
    played(monkeypatch, exchange, alike)
    keys = []
    for no_all_reduce in (True, False, False):
        model = divided(text_config(**SHAPE), disable_custom_all_reduce=no_all_reduce)
        assert reduces(model) == {(no_all_reduce, no_all_reduce)}
        config = model.model.vllm_config.parallel_config
        keys.append((config.compute_hash(), vllm_env_key()))
    assert keys[0][0] == keys[1][0]
    assert keys[0][1] != keys[1][1] == keys[2][1]
    assert "compile_factors()" in inspect.getsource(aot_compile_hash_factors)


def vllm_env_key() -> str:
    from vllm import envs
    from vllm.config.utils import hash_factors

    return hash_factors(envs.compile_factors())


def test_addresses_are_not_in_what_sleep_empties(exchange: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []

    def keep(device: Any, make: Callable[[], Tensor]) -> Tensor:
        kept.append(make())
        return kept[-1]

    played(monkeypatch, exchange, alike)
    monkeypatch.setattr(exchange, "kept_in_sleep", keep)
    divided(text_config(**SHAPE))
    (memory,) = exchange._memory.values()
    assert [memory.peers.addresses.data_ptr()] == [t.data_ptr() for t in kept]


def test_the_matrix_behind_per_layer_inputs_is_no_summand(exchange: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank has all of it: its norm follows without a sum."""
    played(monkeypatch, exchange, alike)
    model = divided(text_config(**SHAPE, **PER_LAYER_INPUTS))
    _, ops = counted(lambda: run(model))
    assert {n: c for n, c in ops.items() if "norm" in n and n.startswith("kerngen_vllm")} == {
        "kerngen_vllm::exchange_add_norm": 4, "kerngen_vllm::exchange_add_post_norm": 4,
    }  # fmt: skip
    assert ops["kerngen::add_norm_functional"] == 3


# -- the operators


def arguments(tokens: int = FEW) -> tuple[Any, ...]:
    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape) + shape[0])).bfloat16()

    return drawn(tokens, HIDDEN), drawn(tokens, HIDDEN), drawn(HIDDEN), drawn(1), drawn(HIDDEN), 1e-6


@pytest.mark.parametrize("tokens", [FEW, MANY])
def test_torch_holds_them_to_what_they_say(exchange: Any, monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    played(monkeypatch, exchange, alike)
    residual, h, post, scalar, after, eps = arguments(tokens)
    exchange._memory["tp:0", HIDDEN] = Played(SimpleNamespace(rank=0, size=2), None, hidden=HIDDEN, max_rows=128,
                                              device="cpu")  # fmt: skip
    ops = torch.ops.kerngen_vllm
    torch.library.opcheck(ops.exchange_add_norm.default, (residual, h, post, scalar, after, eps))
    torch.library.opcheck(ops.exchange_add_post_norm.default, (residual, h, post, None, eps))


def test_one_graph_serves_few_tokens_and_many(exchange: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled once for any number of tokens, it decides as it runs."""
    played(monkeypatch, exchange, alike)
    exchange._memory["tp:0", HIDDEN] = Played(SimpleNamespace(rank=0, size=2), None, hidden=HIDDEN, max_rows=128,
                                              device="cpu")  # fmt: skip
    asked = []
    monkeypatch.setattr(exchange, "tensor_model_parallel_all_reduce", lambda h: asked.append(len(h)) or h + h)
    graphs = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def layer(*given: Any) -> Tensor:
        stream, normed = torch.ops.kerngen_vllm.exchange_add_norm(*given)
        out: Tensor = torch.ops.kerngen_vllm.exchange_add_post_norm(stream, normed, given[2], None, given[5])
        return out

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
    for tokens in (FEW, MANY, 128, 129):
        given = arguments(tokens)
        torch.testing.assert_close(compiled(*given), layer(*given), rtol=0, atol=0)
    assert len(graphs) == 1
    assert asked == [MANY] * 4 + [129] * 4


@needs_compiler
def test_compiled_by_vllm_in_pieces(exchange: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In one graph for three tokens and five, which one launch sums here, and seven."""
    from vllm.model_executor.models import gemma4

    from kerngen.templates.values import Peers

    played(monkeypatch, exchange, alike)
    monkeypatch.setattr(Peers, "holds", lambda self, x, rows=1: len(x) <= 5)
    monkeypatch.setattr(gemma4, "Attention", AttendBetween)
    settings = compiled_in_pieces(monkeypatch, tmp_path, ["kerngen_in_vllm::attend"])
    model = divided(text_config(**SHAPE), settings).float()
    assert reduces(model) == {(False, False)}
    require_compiled_right(model.model)


def test_a_rank_that_ends_ends_what_waits_for_it(exchange: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "GRACE_S", 0.3)
    given_up = Event()
    with subprocess.Popen(["sleep", "60"]) as peer:
        exchange._abort_without([peer.pid], given_up.set)
        assert not given_up.wait(0.2), "it is alive"
        peer.kill()
        began = time.monotonic()
        assert given_up.wait(10)
        assert time.monotonic() - began > 0.2, "vLLM ends this process first, if it can"


def test_a_python_that_cannot_watch_processes_serves_too(exchange: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """os.pidfd_open is missing where Python was built on a Linux before 5.3."""
    monkeypatch.delattr(os, "pidfd_open")
    played(monkeypatch, exchange, lambda said: [*said[:3], 1])
    assert reduces(divided(text_config(**SHAPE))) == {(False, False)}


def test_what_is_called_is_there_in_vllm() -> None:
    """Names that are used of vLLM and stand in no signature of ours."""
    from vllm.config import CompilationConfig, ParallelConfig, PassConfig
    from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator
    from vllm.distributed.device_communicators.custom_all_reduce import CustomAllreduce
    from vllm.model_executor.layers.linear import RowParallelLinear

    assert {"disable_custom_all_reduce", "tensor_parallel_size"} <= set(ParallelConfig.__dataclass_fields__)
    assert isinstance(ParallelConfig.use_ubatching, property)
    assert "pass_config" in CompilationConfig.__dataclass_fields__
    assert "enable_sp" in PassConfig.__dataclass_fields__
    assert "self.reduce_results" in inspect.getsource(RowParallelLinear.forward)
    assert "self.ca_comm" in inspect.getsource(CudaCommunicator.__init__)
    assert "self.disabled" in inspect.getsource(CustomAllreduce.__init__)
