"""`torch.ops.kerngen` on the GPU: every op on its folder's cases, inside torch.compile, a CUDA graph, a second GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kerngen.templates import Case, find_kernel, kernel_names
from kerngen.templates.kernel import spread


def _cases() -> list[tuple[str, Case]]:
    return [(name, case) for name in kernel_names() for case in find_kernel(name).cases.CASES]


@pytest.mark.parametrize(("name", "case"), _cases(), ids=lambda v: str(v))
def test_an_op_against_the_reference(name: str, case: Case) -> None:
    import kerngen.ops  # noqa: F401  registers them
    from kerngen.runtime.launcher import probe_device
    from kerngen.timing.measure import compare, fresh

    kernel = find_kernel(name)
    inputs = kernel.cases.inputs(case, torch.device("cuda"))
    if (asked := kernel.op_call(case, inputs)) is None:
        pytest.skip("no op asks for this")
    op, arguments = asked
    call = op.of_flat(arguments)
    if (why := kernel.why_unsupported(call.problem, _target(probe_device()))) is not None:
        pytest.skip(why)
    wanted = {shown: v.float() for name, shown, v in spread(fresh(inputs)) if name in kernel.outputs and v is not None}
    wanted |= {shown: right for _, shown, right in spread(kernel.reference.expected(case.problem, inputs))}
    results = getattr(torch.ops.kerngen, op.name)(**arguments)
    names = {  # the reference's, of what is written in place too
        id(v): shown if name in kernel.outputs else f"{shown}_out"
        for name, shown, v in reversed(list(spread(call.arguments)))
        if isinstance(v, Tensor)
    }
    told, made = (r if isinstance(r, tuple) else () if r is None else (r,) for r in (call.result, results))
    got = {names[id(t)]: r for t, r in zip(told, made, strict=True)}
    got |= {names[id(t)]: t for *_, t in spread({m: arguments[m] for m in op.mutates})}
    assert got
    checked = compare(kernel, case, got, {n: wanted[n] for n in got})
    assert checked.ok, checked.message


def _target(device: Any) -> Any:
    from kerngen.arch import Target

    return Target.of(device)


def _layer(x: Tensor, residual: Tensor, weight: Tensor, w: Any) -> Tensor:
    import kerngen

    h = kerngen.ops.add_norm(residual, x, weight, None, weight, 1e-6)
    gated = kerngen.ops.gelu_gate(kerngen.ops.w4a16_gemm(h, w))
    return gated + kerngen.ops.rmsnorm(residual[:, :512], None, 1e-6, x.dtype)


def _given(tokens: int, device: str = "cuda") -> tuple[Tensor, Tensor, Tensor, Any]:
    import kerngen

    generator = torch.Generator().manual_seed(tokens)
    words = torch.randint(-(2**31), 2**31, (1024, 64), generator=generator)
    w = kerngen.ops.pack_w4(words.int(), torch.rand(1024, 16, generator=generator) / 50).to(device, torch.float16)
    x, residual = (torch.randn(tokens, 512, generator=generator).to(device, torch.float16) for _ in range(2))
    return x, residual, torch.ones(512, device=device, dtype=torch.float16), w


def _on_cpu(given: tuple[Tensor, Tensor, Tensor, Any]) -> Tensor:
    x, residual, weight, w = given
    return _layer(x.cpu(), residual.cpu(), weight.cpu(), w.to("cpu"))


@pytest.mark.parametrize("options", [{"backend": "aot_eager"}, {}, {"mode": "reduce-overhead"}], ids=str)
def test_inside_torch_compile(options: dict[str, Any]) -> None:
    if "backend" not in options:
        pytest.importorskip("triton", reason="inductor needs triton")
    torch._dynamo.reset()
    compiled = torch.compile(_layer, fullgraph=True, **options)
    for tokens in (3, 8, 65):
        given = _given(tokens)
        expected = _on_cpu(given)
        _layer(given[0], given[1].clone(), *given[2:])  # loads the kernels, before anything is captured
        for _ in range(4):  # with cudagraphs the first calls warm up and record
            residual = given[1].clone()
            got = compiled(given[0], residual, *given[2:]).clone()
            torch.testing.assert_close(got.cpu(), expected, atol=2e-2, rtol=1e-2)
            assert not torch.equal(residual, given[1]), "the compiled program must write the residual"


def test_inside_a_cuda_graph() -> None:
    x, residual, weight, w = _given(4)
    kept = residual.clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        expected = _layer(x, residual, weight, w)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        residual.copy_(kept)
        made = _layer(x, residual, weight, w)
    for _ in range(3):
        made.zero_()
        graph.replay()
        assert torch.equal(made, expected)


def test_what_was_loaded_ahead_is_captured_without_a_call_before() -> None:
    """At every number of tokens: a capture fails where something is loaded in it, and so would a grown workspace."""
    import kerngen
    from kerngen.ops import devices
    from kerngen.templates.w4a16_gemm.spec import Problem

    n, k, most = 352, 1056, 300
    draw = torch.Generator().manual_seed(3)
    words = torch.randint(-(2**31), 2**31, (n, k // 8), generator=draw).int()
    w = kerngen.ops.pack_w4(words, torch.rand(n, k // 32, generator=draw) / 50).to("cuda", torch.float16)
    x = torch.randn(most, k, generator=draw).to("cuda", torch.float16)
    torch.cuda.synchronize()
    kerngen.ops.use_stores([])  # nothing of it was loaded before
    try:
        sources = devices.load_ahead([("w4a16_gemm", Problem(n, k, 32, "fp16"))], most, x.device)
        assert sources.total() > 1
        for tokens in (1, 2, 7, 16, 33, 100, 129, 256, most):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                made = kerngen.ops.w4a16_gemm(x[:tokens], w)
            for _ in range(3):
                graph.replay()
            expected = x[:tokens].float() @ w.dense().T
            torch.testing.assert_close(made.float(), expected, rtol=2**-8, atol=2**-8 * expected.abs().max().item())
        loaded = len(devices.executor(x.device).launcher.functions)
        for tokens in range(1, most + 1):
            kerngen.ops.w4a16_gemm(x[:tokens], w)
        assert len({f for _, _, f in devices.executor(x.device).launcher.functions}) == sources.total()
        assert loaded >= sources.total()
    finally:
        kerngen.ops.use_stores(None)


def test_stores_are_chosen() -> None:
    import kerngen
    from kerngen.ops import devices

    x, *_ = _given(4)
    kerngen.ops.use_stores([])
    try:
        kerngen.ops.rmsnorm(x, None, 1e-6, x.dtype)
        assert devices.executor(x.device).sources() == {"default configuration": 1}
        kerngen.ops.use_stores(None)
        kerngen.ops.rmsnorm(x, None, 1e-6, x.dtype)
        assert sum(devices.executor(x.device).sources().values()) == 1
    finally:
        kerngen.ops.use_stores(None)


def test_the_second_gpu_too() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU")
    given = _given(5, "cuda:1")
    expected = _on_cpu(given)
    with torch.cuda.device(0):
        got = _layer(*given)
    assert got.device == torch.device("cuda:1")
    torch.testing.assert_close(got.cpu(), expected, atol=2e-2, rtol=1e-2)


def test_what_a_gpu_does_not_take_is_refused() -> None:
    import kerngen

    x = torch.ones(2, 64, device="cuda")
    with pytest.raises(kerngen.KerngenError, match="no body computes in fp32"):
        kerngen.ops.rmsnorm(x, None, 1e-6, x.dtype)
    with pytest.raises(kerngen.LaunchError, match="several devices"):
        kerngen.ops.rmsnorm(x.half(), torch.ones(64, dtype=torch.float16), 1e-6, torch.float16)


PAGED = [
    (name, case)
    for name in ("attn_decode", "attn_prefill", "qkv_norm_rope", "kv_write")
    for case in find_kernel(name).cases.CASES
    if case.problem.page_heads
]


@pytest.mark.parametrize(("name", "case"), PAGED, ids=lambda v: str(v))
def test_heads_of_larger_pages_give_what_contiguous_caches_give(name: str, case: Case) -> None:
    """Bit for bit: the configuration is the same, and only addresses differ. K and V are of one tensor."""
    import kerngen
    from kerngen.runtime.launcher import probe_device

    kernel, caches = find_kernel(name), ("k", "v") if name == "attn_prefill" else ("k_cache", "v_cache")
    inputs = kernel.cases.inputs(case, torch.device("cuda"))
    if (why := kernel.why_unsupported(case.problem, _target(probe_device()))) is not None:
        pytest.skip(why)
    apart = {n: inputs[n].contiguous() for n in caches}
    whole = torch.cat(tuple(apart.values()), dim=1)
    paged = dict(zip(caches, whole.chunk(2, dim=1), strict=True))
    found = []
    for given in (paged, apart):
        out = {"out": inputs["out"].clone()} if "out" in inputs else {}
        op, arguments = kernel.op_call(case, inputs | given | out)
        made = getattr(kerngen.ops, op.name)(**arguments)
        found.append(arguments.get("out") if made is None else made)
    assert found == [None, None] if name == "kv_write" else torch.equal(*found)
    for n, cache in apart.items():
        torch.testing.assert_close(paged[n], cache, rtol=0, atol=0, equal_nan=True)


def test_rows_of_up_may_lie_apart() -> None:
    """Per-layer embeddings are a slice of one tensor, which nobody copies."""
    import kerngen

    gate, wide = (torch.randn(7, n, device="cuda", dtype=torch.float16) for n in (64, 192))
    got = kerngen.ops.gelu_mul(gate, wide[:, 64:128])
    assert torch.equal(got, kerngen.ops.gelu_mul(gate, wide[:, 64:128].contiguous()))
