"""The heads of drafters inside vLLM on a GPU: captured in a CUDA graph after their kernels were loaded ahead."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kerngen.templates.centroid_head.spec import Problem as CentroidHead
from kerngen.templates.greedy_head.spec import Problem as GreedyHead
from kerngen.templates.greedy_head.spec import most_tokens
from kerngen.vllm.plugin import PARTS, release_of

vllm = pytest.importorskip("vllm", reason="vLLM is not installed here")
if release_of(vllm.__version__) not in PARTS["head"].releases:
    pytest.skip(f"the part `head` is not for vLLM {vllm.__version__}", allow_module_level=True)


def _dtype() -> str:
    return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"


def _dense(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any, int]:
    """(x -> tokens, x -> those expected, the most rows) of a head with likely bounds and two tokens that it must not
    give.
    """
    from kerngen.templates.greedy_head import cases, reference
    from kerngen.vllm import head_v0_26 as ours

    most = most_tokens(ours.target())
    problem = GreedyHead(100000, 1024, _dtype(), most, 4)
    given = cases.inputs(cases.case_for(problem, kind="likely"), "cuda")
    bounds = given["bounds"]
    excluded = reference.expected(problem, given)["ids"].long()[:2].tolist()
    bounds[excluded] = float("nan")
    head: Any = nn.Module()
    head.weight = nn.Parameter(given["weight"], requires_grad=False)
    head.shard_indices = SimpleNamespace(org_vocab_start_index=0, org_vocab_end_index=problem.vocab_size)
    head.tp_size = 1
    head.quant_method = ours.Screened(problem, most, excluded)
    head.quant_method.process_weights_after_loading(head)

    def expected(x: Tensor) -> Tensor:
        return reference.expected(problem, {**given, "x": x})["ids"].long()

    return (lambda x: head.quant_method.best(head, x)), expected, most


def _centroids(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any, int]:
    from kerngen.templates.centroid_head import cases, reference
    from kerngen.vllm import head_v0_26 as ours

    problem = CentroidHead(2048, 16, 32, 256, _dtype(), num_tokens=64)
    given = cases.inputs(cases.case_for(problem, kind="normal"), "cuda")
    with torch.device("cuda"):
        embedder = ours.MaskedEmbedder(256, 2048 * 16, 2048, 32)
    embedder.centroids.weight = nn.Parameter(given["centroids"])
    embedder.token_ordering.copy_(given["token_ids"].flatten())
    ours.AHEAD.ask_all(ours.Rows("centroid_head", problem, 64))
    ours.Beside().process_weights_after_loading(SimpleNamespace(weight=given["embed"]))

    def expected(x: Tensor) -> Tensor:
        return reference.expected(problem, {**given, "y": x})["ids"].long()

    return (lambda x: embedder.get_top_tokens(x, given["embed"])), expected, 64


@pytest.mark.parametrize("make", [_dense, _centroids], ids=["dense", "centroids"])
def test_captured_drafts_are_the_greatest_logits(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of as many rows as there may be. No kernel was launched before: the capture would fail where one was loaded, or
    allocated scratch memory.
    """
    from kerngen.ops import devices, use_stores
    from kerngen.vllm import ahead
    from kerngen.vllm import head_v0_26 as ours

    monkeypatch.setattr(ours, "AHEAD", ahead.Ahead())
    use_stores([])  # nothing of it was loaded before
    try:
        draft, expected, most = make(monkeypatch)
        device = torch.device("cuda", torch.cuda.current_device())
        loaded = {f for _, _, f in devices.executor(device).launcher.functions}
        hidden = 1024 if make is _dense else 256
        random = torch.Generator("cuda").manual_seed(6)
        graphs: list[tuple[Any, Tensor, Tensor]] = []
        for rows in (1, 3, 4, 8, 17, most):
            if rows <= most:
                x = torch.zeros(rows, hidden, device="cuda", dtype=torch.bfloat16 if _dtype() == "bf16" else torch.half)
                graph = torch.cuda.CUDAGraph()
                torch.cuda.synchronize()
                with torch.cuda.graph(graph):
                    tokens = draft(x)
                graphs.append((graph, x, tokens))
        for _ in range(2):
            for graph, x, tokens in graphs:
                # Small multiples of 1/8: fp32 sums their products exactly in any order.
                x.copy_(torch.randn(x.shape, generator=random, device="cuda").mul_(8).round_().clamp_(-40, 40).div_(8))
                graph.replay()
                assert torch.equal(tokens, expected(x))
                assert torch.equal(draft(x), tokens)
        assert {f for _, _, f in devices.executor(device).launcher.functions} == loaded
    finally:
        use_stores(None)
