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
from conftest import capability, recorded, serves
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
        "sliding_window": 1024, "use_bidirectional_attention": "vision",
    }  # fmt: skip
    return SimpleNamespace(**(fields | changes))


def impl(
    kind: str, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype = torch.bfloat16, changes: Any = None, **options: Any
) -> Any:
    from kerngen.vllm import attention_v0_26 as ours

    dim, kv_heads, window = KINDS[kind]
    config = settings(drafts=3, dtype=dtype, **(changes or {}))
    monkeypatch.setattr(ours, "get_current_vllm_config", lambda: config)
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

    def attend(self, q: Tensor, q_lens: list[int], window: int, scale: float, images: Any = None) -> Tensor:
        """fp32, one query at a time. images: vLLM's ranges of each sequence, by its row."""
        out, rows = [], iter(q.float())
        for sequence, (k, v, n) in enumerate(zip(self.k, self.v, q_lens, strict=True)):
            at = torch.arange(len(k))
            for position in range(len(k) - n, len(k)):
                seen = at <= position
                for first, last in (images or {}).get(sequence, ()):
                    if first <= position <= last:
                        seen |= (at >= first) & (at <= last)
                if window:
                    seen &= position - at < window
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


WITH_IMAGES: dict[str, tuple[list[int], list[int], dict[int, list[tuple[int, int]]], list[int]]] = {
    # new tokens, lengths, images; parts, as of BATCHES
    "one": ([30], [30], {0: [(4, 12)]}, [0]),
    "several beside text and decodes": (
        [1, 1, 70, 20, 33], [60, 9, 70, 40, 50], {0: [(2, 9)], 1: [], 2: [(4, 12), (13, 44)], 3: [(3, 19), (25, 33)]},
        [1, 0],
    ),
    "a chunk that ends in an image": ([20], [30], {0: [(25, 60)]}, [0]),
    "a cached prefix that ends in an image": ([40], [100], {0: [(20, 80)]}, [0]),
    "longer than the window": ([150], [150], {0: [(10, 120)]}, [0]),
    "as many new tokens as of a verification": ([4, 4], [9, 200], {0: [(2, 30)], 1: []}, [0]),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", WITH_IMAGES)
def test_an_image_sees_all_of_itself_in_a_window(kind: str, batch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And in layers without one no token sees behind itself."""
    monkeypatch.setattr("vllm.utils.torch_utils.PIN_MEMORY", False)
    made, (q_lens, kv_lens, images, parts) = impl(kind, monkeypatch), WITH_IMAGES[batch]
    there = Sequences(made, kv_lens, torch.bfloat16)
    given = common(q_lens, kv_lens, there.tables, ranges=images, tokens=sum(q_lens) + 2)  # 2 pad the batch
    metadata = builder(drafts=3).build(0, given)
    assert [part.q_len for part in metadata.parts] == parts
    assert [part.ends is not None for part in metadata.parts] == [not q_len for q_len in parts]
    q = torch.randn(sum(q_lens) + 3, Q_HEADS, made.head_size, generator=torch.Generator().manual_seed(9)).bfloat16()
    found = torch.zeros_like(q)
    made.forward(None, q, None, None, there.cache, metadata, found)
    expected, causal = (
        there.attend(q, q_lens, made.window, made.scale, its) for its in (images if made.window else None, None)
    )
    torch.testing.assert_close(found[: sum(q_lens)].float(), expected, rtol=2**-7, atol=2**-7)
    assert ((expected - causal).abs().amax() > 0.1) == (made.window > 0)


def test_a_batch_whose_new_tokens_see_nothing_behind_themselves_is_one_of_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.utils.torch_utils.PIN_MEMORY", False)
    tables = torch.zeros(2, 64, dtype=torch.int32)
    for q_lens, kv_lens, images, parts in (
        ([1, 1], [60, 60], {0: [(2, 9)], 1: [(50, 59)]}, [1]),  # the last token of an image is its own
        ([1], [8], {0: [(2, 9)]}, [1]),  # a chunk of one: what it could see is no key yet
        ([30, 20], [60, 20], {0: [(2, 30)], 1: [(40, 60)]}, [0]),
        ([30, 30], [30, 30], {0: [], 1: []}, [0]),
        ([30, 30], [30, 30], {}, [0]),
        ([30, 30], [30, 30], None, [0]),
    ):
        metadata = builder().build(0, common(q_lens, kv_lens, tables[: len(q_lens)], ranges=images))
        assert [(part.q_len, part.ends) for part in metadata.parts] == [(q_len, None) for q_len in parts]


def test_where_images_stand_is_told_without_lengths_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.utils.torch_utils.PIN_MEMORY", False)
    given = common([1, 4, 3], [60, 8, 3], torch.zeros(3, 64, dtype=torch.int32), ranges={0: [(2, 9)], 1: [(5, 6)]})
    given.seq_lens_cpu_upper_bound = None
    _, prefill = builder().build(0, given).parts
    assert prefill.ends.tolist() == [4, 6, 6, 7, 0, 1, 2]


@pytest.mark.parametrize(("kind", "changes", "sees"), [
    ("sliding", {}, True), ("full", {}, False),
    ("sliding", {"model_config__is_mm_prefix_lm": False}, False),  # E2B, E4B, drafters
    ("full", {"hf": text_config(use_bidirectional_attention=None)}, True),  # another model, for which CUSTOM is named
])  # fmt: skip
def test_which_layers_see_images(kind: str, changes: Any, sees: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.utils.torch_utils.PIN_MEMORY", False)
    made = impl(kind, monkeypatch, changes=changes)
    there = Sequences(made, [30], torch.bfloat16)
    metadata = builder().build(0, common([30], [30], there.tables, ranges={0: [(4, 12)]}))
    q = torch.randn(30, Q_HEADS, made.head_size).bfloat16()
    (call,) = recorded(lambda: made.forward(None, q, None, None, there.cache, metadata, torch.empty_like(q)))
    assert (call.kernel, call.problem.ends) == ("attn_prefill", sees)


def test_vllms_model_hides_images_from_layers_without_a_window() -> None:
    """What `_sees_images` goes by, since the metadata has nothing that vLLM would clear."""
    from vllm.model_executor.models import gemma4, gemma4_mm

    from kerngen.vllm.attention_v0_26 import Metadata

    source = inspect.getsource(gemma4_mm.Gemma4ForConditionalGeneration)
    assert 'getattr(text_config, "use_bidirectional_attention", None) == "vision"' in source
    assert 'i for i, lt in enumerate(layer_types) if lt != "sliding_attention"' in source
    for cleared in ("mm_prefix_range", "mm_prefix_range_tensor"):
        assert f"metadata.{cleared} = None" in source
        assert not hasattr(Metadata(0, ()), cleared)
    assert "mm_prefix_clamp_sliding_window=self.is_sliding" in inspect.getsource(gemma4.Gemma4Attention)


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
    monkeypatch.setattr("vllm.utils.torch_utils.PIN_MEMORY", False)
    batches: list[tuple[list[int], list[int]]] = [
        *(([1] * n, [3000] * n) for n in range(1, 9)), *(([4] * n, [40] * n) for n in range(1, 9)),
        ([1, 500], [4096, 4000]), ([4, 4, 40, 400], [2049, 9, 40, 900]), ([512], [512]), ([2] * 8, [70] * 8),
    ]  # fmt: skip
    for q_lens, kv_lens in batches:
        for graphs in (True, False):
            cache = torch.zeros(2, 2 * made.num_kv_heads, SIZE, made.head_size, dtype=torch.bfloat16)
            tables = torch.zeros(len(q_lens), 64, dtype=torch.int32)
            for images in (None, {len(q_lens) - 1: [(0, MAX_LEN - 1)]}):
                given = common(q_lens, kv_lens, tables, ranges=images)
                metadata = builder(drafts=3, graphs=graphs).build(0, given)
                q = torch.zeros(sum(q_lens), Q_HEADS, made.head_size, dtype=torch.bfloat16)
                made.forward(None, q, None, None, cache, metadata, torch.zeros_like(q))
    assert {kernel for kernel, _ in met} == {"attn_decode", "attn_prefill"}
    assert any(p.ends for kernel, p in met if kernel == "attn_prefill") == (made.window > 0)
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
