"""What w4a16_gemm hands to vLLM's operators, by operators of ours that read it as vLLM's do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from kerngen.errors import UsageError
from kerngen.templates import find_kernel
from kerngen.templates.w4a16_gemm import bench, peers
from kerngen.timing.measure import load_peers

GEMM = find_kernel("w4a16_gemm")
N, K, M = 256, 384, 5


def _dense(b_q: Tensor, scales: Tensor) -> Tensor:
    """[K, N] of vLLM's packed [K / 8, N] int32, the lowest of eight values in the lowest nibble, and scales [G, N]."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32).view(1, 8, 1)
    values = ((b_q.unsqueeze(1) >> shifts) & 15).reshape(-1, b_q.shape[1]) - 8
    return values.float() * scales.float().repeat_interleave(values.shape[0] // scales.shape[0], 0)


class Fakes:
    """Marlin's scales are in an order of their own; both keep weights as they come."""

    off = 1.0

    def repack(self, b_q: Tensor, perm: Tensor, k: int, n: int, bits: int, a8: bool) -> Tensor:
        assert (tuple(b_q.shape), perm.numel(), bits, a8) == ((k // 8, n), 0, 4, False)
        assert b_q.is_contiguous()
        return b_q.clone()

    def marlin(self, a: Tensor, c: Any, b_q: Tensor, bias: Any, scales: Tensor, a_scales: Any, all_scale: Any,
               zeros: Any, g_idx: Any, perm: Any, workspace: Tensor, kind: int, m: int, n: int, k: int, full: bool,
               atomic: bool, fp32: bool, zp_float: bool) -> Tensor:  # fmt: skip
        assert (kind, m, n, k, full, fp32) == (1125899907892224, *a.shape[:1], b_q.shape[1], a.shape[1], True, True)
        assert not any([atomic, zp_float, *(x is not None for x in (c, bias, a_scales, all_scale, zeros, g_idx, perm))])
        assert workspace.dtype == torch.int32
        assert not workspace.any()
        # marlin_permute_scales: of 64 columns, or of 32 where a column has one scale
        order = [i + 8 * j for i in range(8) for j in range(8)]
        if len(scales) == 1:
            order = [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]
        given = torch.empty_like(scales).view(-1, len(order))
        given[:, order] = scales.view(-1, len(order))
        return (a.float() @ _dense(b_q, given.view(scales.shape)) * self.off).to(a.dtype)

    def prepack(self, b_q: Tensor, a_type: torch.dtype, kind: int, scales_type: torch.dtype) -> Tensor:
        assert b_q.t().is_contiguous(), "columns lie together"
        assert (kind, a_type, scales_type) == (1125899907892224, torch.bfloat16, torch.bfloat16)
        return b_q.clone()

    def machete(self, a: Tensor, b_q: Tensor, kind: int, out: Any, scales: Tensor, zeros: Any, group: int, channel: Any,
                token: Any, schedule: Any) -> Tensor:  # fmt: skip
        assert group == a.shape[1] // scales.shape[0]
        assert scales.is_contiguous()
        return (a.float() @ _dense(b_q, scales) * self.off).to(a.dtype)


@pytest.fixture(autouse=True)
def none_at_hand(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever is installed here."""

    def absent(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.delenv("KERNGEN_PEERS", raising=False)
    monkeypatch.setattr(peers, "import_module", absent)
    peers.operators.cache_clear()
    yield
    peers.operators.cache_clear()


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Fakes:
    found = Fakes()
    ops = {"gptq_marlin_repack": found.repack, "marlin_gemm": found.marlin, "machete_prepack_B": found.prepack,
           "machete_mm": found.machete}  # fmt: skip
    for name, op in ops.items():
        monkeypatch.setattr(torch.ops._C, name, op, raising=False)
    return found


def _inputs(group_size: int = 32, k: int = K) -> tuple[Any, dict[str, Any]]:
    case = GEMM.cases.case_for(GEMM.problem_type(n=N, k=k, num_tokens=M, group_size=group_size))
    return case, GEMM.cases.inputs(case, torch.device("cpu"))


@pytest.mark.parametrize(("group_size", "k"), [(32, K), (128, K), (128, 128)])
def test_they_multiply_the_same_weights(fakes: Fakes, group_size: int, k: int) -> None:
    case, inputs = _inputs(group_size, k)
    calls = bench.baselines(case, inputs)
    assert list(calls) == ["cublas dense", "marlin", "machete"]
    want = GEMM.reference.expected(case.problem, inputs)["out"].float()
    for call in calls.values():
        got: Any = call()
        assert (got.float() - want).abs().max() < 0.01 * want.abs().max()


def test_one_that_is_wrong_is_not_timed(fakes: Fakes) -> None:
    fakes.off = 1.1
    calls = bench.baselines(*_inputs())
    with pytest.raises(RuntimeError, match=r"machete.* 0\.\d+"):
        calls["machete"]()


def test_one_that_refuses_a_shape_says_so(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Tensor:
        raise RuntimeError("size_n = 96 is not divisible by 64\nat marlin.cu")

    monkeypatch.setattr(torch.ops._C, "gptq_marlin_repack", refuse)
    calls = bench.baselines(*_inputs())
    with pytest.raises(RuntimeError, match=r"^size_n = 96[^\n]*64$"):
        calls["marlin"]()
    calls["machete"]()


def test_without_vllm_there_are_none() -> None:
    assert list(bench.baselines(*_inputs())) == ["cublas dense"]


def test_a_library_that_is_named_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNGEN_PEERS", "/nowhere/lib.so")
    with pytest.raises(UsageError, match=r"KERNGEN_PEERS: .*/nowhere/lib\.so"):
        load_peers()


def test_memory_that_ends_is_no_refusal(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    def end(*_: Any) -> Tensor:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(torch.ops._C, "gptq_marlin_repack", end)
    with pytest.raises(torch.OutOfMemoryError):
        bench.baselines(*_inputs())
