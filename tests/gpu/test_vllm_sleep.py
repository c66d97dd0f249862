"""What kernels keep on a GPU is outside of the pool that vLLM loads a model into, where its sleep mode is on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kerngen.templates.greedy_head.spec import Problem
from kerngen.vllm.plugin import PARTS, release_of

vllm = pytest.importorskip("vllm", reason="vLLM is not installed here")
if release_of(vllm.__version__) not in PARTS["linear"].releases:
    pytest.skip(f"no part is for vLLM {vllm.__version__}", allow_module_level=True)


@pytest.mark.parametrize("sleeps", [True, False])
def test_scratch_is_outside_of_the_pool(sleeps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from kerngen.ops import devices, use_stores
    from kerngen.vllm import ahead

    settings = SimpleNamespace(model_config=SimpleNamespace(enable_sleep_mode=sleeps))
    monkeypatch.setattr(ahead, "get_current_vllm_config_or_none", lambda: settings)
    device = torch.device("cuda", torch.cuda.current_device())
    dtype = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    problem = Problem(100000, 1024, dtype, 1, 4)

    class Grid:
        def problems(self) -> list[tuple[str, Any]]:
            return [("greedy_head", problem)]

    use_stores([])  # nothing of it was loaded before
    pool = torch.cuda.MemPool()
    try:
        asked = ahead.Ahead()
        asked.ask_all(Grid())
        with torch.cuda.use_mem_pool(pool):
            loaded_there = torch.empty(1 << 20, device=device)
            asked.load(device)
        (function,) = {f for _, _, f in devices.executor(device).launcher.functions}
        scratch = function.workspace(1)
        assert scratch.numel() >= function.plan(problem)[1] > 0
        assert not scratch.any()
        segments = [range(s["address"], s["address"] + s["total_size"]) for s in pool.snapshot()]
        inside = [any(t.data_ptr() in s for s in segments) for t in (loaded_there, scratch)]
        assert inside == [True, not sleeps]
    finally:
        use_stores()
