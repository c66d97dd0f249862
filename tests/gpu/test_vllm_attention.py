"""The attention backend inside vLLM on a GPU: captured in a CUDA graph after its kernels were loaded ahead."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kerngen.vllm.plugin import PARTS, release_of

vllm = pytest.importorskip("vllm", reason="vLLM is not installed here")
if release_of(vllm.__version__) not in PARTS["attention"].releases:
    pytest.skip(f"the part `attention` is not for vLLM {vllm.__version__}", allow_module_level=True)

SIZE, MAX_LEN, PAGES, SEQUENCES, Q_HEADS = 64, 8192, 40, 6, 16


def _settings(drafts: int, dtype: torch.dtype) -> Any:
    """What the backend reads of a VllmConfig."""
    from vllm.config import CUDAGraphMode

    return SimpleNamespace(
        model_config=SimpleNamespace(
            max_model_len=MAX_LEN,
            dtype=dtype,
            is_mm_prefix_lm=True,
            hf_text_config=SimpleNamespace(use_bidirectional_attention="vision"),
        ),
        speculative_config=SimpleNamespace(num_speculative_tokens=drafts, target_model_config=None) if drafts else None,
        compilation_config=SimpleNamespace(
            cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE, max_cudagraph_capture_size=64
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=256),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
    )


def _batch(q_lens: list[int], kv_lens: list[int], tables: Tensor, tokens: int, images: Any = None) -> Any:
    from vllm.v1.attention.backend import CommonAttentionMetadata

    starts = torch.tensor([0, *torch.tensor(q_lens).cumsum(0).tolist()], dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts.cuda(), query_start_loc_cpu=starts,
        seq_lens=torch.tensor(kv_lens, dtype=torch.int32, device="cuda"), num_reqs=len(q_lens),
        num_actual_tokens=tokens, max_query_len=max(q_lens), max_seq_len=max(kv_lens), block_table_tensor=tables,
        slot_mapping=torch.empty(0, dtype=torch.int64, device="cuda"),
        seq_lens_cpu_upper_bound=torch.tensor(kv_lens, dtype=torch.int32), mm_req_doc_ranges=images,
    )  # fmt: skip


def _configured(drafts: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, torch.dtype, torch.device]:
    """vLLM's configuration, which is its current one, the model's dtype and the GPU; no kernel has been asked for."""
    from kerngen.vllm import ahead
    from kerngen.vllm import attention_v0_26 as ours

    dtype = torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    settings = _settings(drafts, dtype)
    monkeypatch.setattr(ours, "get_current_vllm_config", lambda: settings)
    monkeypatch.setattr(ahead, "get_current_vllm_config_or_none", lambda: settings)
    monkeypatch.setattr(ours, "AHEAD", ahead.Ahead())
    return settings, dtype, torch.device("cuda", torch.cuda.current_device())


@pytest.mark.parametrize(("dim", "kv_heads", "window"), [(256, 8, 1024), (512, 2, 0)], ids=["sliding", "full"])
@pytest.mark.parametrize("drafts", [0, 3])
def test_a_captured_batch_of_decodes_gives_what_it_gives_outside_of_a_graph(
    dim: int, kv_heads: int, window: int, drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With K and V of the new tokens written in the graph, replayed with other lengths and with rows that pad it. No
    kernel was launched before: the capture would fail where one was loaded, or allocated scratch memory.
    """
    from kerngen.ops import devices, use_stores
    from kerngen.vllm import attention_v0_26 as ours

    settings, dtype, device = _configured(drafts, monkeypatch)
    use_stores([])  # nothing of it was loaded before
    try:
        made = ours.Impl(Q_HEADS, dim, dim**-0.5, kv_heads, None, window or None)
        spec: Any = SimpleNamespace(block_size=SIZE)
        builder = ours.Builder(spec, ["layer"], settings, device)
        made.process_weights_after_loading(dtype)
        loaded = {f for _, _, f in devices.executor(device).launcher.functions}
        draw = torch.Generator("cuda").manual_seed(5)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draw, device=device).to(dtype)

        q_len, heads = 1 + drafts, made.num_kv_heads
        tokens = SEQUENCES * q_len
        cache = drawn(*ours.Backend.get_kv_cache_shape(1 + SEQUENCES * PAGES, SIZE, heads, dim))
        tables = torch.arange(1, 1 + SEQUENCES * PAGES, dtype=torch.int32, device=device).reshape(SEQUENCES, PAGES)
        q, k, v = drawn(tokens, Q_HEADS, dim), drawn(tokens, heads, dim), drawn(tokens, heads, dim)
        slots = torch.full((tokens,), -1, dtype=torch.int64, device=device)
        captured = _batch([q_len] * SEQUENCES, [q_len] * SEQUENCES, tables, tokens)
        metadata = builder.build_for_cudagraph_capture(captured)
        layer: Any = SimpleNamespace()
        out, graph = torch.empty_like(q), torch.cuda.CUDAGraph()

        def forward(metadata: Any, cache: Tensor, out: Tensor) -> None:
            made.do_kv_cache_update(layer, k, v, cache, slots)
            made.forward(layer, q, k, v, cache, metadata, out)

        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            forward(metadata, cache, out)
        for lengths in ([q_len, 63, 64, 65, 1023, 2500], [2048, 9, 1025, q_len, 0, 0], [700] * 6):
            q_lens = [q_len if n else 0 for n in lengths]
            at = [n - q_len + i if n else -1 for n in lengths for i in range(q_len)]
            rows = tables.repeat_interleave(q_len, 0).tolist()
            slots.copy_(torch.tensor([-1 if p < 0 else row[p // SIZE] * SIZE + p % SIZE
                                      for row, p in zip(rows, at, strict=True)]))  # fmt: skip
            captured.seq_lens.copy_(torch.tensor(lengths))
            eager = _batch(q_lens, lengths, tables, tokens)
            own_cache, expected = cache.clone(), torch.empty_like(out)
            forward(builder.build(0, eager, fast_build=True), own_cache, expected)
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(cache, own_cache), lengths
            assert torch.equal(out, expected), lengths
            padded = [not n for n in lengths for _ in range(q_len)]
            assert not out[torch.tensor(padded, device=device)].any(), lengths
            inside = _batch([1, *q_lens[1:2], 40], [max(lengths[0], 1), max(lengths[1], q_len), 40], tables[:3],
                            41 + q_lens[1])  # fmt: skip
            mixed = drawn(inside.num_actual_tokens, Q_HEADS, dim)
            made.forward(layer, mixed, mixed, mixed, cache, builder.build(0, inside), torch.empty_like(mixed))
        assert {f for _, _, f in devices.executor(device).launcher.functions} == loaded
    finally:
        use_stores(None)


@pytest.mark.parametrize(
    ("dim", "kv_heads", "window", "pairs", "v_is_k"),
    [(256, 8, 1024, 128, False), (512, 2, 0, 64, False), (512, 2, 0, 64, True)],
    ids=["sliding", "full", "full, K = V"],
)
@pytest.mark.parametrize("drafts", [0, 3])
def test_a_captured_layer_makes_its_heads_as_the_references_do(
    dim: int, kv_heads: int, window: int, pairs: int, v_is_k: bool, drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By vLLM's operator, from the projection's output on: norms, RoPE and cache write too, replayed with other lengths
    and with rows that pad it. K, V and attention's output are those of the kernels' references.
    """
    from vllm.forward_context import override_forward_context
    from vllm.model_executor.layers.attention import attention  # noqa: F401 - torch.ops.vllm
    from vllm.utils.torch_utils import _encode_layer_name

    from kerngen.ops import devices, use_stores
    from kerngen.templates.common.attention.heads_torch import inverse_frequencies
    from kerngen.vllm import attention_v0_26 as ours

    settings, dtype, device = _configured(drafts, monkeypatch)
    use_stores([])  # nothing of it was loaded before
    try:
        made = ours.Impl(Q_HEADS, dim, dim**-0.5, kv_heads, None, window or None)
        draw = torch.Generator("cuda").manual_seed(6)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draw, device=device).to(dtype)

        def norm() -> Any:
            return SimpleNamespace(weight=1 + 0.25 * drawn(dim), variance_epsilon=1e-6)

        new = ours.NewHeads(norm(), norm(), inverse_frequencies(dim, pairs, device), pairs, v_is_k)
        assert made.make_heads(new) is None
        made.process_weights_after_loading(dtype)
        loaded = {f for _, _, f in devices.executor(device).launcher.functions}
        q_len = 1 + drafts
        tokens, spec = SEQUENCES * q_len, SimpleNamespace(block_size=SIZE)
        builder = ours.Builder(spec, ["layer"], settings, device)  # type: ignore[arg-type]
        tables = torch.arange(1, 1 + SEQUENCES * PAGES, dtype=torch.int32, device=device).reshape(SEQUENCES, PAGES)
        qkv = drawn(tokens, (Q_HEADS + (1 if v_is_k else 2) * kv_heads) * dim)
        layer: Any = SimpleNamespace(impl=made, layer_name="layer")
        layer.kv_cache = drawn(*ours.Backend.get_kv_cache_shape(1 + SEQUENCES * PAGES, SIZE, kv_heads, dim))
        positions = torch.zeros(tokens, dtype=torch.int64, device=device)
        slots = torch.full_like(positions, -1)
        captured = _batch([q_len] * SEQUENCES, [q_len] * SEQUENCES, tables, tokens)
        metadata = builder.build_for_cudagraph_capture(captured)
        out, graph = torch.empty(tokens, Q_HEADS, dim, dtype=dtype, device=device), torch.cuda.CUDAGraph()
        context: Any = SimpleNamespace(
            no_compile_layers={"layer": layer}, attn_metadata={"layer": metadata}, slot_mapping={"layer": slots}
        )
        torch.cuda.synchronize()
        with override_forward_context(context), torch.cuda.graph(graph):
            torch.ops.vllm.unified_attention_with_output(qkv, positions, positions, out, _encode_layer_name("layer"))

        on_cpu = ours.NewHeads(
            *(SimpleNamespace(weight=n.weight.cpu(), variance_epsilon=1e-6) for n in (new.q_norm, new.k_norm)),
            new.inv_freq.cpu(), pairs, v_is_k,
        )  # fmt: skip
        for lengths in ([q_len, 63, 64, 65, 1023, 2500], [2048, 9, 1025, q_len, 0, 0], [700] * 6):
            at = torch.tensor([n - q_len + i if n else -1 for n in lengths for i in range(q_len)])
            rows = tables.cpu().repeat_interleave(q_len, 0)
            pages = rows.gather(1, (at.clamp(min=0) // SIZE)[:, None])[:, 0].long()
            slots.copy_(torch.where(at < 0, -1, pages * SIZE + at % SIZE))
            positions.copy_(at.clamp(min=0))
            captured.seq_lens.copy_(torch.tensor(lengths))
            cache, expected = layer.kv_cache.cpu(), torch.empty_like(out, device="cpu")
            graph.replay()
            torch.cuda.synchronize()
            with monkeypatch.context() as patch:
                patch.setattr(made, "new_heads", on_cpu)
                context.slot_mapping["layer"] = slots.cpu()
                part = ours.Part(0, tokens, tables.cpu(), captured.seq_lens.cpu(), MAX_LEN, q_len)
                with override_forward_context(context):
                    made.forward(
                        layer, qkv.cpu(), positions.cpu(), None, cache, ours.Metadata(tokens, (part,)), expected
                    )
            torch.testing.assert_close(layer.kv_cache.cpu().float(), cache.float(), rtol=2**-6, atol=2**-6)
            torch.testing.assert_close(out.cpu().float(), expected.float(), rtol=2**-6, atol=2**-6)
            assert torch.equal(layer.kv_cache[0].cpu(), cache[0]), "page 0 is vLLM's null block"
        assert {f for _, _, f in devices.executor(device).launcher.functions} == loaded
    finally:
        use_stores(None)


WITH_IMAGES: dict[str, tuple[list[int], list[int], dict[int, list[tuple[int, int]]]]] = {
    # new tokens, lengths, images: beside a decode and text, chunks that begin and end in images
    "chunks": (
        [1, 30, 90, 70], [900, 1500, 1290, 400], {0: [(2, 290)], 2: [(1100, 1240)], 3: [(331, 380), (390, 600)]},
    ),
    "a prompt": ([1, 255], [60, 255], {1: [(5, 70), (72, 140), (141, 250)]}),
    "longer than the window": ([250], [1700], {0: [(300, 1650)]}),
}  # fmt: skip


@pytest.mark.parametrize("window", [1024, 16])
@pytest.mark.parametrize("batch", WITH_IMAGES)
def test_images_are_seen_as_by_vllms_kernel(batch: str, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the same pages, by kernels that were loaded before the first image."""
    from vllm.v1.attention.backends.utils import compute_mm_prefix_range_tensor
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    from kerngen.ops import devices, use_stores
    from kerngen.vllm import attention_v0_26 as ours

    dim, heads, (q_lens, kv_lens, images) = 256, 8, WITH_IMAGES[batch]
    settings, dtype, device = _configured(0, monkeypatch)
    use_stores([])  # nothing of it was loaded before
    try:
        made = ours.Impl(Q_HEADS, dim, dim**-0.5, heads, None, window)
        builder = ours.Builder(SimpleNamespace(block_size=SIZE), ["layer"], settings, device)  # type: ignore[arg-type]
        made.process_weights_after_loading(dtype)
        loaded = {f for _, _, f in devices.executor(device).launcher.functions}
        draw = torch.Generator("cuda").manual_seed(7)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draw, device=device).to(dtype)

        cache = drawn(*ours.Backend.get_kv_cache_shape(1 + SEQUENCES * PAGES, SIZE, heads, dim))
        order = 1 + torch.randperm(SEQUENCES * PAGES, generator=draw, device=device)
        tables = order.to(torch.int32).reshape(SEQUENCES, PAGES)[: len(q_lens)]
        q = drawn(sum(q_lens), Q_HEADS, dim)
        found, expected, causal = (torch.zeros_like(q) for _ in range(3))
        layer: Any = SimpleNamespace()
        for its, out in ((images, found), (None, causal)):
            given = _batch(q_lens, kv_lens, tables, len(q), its)
            made.forward(layer, q, q, q, cache, builder.build(0, given), out)
        assert {f for _, _, f in devices.executor(device).launcher.functions} == loaded
        k, v = (part.transpose(1, 2) for part in cache.split(heads, dim=1))  # [blocks, 64, heads, dim], as vLLM's reads
        one = torch.ones(len(q_lens), heads, device=device)
        unified_attention(
            q=q, k=k, v=v, out=expected, cu_seqlens_q=given.query_start_loc, max_seqlen_q=max(q_lens),
            seqused_k=given.seq_lens, max_seqlen_k=max(kv_lens), softmax_scale=made.scale, causal=True,
            window_size=(window - 1, 0), block_table=tables, softcap=0, q_descale=None, k_descale=one, v_descale=one,
            mm_prefix_range=compute_mm_prefix_range_tensor(images, len(q_lens), device),
            mm_prefix_clamp_sliding_window=True,
        )  # fmt: skip
        torch.testing.assert_close(found.float(), expected.float(), rtol=2**-6, atol=2**-7)
        assert (expected - causal).abs().amax() > 0.05, "an image changes what its tokens see"
    finally:
        use_stores(None)
