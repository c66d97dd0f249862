"""The backend CUSTOM of vLLM 0.26 beside a plain fp32 reference, on the CPU; what it refuses, and when it is chosen."""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import capability, serves
from torch import Tensor

if not serves("attention"):
    pytest.skip("the part `attention` is not for this release of vLLM", allow_module_level=True)
pytestmark = pytest.mark.usefixtures("registered")

SIZE, MAX_LEN = 64, 4096
KINDS = {"sliding": (256, 2, 48), "full": (512, 1, 0)}  # head_dim, num_kv_heads, window
Q_HEADS = 4


def settings(
    drafts: int = 0, graphs: bool = True, hf: Any = None, dtype: torch.dtype = torch.bfloat16, **changes: Any
) -> Any:
    """What the backend reads of a VllmConfig."""
    from vllm.config import CUDAGraphMode

    mode = CUDAGraphMode.FULL_AND_PIECEWISE if graphs else CUDAGraphMode.PIECEWISE
    hf = hf or text_config()
    parts: dict[str, Any] = {
        "model_config": SimpleNamespace(max_model_len=MAX_LEN, dtype=dtype, hf_config=hf, hf_text_config=hf,
                                        is_mm_prefix_lm=True),
        "speculative_config": None if not drafts else SimpleNamespace(num_speculative_tokens=drafts,
                                                                      target_model_config=None),
        "compilation_config": SimpleNamespace(cudagraph_mode=mode, max_cudagraph_capture_size=32),
        "scheduler_config": SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=512),
        "parallel_config": SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1,
                                           tensor_parallel_size=1),
        "attention_config": SimpleNamespace(backend=None, backend_per_kind={}, flash_attn_version=None,
                                            use_non_causal=False),
        "cache_config": SimpleNamespace(cache_dtype="auto", block_size=16, user_specified_block_size=False),
        "kv_transfer_config": None,
    }  # fmt: skip
    for path, value in changes.items():
        part, _, name = path.partition("__")
        if name:
            setattr(parts[part], name, value)
        else:
            parts[part] = value
    return SimpleNamespace(**parts)


def text_config(**changes: Any) -> Any:
    fields = {
        "layer_types": ["sliding_attention", "full_attention"], "head_dim": 256, "global_head_dim": 512,
        "num_attention_heads": 32, "num_key_value_heads": 16, "num_global_key_value_heads": 4, "attention_k_eq_v": True,
        "sliding_window": 1024,
    }  # fmt: skip
    return SimpleNamespace(**(fields | changes))


def impl(kind: str, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Any:
    from kerngen.vllm import attention_v0_26 as ours

    dim, kv_heads, window = KINDS[kind]
    monkeypatch.setattr(ours, "get_current_vllm_config", lambda: settings(drafts=3, dtype=dtype))
    monkeypatch.setattr(ours, "AHEAD", ours.AHEAD.__class__())
    return ours.Impl(Q_HEADS, dim, dim**-0.5, kv_heads, None, window or None, "auto", **options)


def builder(**options: Any) -> Any:
    from kerngen.vllm.attention_v0_26 import Builder

    return Builder(SimpleNamespace(block_size=SIZE), ["layer"], settings(**options), torch.device("cpu"))  # type: ignore[arg-type]


def common(
    q_lens: list[int], kv_lens: list[int], tables: Tensor, *, tokens: int | None = None, ranges: Any = None
) -> Any:
    """A batch as vLLM describes it. tokens: with those that pad a graph."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    starts = torch.tensor([0, *torch.tensor(q_lens).cumsum(0).tolist()], dtype=torch.int32)
    lens = torch.tensor(kv_lens, dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts, query_start_loc_cpu=starts.clone(), seq_lens=lens, num_reqs=len(q_lens),
        num_actual_tokens=int(starts[-1]) if tokens is None else tokens, max_query_len=max(q_lens),
        max_seq_len=max(kv_lens), block_table_tensor=tables, slot_mapping=torch.empty(0, dtype=torch.int64),
        seq_lens_cpu_upper_bound=lens.clone(), mm_req_doc_ranges=ranges,
    )  # fmt: skip


class Sequences:
    """Caches and tables of sequences with these lengths, whose keys and values are known as plain tensors."""

    def __init__(self, made: Any, kv_lens: list[int], dtype: torch.dtype) -> None:
        from kerngen.vllm.attention_v0_26 import Backend

        random = torch.Generator().manual_seed(7)
        heads, dim = made.num_kv_heads, made.head_size
        pages = -(-max(kv_lens) // SIZE) + 1
        order = 1 + torch.randperm(len(kv_lens) * pages, generator=random)  # page 0 is vLLM's null block
        self.tables = order.reshape(len(kv_lens), pages).to(torch.int32)
        self.cache = torch.zeros(Backend.get_kv_cache_shape(1 + len(order), SIZE, heads, dim), dtype=dtype)
        self.k, self.v = [], []
        for table, length in zip(self.tables, kv_lens, strict=True):
            k, v = (torch.randn(length, heads, dim, generator=random).to(dtype) for _ in range(2))
            at = torch.arange(length)
            slots = table[at // SIZE].long() * SIZE + at % SIZE
            padded = torch.cat((slots, torch.tensor([-1])))  # vLLM pads slots, and K and V
            k_rows, v_rows = (torch.cat((t, torch.full_like(t[:1] if length else torch.zeros(1, heads, dim), 9.0)))
                              for t in (k, v))  # fmt: skip
            made.do_kv_cache_update(None, k_rows.to(dtype), v_rows.to(dtype), self.cache, padded)
            self.k.append(k)
            self.v.append(v)

    def attend(self, q: Tensor, q_lens: list[int], window: int, scale: float) -> Tensor:
        """fp32, one query at a time."""
        out, rows = [], iter(q.float())
        for k, v, n in zip(self.k, self.v, q_lens, strict=True):
            for position in range(len(k) - n, len(k)):
                seen = slice(max(0, position + 1 - window) if window else 0, position + 1)
                row = next(rows)
                keys, values = (t[seen].float().repeat_interleave(len(row) // t.shape[1], 1) for t in (k, v))
                weights = (torch.einsum("hd,khd->hk", row, keys) * scale).softmax(-1)
                out.append(torch.einsum("hk,khd->hd", weights, values))
        return torch.stack(out)


BATCHES = {  # new tokens and lengths; parts that the builder makes of them: q_len, or 0 for a prefill
    "decodes": ([1, 1, 1], [1, 64, 130], [1]),
    "verification": ([4, 4], [4, 117], [4]),
    "prefill": ([70], [70], [0]),
    "prefill with a prefix": ([33], [161], [0]),
    "mixed": ([1, 1, 40, 9], [65, 200, 40, 100], [1, 0]),
    "verification and prefill": ([4, 4, 30], [49, 128, 94], [4, 0]),
    "short ones of several lengths": ([1, 4, 2], [7, 70, 48], [1, 0]),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", BATCHES)
def test_attention_is_that_of_a_plain_reference(kind: str, batch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, (q_lens, kv_lens, parts) = impl(kind, monkeypatch), BATCHES[batch]
    there = Sequences(made, kv_lens, torch.bfloat16)
    metadata = builder(drafts=3).build(0, common(q_lens, kv_lens, there.tables))
    assert [part.q_len for part in metadata.parts] == parts
    tokens, random = sum(q_lens), torch.Generator().manual_seed(8)
    q = torch.randn(tokens + 3, Q_HEADS, made.head_size, generator=random).bfloat16()  # 3 pad a piecewise graph
    out = torch.full_like(q, 5.0)
    layer: Any = SimpleNamespace()
    assert made.forward(layer, q, None, None, there.cache, metadata, out) is out
    expected = there.attend(q[:tokens], q_lens, made.window, made.scale)
    torch.testing.assert_close(out[:tokens].float(), expected, rtol=2**-7, atol=2**-7)
    assert torch.all(out[tokens:] == 5.0)


def test_rows_that_pad_a_graph_give_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    made, q_lens, kv_lens = impl("sliding", monkeypatch), [4, 4, 0, 0], [70, 12, 0, 0]
    there = Sequences(made, kv_lens[:2], torch.bfloat16)
    tables = torch.cat((there.tables, torch.zeros_like(there.tables)))
    metadata = builder(drafts=3).build(0, common(q_lens, kv_lens, tables, tokens=16))
    (part,) = metadata.parts
    assert (part.q_len, part.end, part.max_kv_len) == (4, 16, MAX_LEN)
    q = torch.randn(16, Q_HEADS, made.head_size).bfloat16()
    out = torch.full_like(q, 5.0)
    made.forward(None, q, None, None, there.cache, metadata, out)
    torch.testing.assert_close(out[:8].float(), there.attend(q[:8], q_lens[:2], made.window, made.scale),
                               rtol=2**-7, atol=2**-7)  # fmt: skip
    assert torch.all(out[8:] == 0)


def test_a_captured_batch_is_for_the_longest_sequences() -> None:
    tables = torch.zeros(2, 64, dtype=torch.int32)
    captured = common([4, 4], [MAX_LEN, MAX_LEN], tables)
    (part,) = builder(drafts=3).build_for_cudagraph_capture(captured).parts
    assert (part.q_len, part.max_kv_len) == (4, MAX_LEN)
    assert captured.seq_lens.tolist() == [4, 4]
    lengths = {}
    for graphs in (True, False):
        (decodes,) = builder(graphs=graphs).build(0, common([1, 1], [600, 9], tables)).parts
        _, prefill = builder(graphs=graphs).build(0, common([1, 30], [600, 30], tables)).parts
        lengths[graphs] = decodes.max_kv_len, prefill.max_kv_len
    assert lengths == {True: (MAX_LEN, 512), False: (1024, 512)}
    (many,) = builder().build(0, common([1] * 33, [600] * 33, torch.zeros(33, 64, dtype=torch.int32))).parts
    assert many.max_kv_len == 1024, "no graph is as large"


def test_images_go_to_vllms_kernel_on_the_same_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of prefills that still have tokens in an image or before it; decodes and later text do not."""
    from kerngen.vllm import attention_v0_26 as ours

    made, called = impl("sliding", monkeypatch), []
    monkeypatch.setattr("vllm.utils.torch_utils.PIN_MEMORY", False)
    monkeypatch.setattr(ours, "unified_attention", lambda **arguments: called.append(arguments))
    q_lens, kv_lens = [1, 30, 20], [60, 30, 40]
    there = Sequences(made, kv_lens, torch.bfloat16)
    images = {0: [(2, 9)], 1: [(4, 12)], 2: [(3, 19)]}
    metadata = builder().build(0, common(q_lens, kv_lens, there.tables, ranges=images))
    assert [part.q_len for part in metadata.parts] == [1, 0]
    assert metadata.mm_prefix_range == {0: [(4, 12)]}
    assert metadata.mm_prefix_range_tensor.tolist() == [[[4, 12]], [[0, 0]]]
    scale = torch.ones(())
    layer: Any = SimpleNamespace(_k_scale=scale, _v_scale=scale, mm_prefix_clamp_sliding_window=True)
    q = torch.randn(51, Q_HEADS, made.head_size).bfloat16()
    made.forward(layer, q, None, None, there.cache, metadata, torch.zeros_like(q))
    (asked,) = called
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    inspect.signature(unified_attention).bind(**asked)
    assert asked["window_size"] == (47, 0)
    assert asked["mm_prefix_clamp_sliding_window"] is True
    assert (len(asked["q"]), asked["cu_seqlens_q"].tolist()) == (50, [0, 30, 50])
    page, row = divmod(29, SIZE)
    for name, known in (("k", there.k), ("v", there.v)):  # [blocks, 64, heads, dim], as vLLM's kernel reads
        assert torch.equal(asked[name][asked["block_table"][0, page], row], known[1][29])
    metadata.mm_prefix_range = metadata.mm_prefix_range_tensor = None  # as vLLM's model does for full layers
    out = torch.zeros_like(q)
    made.forward(layer, q, None, None, there.cache, metadata, out)
    torch.testing.assert_close(out.float(), there.attend(q, q_lens, made.window, made.scale), rtol=2**-7, atol=2**-7)
    a_chunk_in_an_image = builder().build(0, common([1], [8], there.tables[:1], ranges={0: [(2, 9)]}))
    assert [part.q_len for part in a_chunk_in_an_image.parts] == [0]
    text = builder().build(0, common([30, 30], [30, 30], there.tables[:2], ranges={0: [], 1: []}))
    assert text.mm_prefix_range_tensor is None


def validated(backend: Any, **changes: Any) -> list[str]:
    from vllm.platforms.interface import DeviceCapability

    fields = {
        "head_size": 256, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": None, "use_mla": False,
        "has_sink": False, "use_sparse": False, "use_mm_prefix": True, "use_per_head_quant_scales": False,
        "device_capability": DeviceCapability(9, 0), "attn_type": "decoder", "has_sliding_window": True,
    }  # fmt: skip
    return list(backend.validate_configuration(**(fields | changes)))


def test_vllm_finds_the_backend_and_lays_its_pages_out() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    backend: Any = AttentionBackendEnum.CUSTOM.get_class()
    assert AttentionBackendEnum[backend.get_name()] is AttentionBackendEnum.CUSTOM
    assert backend.get_kv_cache_shape(10, 64, 4, 512) == (10, 8, 64, 512)
    assert backend.get_kv_cache_block_dim(64, 4, 512) == 0
    assert not backend.indexes_kv_by_block_stride(), "kernels take pages that follow each other"
    assert backend.get_preferred_block_size(16) == 64
    assert validated(backend) == validated(backend, head_size=512, has_sliding_window=False) == []
    assert validated(backend, block_size=256, kv_cache_dtype="bfloat16") == []


@pytest.mark.parametrize(("changes", "why"), [
    ({"head_size": 64}, "head_size"), ({"dtype": torch.float32}, "dtype"),
    ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype"), ({"kv_cache_dtype": "float16"}, "a cache in float16"),
    ({"block_size": 16}, "block_size"),
    ({"has_sink": True}, "sinks"), ({"attn_type": "encoder_only"}, "encoder_only"), ({"use_mla": True}, "MLA"),
    ({"use_kv_connector": True}, "KV connector"), ({"use_non_causal": True}, "non-causal"), ({"use_pcp": True}, "PCP"),
    ({"use_batch_invariant": True}, "batch invariance"),
])  # fmt: skip
def test_what_is_not_served_is_refused(changes: dict[str, Any], why: str) -> None:
    from kerngen.vllm.attention_v0_26 import Backend

    (reason,) = validated(Backend, **changes)
    assert why in reason


def chosen(given: Any) -> Any:
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    MODELS_CONFIG_MAP["Gemma4ForCausalLM"].verify_and_update_config(given)
    return given.attention_config.backend


def test_gemma_4_gets_it_where_no_backend_is_named(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.models import config
    from vllm.v1.attention.backends import fa_utils
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    monkeypatch.setattr(fa_utils, "is_fa_version_supported", lambda version: False)
    caplog.set_level(logging.INFO, "vllm.kerngen")
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    assert chosen(settings()) is AttentionBackendEnum.CUSTOM
    assert "attention by attn_decode and attn_prefill" in caplog.text
    named = settings(attention_config__backend=AttentionBackendEnum.FLASHINFER)
    assert chosen(named) is AttentionBackendEnum.FLASHINFER
    for name in ("Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration"):
        assert config.MODELS_CONFIG_MAP[name] is config.MODELS_CONFIG_MAP["Gemma4ForCausalLM"]
    assert config.Gemma4Config not in config.MODELS_CONFIG_MAP.values()


@pytest.mark.parametrize(("changes", "why"), [
    ({"cache_config__cache_dtype": "fp8"}, "kv_cache_dtype"),
    ({"hf": text_config(quantization_config={"kv_cache_scheme": {"num_bits": 8}})}, "kv_cache_dtype"),
    ({"kv_transfer_config": SimpleNamespace(is_kv_transfer_instance=True)}, "KV connector"),
    ({"cache_config__user_specified_block_size": True}, "block_size"),
    ({"parallel_config__decode_context_parallel_size": 2}, "divided among ranks"),
    ({"attention_config__backend_per_kind": {"full_attention": "TRITON_ATTN"}}, "another backend is named"),
    ({"hf": text_config(num_attention_heads=24)}, "num_q_heads=24"),
])  # fmt: skip
def test_else_vllm_chooses_as_it_did(
    changes: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.attention.backends import fa_utils
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    monkeypatch.setattr(fa_utils, "is_fa_version_supported", lambda version: False)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.INFO, "vllm.kerngen")
    assert chosen(settings(**changes)) is AttentionBackendEnum.TRITON_ATTN
    (line,) = {m for m in caplog.messages if m.startswith("kerngen: attention stays vLLM's")}
    assert why in line


def test_bf16_on_a_board_without_it_stays_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends import fa_utils
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    monkeypatch.setattr(fa_utils, "is_fa_version_supported", lambda version: False)
    monkeypatch.setattr(type(current_platform), "get_device_capability", capability(7, 5))
    assert chosen(settings()) is AttentionBackendEnum.TRITON_ATTN
    assert chosen(settings(dtype=torch.float16)) is AttentionBackendEnum.CUSTOM


@pytest.mark.parametrize(("drafts", "q_lens", "support"), [
    (0, (1,), "UNIFORM_BATCH"), (3, (1, 4), "UNIFORM_BATCH"), (7, (1, 8), "UNIFORM_BATCH"),
    (8, (1,), "UNIFORM_SINGLE_TOKEN_DECODE"),
])  # fmt: skip
def test_drafts_are_verified_as_decodes_up_to_eight_tokens(drafts: int, q_lens: tuple[int, ...], support: str) -> None:
    made = builder(drafts=drafts)
    assert made.q_lens == q_lens
    assert made.reorder_batch_threshold == max(q_lens)
    assert made.get_cudagraph_support(made.vllm_config, made.kv_cache_spec).name == support


def test_overridden_methods_have_the_signatures_of_vllms() -> None:
    from kerngen.vllm import attention_v0_26 as ours

    for made in (ours.Backend, ours.Builder, ours.Impl, ours.Gemma4Config):
        base = made.__mro__[1]
        names = [name for name, value in vars(made).items() if callable(getattr(made, name)) and hasattr(base, name)]
        for name in {*names} - {"__init__", "__doc__"} | ({"__init__"} if made is not ours.Backend else set()):
            if name.startswith("__") and name != "__init__":
                continue
            theirs, mine = (list(inspect.signature(getattr(cls, name)).parameters) for cls in (base, made))
            assert mine == theirs, f"{made.__name__}.{name}"


@pytest.mark.parametrize("kind", KINDS)
def test_every_problem_of_a_forward_is_asked_for_ahead(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decodes share their choice with one of the grid, kv_len included; prefills all but the number of tokens, of which
    the grid has those that the runtime chooses at.
    """
    from kerngen.runtime.executors.reference import Reference
    from kerngen.templates import find_kernel
    from kerngen.tuning_db.read.ids import bucketed
    from kerngen.vllm import ahead
    from kerngen.vllm import attention_v0_26 as ours

    loaded: dict[str, list[Any]] = {}

    def load(asked: Any, most: int, device: torch.device, exactly: Any) -> Counter[str]:
        loaded.update({"any": list(asked), "exactly": list(exactly)})
        return Counter(default=1)

    def key(kernel: str, p: Any) -> tuple[Any, ...]:
        static = replace(p, batch=1, kv_len=1, **({"num_tokens": 1} if kernel == "attn_prefill" else {}))
        return kernel, static, *bucketed(find_kernel(kernel), p).items(), p.kv_len

    monkeypatch.setattr(ahead, "load_ahead", load)
    monkeypatch.setattr(ahead, "get_current_vllm_config_or_none", settings)
    made = impl(kind, monkeypatch)
    ours.AHEAD.load(torch.device("cuda"))
    ((kernel, write),) = loaded["any"]
    assert (kernel, write.page_heads, write.num_kv_heads) == ("kv_write", 2 * made.num_kv_heads, made.num_kv_heads)
    have: dict[Any, list[Any]] = {}
    for kernel, problem in loaded["exactly"]:
        have.setdefault(key(kernel, problem), []).append(problem)
    met: list[Any] = []
    monkeypatch.setattr(Reference, "run", lambda self, call, where: met.append((call.kernel, call.problem)))
    batches: list[tuple[list[int], list[int]]] = [
        *(([1] * n, [3000] * n) for n in range(1, 9)), *(([4] * n, [40] * n) for n in range(1, 9)),
        ([1, 500], [4096, 4000]), ([4, 4, 40, 400], [2049, 9, 40, 900]), ([512], [512]), ([2] * 8, [70] * 8),
    ]  # fmt: skip
    for q_lens, kv_lens in batches:
        for graphs in (True, False):
            cache = torch.zeros(2, 2 * made.num_kv_heads, SIZE, made.head_size, dtype=torch.bfloat16)
            tables = torch.zeros(len(q_lens), 64, dtype=torch.int32)
            metadata = builder(drafts=3, graphs=graphs).build(0, common(q_lens, kv_lens, tables))
            q = torch.zeros(sum(q_lens), Q_HEADS, made.head_size, dtype=torch.bfloat16)
            made.forward(None, q, None, None, cache, metadata, torch.zeros_like(q))
    assert {kernel for kernel, _ in met} == {"attn_decode", "attn_prefill"}
    for kernel, problem in met:
        there = have.get(key(kernel, problem), [])
        assert there, problem
        if kernel == "attn_decode":
            assert max(p.batch for p in there) >= problem.batch
        else:
            assert any(p.num_tokens >= problem.num_tokens for p in there), problem


def test_heads_that_no_kernel_takes_are_refused_as_the_layer_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    from kerngen.errors import ProblemError
    from kerngen.vllm import attention_v0_26 as ours

    monkeypatch.setattr(ours, "get_current_vllm_config", settings)
    with pytest.raises(ProblemError, match="3 q heads per kv head"):
        ours.Impl(6, 256, 1.0, 2)
    with pytest.raises(NotImplementedError, match="ALiBi"):
        ours.Impl(4, 256, 1.0, 2, [1.0] * 4)
