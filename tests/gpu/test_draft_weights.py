"""A drafter in int4 on the GPU: scales of either sign, the tokens that there are without it, its step as a graph."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kerngen.runtime.backend import open_backend
from kerngen.runtime.cache import KVCache
from kerngen.runtime.config import Keeping
from kerngen.runtime.engine import Engine
from kerngen.runtime.launcher import Launcher
from kerngen.runtime.ops import int4_weights
from kerngen.runtime.session import open_checkpoint
from kerngen.runtime.weights.int4 import to_int4
from kerngen.templates.common.rows.torch_rows import gelu_gated
from kerngen.templates.common.w4.pack import dequantize
from kerngen.templates.kernel import Kernel
from kerngen.templates.w4a16_gemm.reference import tolerance
from kerngen.templates.w4a16_gemm.spec import Problem
from kerngen.timing.step_graph import Stage, StepGraph
from kerngen.workload.steps import Step, _of_layers, sequence
from kerngen.workload.workload import find_model

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
    ready = ops.prepare(int4_weights(packed, scales, n, k, 32, "drafter's", gated))
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
    session = open_checkpoint(TARGET, ops, drafts=[] if draft is None else [draft], kept=Keeping(weights))
    prompt = session.encode((TINY / "prompt.txt").read_text())
    engine = Engine(session.model, session.drafter, max_len=len(prompt) + NUM_TOKENS, num_draft_tokens=4)
    found = engine.generate(prompt, max_new_tokens=NUM_TOKENS, stop_ids=session.stop_ids)
    return found.tokens, found.stats.acceptance_length


def _decide(monkeypatch: pytest.MonkeyPatch, at_once: bool) -> Callable[[Kernel, Any], bool]:
    """Have steps ask decode_layers where it serves, or never. Returns what decides."""
    plain = Launcher.fuses

    def fuses(self: Launcher, kernel: Kernel, problem: Any) -> bool:
        if kernel.name != "decode_layers":
            return plain(self, kernel, problem)
        return at_once and kernel.why_unsupported(problem, self.target) is None

    monkeypatch.setattr(Launcher, "fuses", fuses)
    return partial(fuses, Launcher(index=torch.cuda.current_device()))


@pytest.mark.parametrize("at_once", [False, True])
def test_a_drafter_in_int4_changes_no_token(at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    _decide(monkeypatch, at_once)
    expected, _ = _generate("torch", None)
    assert len(expected) > 32
    drafted, acceptance = _generate("cuda", ASSISTANT, "int4")
    assert drafted == expected
    assert acceptance > 2.0


@pytest.mark.whole_gpu
def test_its_step_is_a_graph_of_int4_products() -> None:
    graph = StepGraph(Stage(find_model(str(TARGET), str(ASSISTANT), "int4")), Step.draft(2, 128))
    names = {name for name, _ in graph.calls}
    assert "w4a16_gemm" in names
    assert "gelu_gate" not in names
    base, again = graph.capture({}), graph.capture({})
    assert 0.9 < graph.compare(base, again, pairs=20).median < 1.1


def _drafted(stage: Stage, cache: KVCache, length: int) -> tuple[Tensor, Tensor]:
    """What three drafts from `length` keys give, the head's inputs and the hidden states, [3, d] and [3, T]. Each is
    from a state of its own: that of the draft before has its roundings, which three drafts multiply.
    """
    rng = torch.Generator("cuda").manual_seed(length)
    width, drafter, rows = stage.made.config.hidden_size, stage.drafter, []
    assert drafter is not None
    with torch.inference_mode():
        for token in (4, 5, 6):
            state = torch.randn(1, width, generator=rng, device="cuda").to(stage.made.ops.dtype)
            ids, lengths = torch.tensor([[token], [length]], device="cuda")
            y = drafter.step(ids, state, lengths, cache, cache.tables.shape[2] * cache.page_size)
            rows.append((y, drafter.carried(y)))
    return torch.cat([y for y, _ in rows]).float(), torch.cat([h for _, h in rows]).float()


@pytest.mark.parametrize("name", ["gemma-4-31b", "gemma-4-12b", "gemma-4-e4b", "gemma-4-e2b"])
def test_its_layers_at_once_give_what_they_do_launch_by_launch(name: str) -> None:
    """Released drafters, beside the two layers of their targets whose keys they read, at ends of pages and windows."""
    model, room = find_model(name, None, "int4"), 5056
    donors = sorted(model.target.donor(kind).index for kind in ("sliding", "full"))
    stage = Stage(_of_layers(model, donors))
    ops, config = stage.made.ops, stage.made.config
    cache, window = KVCache.whole(config, ops, batch=1, max_len=room), config.window
    # Scores of a few units: were they larger, one key would take all, and a last bit would say which. One draw of keys
    # in forty comes near that all the same, so they are the same each time.
    torch.manual_seed(1)
    caches = [
        tensor.normal_(std=0.1) for x in config.layers for tensor in (cache.pages(x).k_cache, cache.pages(x).v_cache)
    ]
    before = [tensor.clone() for tensor in caches]
    for length in (1, 2, 63, 64, 65, window - 1, window, window + 1, window + 2, 5000):
        made = {}
        for at_once in (True, False):
            with pytest.MonkeyPatch.context() as patch:
                fuses = _decide(patch, at_once)
                launched = sequence(stage.model, Step.draft(1, room), stage.target.arch, fuses)
                kernels = {x.kernel for x in launched}
                made[at_once] = _drafted(stage, cache, length)
            if at_once and "decode_layers" not in kernels:
                pytest.skip(f"decode_layers does not serve it on {stage.target.arch}")
            assert ("attn_decode" in kernels) == (not at_once)
        for got, want in zip(made[True], made[False], strict=True):
            # bf16 in other orders: each layer rounds a dozen rows, 2^-9 each
            assert want.isfinite().all()
            assert (got - want).norm() < 0.05 * want.norm(), f"{length} keys"
    assert all(torch.equal(a, b) for a, b in zip(caches, before, strict=True)), "a drafter writes no key"


@pytest.mark.whole_gpu
def test_its_layers_at_once_are_a_graph() -> None:
    graph = StepGraph(Stage(find_model(str(TARGET), str(ASSISTANT), "int4")), Step.draft(1, 128))
    if "decode_layers" not in {name for name, _ in graph.calls}:
        pytest.skip("decode_layers does not serve it here")
    base, again = graph.capture({}), graph.capture({})
    assert 0.9 < graph.compare(base, again, pairs=20).median < 1.1
