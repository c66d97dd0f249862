"""A drafter in int4 on the GPU: scales of either sign, the tokens that there are without it, its step as a graph."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kerngen.runtime.backend import open_backend
from kerngen.runtime.engine import Engine
from kerngen.runtime.ops import W4Linear
from kerngen.runtime.session import open_checkpoint
from kerngen.runtime.weights.int4 import to_int4
from kerngen.stepgraph import Stage, StepGraph
from kerngen.steps import Step
from kerngen.templates.common.row_torch import gelu_gated
from kerngen.templates.common.w4_pack import dequantize
from kerngen.templates.w4a16_gemm.reference import tolerance
from kerngen.templates.w4a16_gemm.spec import Problem
from kerngen.workload import find_model

TINY = Path(__file__).parents[2] / "examples" / "tiny"
TARGET, ASSISTANT = TINY / "gemma-4-tiny-w4a16", TINY / "gemma-4-tiny-assistant"
NUM_TOKENS = 96


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("n", "k"), [(1024, 10752), (16384, 1024), (256, 3072), (5376, 1024)])
def test_products_with_scales_of_either_sign(n: int, k: int, gated: bool) -> None:
    """Drafters' shapes, at every number of tokens that has a body of its own, against fp32."""
    ops = open_backend("cuda", device="cuda", dtype="bf16")
    rng = torch.Generator("cuda").manual_seed(n + k)
    dense = torch.randn(n, k, generator=rng, device="cuda").mul(k**-0.5).bfloat16()
    packed, scales = to_int4(dense, 32)
    assert 0.4 < (scales < 0).float().mean() < 0.6
    ready = ops.prepare(W4Linear(packed, scales, n, k, 32, "drafter's", gated))
    values = dequantize(packed, scales)
    for tokens in (1, 2, 3, 8, 16, 32):
        x = torch.randn(tokens, k, generator=rng, device="cuda").bfloat16()
        want = x.float() @ values.T
        if gated:
            gate, up = want.bfloat16().float().chunk(2, dim=-1)
            made, want = ops.gated(x, ready), gelu_gated(gate, up, "bf16")
        else:
            made = ops.linear(x, ready)
        within = tolerance(Problem(n, k, 32, "bf16", tokens, gated))
        torch.testing.assert_close(made.float(), want, atol=within.atol, rtol=within.rtol, msg=f"{tokens} tokens")


def _generate(backend: str, draft: Path | None, weights: str = "stored") -> tuple[list[int], float]:
    ops = open_backend(backend, device="cuda", dtype="bf16")
    session = open_checkpoint(TARGET, ops, draft=draft, draft_weights=weights)
    prompt = session.encode((TINY / "prompt.txt").read_text())
    engine = Engine(session.model, session.drafter, max_len=len(prompt) + NUM_TOKENS, num_draft_tokens=4)
    found = engine.generate(prompt, max_new_tokens=NUM_TOKENS, stop_ids=session.stop_ids)
    return found.tokens, found.stats.acceptance_length


def test_a_drafter_in_int4_changes_no_token() -> None:
    expected, _ = _generate("torch", None)
    assert len(expected) > 32
    drafted, acceptance = _generate("cuda", ASSISTANT, "int4")
    assert drafted == expected
    assert acceptance > 2.0


def test_its_step_is_a_graph_of_int4_products() -> None:
    graph = StepGraph(Stage(find_model(str(TARGET), str(ASSISTANT), "int4")), Step.draft(2, 128))
    names = {name for name, _ in graph.calls}
    assert "w4a16_gemm" in names
    assert "gelu_gate" not in names
    base, again = graph.capture({}), graph.capture({})
    assert 0.9 < graph.compare(base, again, pairs=20).median < 1.1
