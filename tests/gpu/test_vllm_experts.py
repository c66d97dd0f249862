"""A layer's experts inside vLLM on a GPU, from routing to the next norm: captured in CUDA graphs after their kernels
were loaded ahead.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kerngen.templates import find_kernel
from kerngen.templates.moe_combine.spec import Problem as EndOfLayer
from kerngen.templates.moe_router.spec import Problem as Router
from kerngen.templates.moe_w4a16.spec import Problem as Experts
from kerngen.timing.measure import compare, target_here
from kerngen.vllm.plugin import PARTS, release_of

vllm = pytest.importorskip("vllm", reason="vLLM is not installed here")
if release_of(vllm.__version__) not in PARTS["moe"].releases:
    pytest.skip(f"the part `moe` is not for vLLM {vllm.__version__}", allow_module_level=True)

HIDDEN, EXPERTS, TOP_K, INNER, GROUP = 512, 32, 8, 128, 32
TOKENS = (1, 2, 4, 5, 8, 33, 300)  # up to four the experts have no plan


class Layer:
    """What `end_of_layer` reads of a layer of vLLM's, and its inputs: residuals whose logits lie apart."""

    def __init__(self, dtype: str, device: str) -> None:
        self.router_problem = Router(HIDDEN, EXPERTS, TOP_K, dtype, dtype, max(TOKENS))
        cases = find_kernel("moe_router").cases
        given = cases.inputs(cases.case_for(self.router_problem), device)
        self.residual, self.routing = given.pop("residual"), given
        draw = torch.Generator(device).manual_seed(7)

        def drawn(*shape: int, mean: float = 0.0, std: float = 0.25) -> Tensor:
            return (mean + std * torch.randn(*shape, generator=draw, device=device)).to(self.residual.dtype)

        def packed(*shape: int) -> Tensor:
            return torch.randint(-(2**31), 2**31, shape, generator=draw, device=device).int()

        self.dense = drawn(max(TOKENS), HIDDEN)
        self.norms = {
            name: SimpleNamespace(weight=drawn(HIDDEN, mean=1.0))
            for name in ("post_feedforward_layernorm_1", "post_feedforward_layernorm_2", "post_feedforward_layernorm")
        }
        self.next_norm = SimpleNamespace(weight=drawn(HIDDEN, mean=1.0))
        h, i = HIDDEN // 32, INNER // 32
        routed_experts = SimpleNamespace(
            w13_weight_packed=packed(EXPERTS, 2 * i, h, 32, 4),
            w13_weight_scale=drawn(EXPERTS, 2 * i, HIDDEN // GROUP, 32, mean=0.04, std=0.004),
            w2_weight_packed=packed(EXPERTS, h, i, 32, 4),
            w2_weight_scale=drawn(EXPERTS, h, INNER // GROUP, 32, mean=0.04, std=0.004),
        )
        config = SimpleNamespace(num_experts=EXPERTS, experts_per_token=TOP_K)
        self.layer: Any = SimpleNamespace(
            **self.norms, hidden_size=HIDDEN, layer_scalar=drawn(1, mean=0.7, std=0.1),
            router=SimpleNamespace(norm=SimpleNamespace(variance_epsilon=given["eps"]), scale=given["router_scale"],
                                   proj=SimpleNamespace(weight=given["router"])),
            moe=SimpleNamespace(per_expert_scale=given["per_expert_scale"],
                                experts=SimpleNamespace(moe_config=config, routed_experts=routed_experts)),
            pre_feedforward_layernorm_2=SimpleNamespace(weight=given["pre_norm"]),
        )  # fmt: skip

    def run(self, residual: Tensor, dense: Tensor) -> tuple[Tensor, Tensor]:
        """(the stream behind the layer, its norm)"""
        from kerngen.vllm.expert_layer_v0_26 import end_of_layer

        normed, stream = end_of_layer(self.layer, residual, dense, self.next_norm)
        assert stream is not None
        return stream, normed

    def require_right(self, residual: Tensor, dense: Tensor, stream: Tensor, normed: Tensor) -> None:
        """As the references, of what the launches before gave."""
        from kerngen.vllm.moe_v0_26 import multiply

        router, combine = find_kernel("moe_router"), find_kernel("moe_combine")
        tokens, dtype, g = len(residual), self.router_problem.dtype, self.routing
        problem: Any = Router(HIDDEN, EXPERTS, TOP_K, dtype, dtype, tokens)
        weights = g["router_scale"], g["router"], g["per_expert_scale"], g["pre_norm"]
        ids, topk_weights, x = torch.ops.kerngen.moe_router(residual, *weights, TOP_K, g["eps"])
        found = {"topk_ids": ids, "topk_weights": topk_weights, "x": x}
        expected = router.reference.expected(problem, g | {"residual": residual})
        result = compare(router, router.cases.case_for(problem), found, expected)
        assert result.ok, f"{tokens} tokens: {result.message}"
        problem = EndOfLayer(HIDDEN, TOP_K, dtype, dtype, num_tokens=tokens)
        of_dense, of_routed, post = (norm.weight for norm in self.norms.values())
        inputs = {
            "residual": residual, "dense": dense, "routed": multiply(self.layer.moe.experts.routed_experts, x, ids),
            "topk_weights": topk_weights, "dense_norm": of_dense, "routed_norm": of_routed, "post_norm": post,
            "layer_scalar": self.layer.layer_scalar, "next_norm": self.next_norm.weight, "eps": g["eps"],
        }  # fmt: skip
        expected = combine.reference.expected(problem, inputs)
        result = compare(combine, combine.cases.case_for(problem), {"residual_out": stream, "out": normed}, expected)
        assert result.ok, f"{tokens} tokens: {result.message}"


def test_a_captured_end_of_a_layer_is_what_it_is_outside_of_a_graph() -> None:
    """Replayed with other tokens. No kernel was launched before: the capture would fail where one was loaded, or
    allocated scratch memory.
    """
    from kerngen.ops import devices, use_stores
    from kerngen.vllm import ahead, expert_layer_v0_26

    dtype = target_here().arch.dtype
    made = Layer(dtype, "cuda")
    use_stores([])  # nothing of it was loaded before
    try:
        asked = ahead.Ahead()
        experts: Any = Experts(EXPERTS, TOP_K, HIDDEN, INNER, GROUP, dtype)
        for kernel, problem in (("moe_w4a16", experts),
                                *expert_layer_v0_26._problems(made.layer, made.residual.dtype)):  # fmt: skip
            asked.ask(kernel, problem)
        asked.load(device := torch.device("cuda", torch.cuda.current_device()))
        loaded = {f for _, _, f in devices.executor(device).launcher.functions}
        graphs: list[tuple[Any, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]] = []
        for tokens in TOKENS:
            given = torch.zeros_like(made.residual[:tokens]), torch.zeros_like(made.dense[:tokens])
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                results = made.run(*given)
            graphs.append((graph, given, results))
        for shift in (0, 11):
            for graph, (residual, dense), (stream, normed) in graphs:
                residual.copy_(made.residual.roll(shift, 0)[: len(residual)])
                dense.copy_(made.dense.roll(shift, 0)[: len(dense)])
                graph.replay()
                for replayed, launched in zip((stream, normed), made.run(residual, dense), strict=True):
                    assert torch.equal(replayed, launched)
                made.require_right(residual, dense, stream, normed)
        assert {f for _, _, f in devices.executor(device).launcher.functions} == loaded
    finally:
        use_stores(None)
