"""vLLM 0.26's attention by attn_decode and attn_prefill over its pages: the backend CUSTOM.

A page is [2 * num_kv_heads, 64, head_dim]: the heads of K, then those of V. Decodes, verification of drafts among them,
lead a batch (vLLM orders it so) and go to attn_decode where all have as many new tokens; the rest is attn_prefill's,
with new tokens that see behind themselves, to the end of their image.
Source of the contract: vLLM 0.26, vllm/v1/attention/backend.py and vllm/v1/attention/backends/triton_attn.py.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm import envs
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.models import config as models
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionLayer,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.kv_cache_interface import AttentionSpec

import kerngen.ops  # noqa: F401 - torch.ops.kerngen
from kerngen.errors import DeviceError, ProblemError, UnknownName
from kerngen.templates import find_kernel
from kerngen.templates.common.rows.torch_rows import DTYPE_NAME
from kerngen.vllm.ahead import AHEAD
from kerngen.vllm.attention_grid import PAGE_SIZE, Grid, Heads, bucket_of
from kerngen.vllm.image_ends import Images, ends_of, images_among
from kerngen.vllm.linear import target

log = logging.getLogger("vllm.kerngen")
MAX_VERIFIED = 8  # tokens of a sequence that attn_decode takes within full CUDA graphs: what is tuned and was measured
CACHE_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def install() -> None:
    """Register the backend, and have vLLM choose it for Gemma-4 as `Gemma4Config` says."""
    register_backend(AttentionBackendEnum.CUSTOM, f"{__name__}.{Backend.__name__}")
    for name, config in models.MODELS_CONFIG_MAP.items():  # the hook by which vLLM chooses for a model
        if config is models.Gemma4Config:
            models.MODELS_CONFIG_MAP[name] = Gemma4Config


class Gemma4Config(models.Gemma4Config):
    """vLLM's, which takes kerngen's backend where the user named none and the kernels serve the model."""

    @staticmethod
    def verify_and_update_config(vllm_config: VllmConfig) -> None:
        """Set the backend of all layers. A line says which, and if it is not kerngen's, why."""
        if (why := _why_not(vllm_config)) is None:
            vllm_config.attention_config.backend = AttentionBackendEnum.CUSTOM
            log.info("kerngen: attention by attn_decode and attn_prefill, in pages of %d tokens", PAGE_SIZE)
        else:
            log.info("kerngen: attention stays vLLM's: %s", why)
        models.Gemma4Config.verify_and_update_config(vllm_config)


def _why_not(vllm_config: VllmConfig) -> str | None:
    """vLLM asks the backend again as it makes each layer, and stops where it refuses: all is asked here before."""
    chosen, model, cache = vllm_config.attention_config, vllm_config.model_config, vllm_config.cache_config
    if chosen.backend is not None or chosen.backend_per_kind or chosen.flash_attn_version is not None:
        return "another backend is named"
    if vllm_config.parallel_config.decode_context_parallel_size > 1:
        return "a sequence's keys are divided among ranks (decode context parallelism)"
    cache_dtype = cache.cache_dtype
    if cache_dtype == "auto" and _stores_kv_in_fp8(model.hf_config):
        cache_dtype = "fp8"
    transfer = vllm_config.kv_transfer_config
    capability = current_platform.get_device_capability()
    if capability is None:
        return "vLLM sees no GPU in this process"
    try:
        for heads in _kinds(vllm_config):
            reasons = Backend.validate_configuration(
                head_size=heads.head_dim, dtype=model.dtype, kv_cache_dtype=cache_dtype,
                block_size=cache.block_size if cache.user_specified_block_size else None, use_mla=False, has_sink=False,
                use_sparse=False, use_mm_prefix=model.is_mm_prefix_lm, use_per_head_quant_scales=False,
                device_capability=capability, attn_type=AttentionType.DECODER, has_sliding_window=heads.window > 0,
                use_non_causal=chosen.use_non_causal, use_batch_invariant=envs.VLLM_BATCH_INVARIANT,
                use_kv_connector=transfer is not None and transfer.is_kv_transfer_instance,
                use_pcp=vllm_config.parallel_config.prefill_context_parallel_size > 1,
            )  # fmt: skip
            if reasons:
                return "; ".join(reasons)
            if (why := _why_not_heads(heads)) is not None:
                return why
    except (DeviceError, ProblemError, UnknownName) as e:
        return e.message
    return None


def _why_not_heads(heads: Heads) -> str | None:
    """Raises as `Heads` and `target`."""
    asked = (
        ("attn_decode", heads.decode(1, 1, 1)),
        ("attn_prefill", heads.prefill(1, 1, 1, heads.sees_images)),
        ("kv_write", heads.write()),
    )
    return next(filter(None, (find_kernel(name).why_unsupported(p, target()) for name, p in asked)), None)


def _stores_kv_in_fp8(hf_config: Any) -> bool:
    """Whether the checkpoint names a format of the cache: vLLM then takes fp8."""
    quantised: Any = getattr(hf_config, "quantization_config", None) or {}
    if not isinstance(quantised, dict):
        quantised = vars(quantised)
    return quantised.get("kv_cache_scheme") is not None


def _kinds(vllm_config: VllmConfig) -> Iterator[Heads]:
    """Of the sliding layers and of the full ones, on one rank."""
    c, ranks = vllm_config.model_config.hf_text_config, vllm_config.parallel_config.tensor_parallel_size
    dtype = vllm_config.model_config.dtype
    has_cap = bool(getattr(c, "attn_logit_softcapping", None))
    full_kv_heads = c.num_key_value_heads
    if getattr(c, "attention_k_eq_v", False):
        full_kv_heads = getattr(c, "num_global_key_value_heads", None) or full_kv_heads
    for kind, dim, kv_heads, window in (
        ("sliding_attention", c.head_dim, c.num_key_value_heads, c.sliding_window),
        ("full_attention", getattr(c, "global_head_dim", None) or c.head_dim, full_kv_heads, 0),
    ):
        if kind in c.layer_types:
            mine = c.num_attention_heads // ranks, max(1, kv_heads // ranks)
            yield Heads(*mine, dim, window, DTYPE_NAME.get(dtype, str(dtype)), has_cap,
                        _sees_images(vllm_config, window))  # fmt: skip


def _sees_images(vllm_config: VllmConfig, window: int) -> bool:
    """Whether tokens of an image see each other in a layer.

    Where a model's configuration says "vision", as Gemma-4's does, they do so in layers with a window alone: vLLM hides
    images from the others (Gemma4ForConditionalGeneration._clear_mm_prefix_for_full_attn_layers).
    """
    model = vllm_config.model_config
    if not model.is_mm_prefix_lm:
        return False
    return window > 0 or getattr(model.hf_text_config, "use_bidirectional_attention", None) != "vision"


class Backend(AttentionBackend):
    """Causal attention of decoders, with windows, over caches in the model's own fp16 or bf16."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", *CACHE_DTYPES]
    forward_includes_kv_cache_update: bool = False

    @staticmethod
    def get_name() -> str:
        return AttentionBackendEnum.CUSTOM.name

    @staticmethod
    def get_impl_cls() -> type[Impl]:
        return Impl

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int | MultipleOf]:
        return [PAGE_SIZE]

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """Of K in the first half of a page's heads and V in the other."""
        return num_blocks, 2 * num_kv_heads, block_size, head_size

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [128, 256, 512]

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        """New tokens in images see behind themselves (image_ends.py)."""
        return True

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return False

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: Any,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: DeviceCapability,
    ) -> str | None:
        """Why the cache's dtype does not go with the activations', or None if it does."""
        if CACHE_DTYPES.get(kv_cache_dtype, dtype) != dtype:
            return f"a cache in {kv_cache_dtype} under activations in {dtype}"
        return None


@dataclass(frozen=True, slots=True)
class Part:
    """Sequences of a batch that one launch serves: its tokens first to end - 1. max_kv_len: a bucket of their lengths.

    q_len: new tokens of each, for attn_decode; 0 where cu_seqlens_q [B + 1] says it, for attn_prefill. ends
    [end - first] int32: the last key that each token sees in layers that see images; None for its own.
    """

    first: int
    end: int
    block_table: Tensor
    kv_lens: Tensor
    max_kv_len: int
    q_len: int = 0
    cu_seqlens_q: Tensor | None = None
    max_seqlen_q: int = 0
    ends: Tensor | None = None


@dataclass
class Metadata(AttentionMetadata):
    """parts: of the batch, decodes first."""

    num_actual_tokens: int
    parts: tuple[Part, ...]


class Builder(AttentionMetadataBuilder[Metadata]):
    """Full CUDA graphs are of decodes whose sequences all have as many new tokens."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.max_kv_len = _max_kv_len(vllm_config)
        self.q_lens = _q_lens(vllm_config)
        self._init_reorder_batch_threshold(max(self.q_lens))

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: AttentionSpec) -> AttentionCGSupport:
        """Where a verification has more tokens than attn_decode takes, single tokens alone are captured whole."""
        drafts = vllm_config.speculative_config
        if drafts is not None and 1 + (drafts.num_speculative_tokens or 0) > MAX_VERIFIED:
            return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        return cls._cudagraph_support

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> Metadata:
        """As `build`, for sequences as long as the model takes: a graph is replayed for any."""
        common_attn_metadata.seq_lens.fill_(common_attn_metadata.max_query_len)  # what is run to warm up is short
        return self._build(common_attn_metadata, is_captured=True)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Metadata:
        return self._build(common_attn_metadata, is_captured=False)

    def _build(self, common: CommonAttentionMetadata, is_captured: bool) -> Metadata:
        if common.causal is not True:
            raise NotImplementedError("kerngen: the backend CUSTOM is causal; --attention-backend TRITON_ATTN is not")
        rows, starts = common.num_reqs, common.query_start_loc_cpu.tolist()
        lens = [end - start for start, end in pairwise(starts)][:rows]
        ranges = common.mm_req_doc_ranges or {}
        limits = common.seq_lens_cpu_upper_bound  # exact for a sequence with new tokens of its prompt
        if limits is None and any(ranges.values()):
            limits = common.seq_lens.cpu()
        upper = [common.max_seq_len] * rows if limits is None else limits[:rows].tolist()
        images = _images(ranges, upper, lens)
        decodes, q_len = self._decodes(lens, common.num_actual_tokens)
        decodes = min(decodes, *images) if images else decodes
        tokens = common.num_actual_tokens if decodes == rows else starts[decodes]
        is_captured = is_captured or (decodes == rows and self._is_graph(tokens))
        parts: list[Part] = []

        def part(first_row: int, last: int, first: int, end: int, **queries: Any) -> None:
            longest = self.max_kv_len if is_captured else bucket_of(max(upper[first_row:last]), self.max_kv_len)
            of = slice(first_row, last)
            parts.append(Part(first, end, common.block_table_tensor[of], common.seq_lens[of], longest, **queries))

        if decodes:
            part(0, decodes, 0, tokens, q_len=q_len)
        if any(lens[decodes:]):
            cu_seqlens = common.query_start_loc[decodes : rows + 1]
            ends = None
            if images:
                prefills = ((upper[r] - lens[r], lens[r], images.get(r, ())) for r in range(decodes, rows))
                ends = async_tensor_h2d(ends_of(prefills, common.num_actual_tokens - tokens), common.seq_lens.device)
            part(decodes, rows, tokens, common.num_actual_tokens, max_seqlen_q=max(lens[decodes:]), ends=ends,
                 cu_seqlens_q=cu_seqlens - starts[decodes] if decodes else cu_seqlens)  # fmt: skip
        return Metadata(common.num_actual_tokens, tuple(parts))

    def _decodes(self, lens: list[int], num_tokens: int) -> tuple[int, int]:
        """(leading sequences that are decodes, new tokens of each). Those that pad a graph's batch have no tokens of
        their own, but a graph has rows for them.
        """
        q_len = lens[0] if lens else 0
        if q_len not in self.q_lens:
            return 0, 0
        if num_tokens == len(lens) * q_len and all(n in (0, q_len) for n in lens):
            return len(lens), q_len
        return next((row for row, n in enumerate(lens) if n != q_len), len(lens)), q_len

    def _is_graph(self, num_tokens: int) -> bool:
        """Whether vLLM may run a batch of decodes as a full CUDA graph: its metadata may be captured, which vLLM says
        for the model, and for a drafter does not.
        """
        compilation = self.vllm_config.compilation_config
        mode = compilation.cudagraph_mode
        return mode is not None and mode.has_full_cudagraphs() and (
            num_tokens <= (compilation.max_cudagraph_capture_size or 0)
        )  # fmt: skip


def _images(ranges: Mapping[int, Images], kv_lens: list[int], lens: list[int]) -> dict[int, Images]:
    """Of each sequence in which a new token sees behind itself, by its row: its images among the new tokens."""
    among = {
        row: images_among(images, kv_lens[row] - lens[row], kv_lens[row] - 1)
        for row, images in ranges.items()
        if row < len(lens)
    }
    return {row: images for row, images in among.items() if images}


def _max_kv_len(vllm_config: VllmConfig) -> int:
    """Tokens of a sequence. vLLM makes a drafter's layers by a configuration of the drafter's, and its metadata by the
    model's: both give the model's.
    """
    drafts = vllm_config.speculative_config
    model = drafts.target_model_config if drafts is not None else None
    return int((model or vllm_config.model_config).max_model_len)


def _q_lens(vllm_config: VllmConfig) -> tuple[int, ...]:
    """New tokens of a sequence that attn_decode is asked for: one, and with drafts all that are verified."""
    drafts = vllm_config.speculative_config
    verified = 1 + ((drafts.num_speculative_tokens or 0) if drafts is not None else 0)
    return tuple(sorted({1, verified if verified <= MAX_VERIFIED else 1}))


@dataclass(frozen=True, slots=True, eq=False)
class NewHeads:
    """How a layer makes q, K and V of its projection's output, for kerngen.templates.values.HeadNorms.

    q_norm, k_norm: vLLM's RMSNorm, with weights [head_dim]; that of V has none. inv_freq [head_dim / 2] fp32. v_is_k:
    the projection's output is q | k, and V is the raw k; else it is q | k | v.
    """

    q_norm: Any
    k_norm: Any
    inv_freq: Tensor
    num_rotated_pairs: int
    v_is_k: bool = False


class Impl(AttentionImpl[Metadata]):
    """One layer's attention. new_heads: where it makes q, K and V too."""

    supports_dcp: bool = False
    new_heads: NewHeads | None = None

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
    ) -> None:
        """Has the kernels of all batches that vLLM's configuration allows loaded before vLLM's first forward.

        Raises NotImplementedError for ALiBi, ProblemError for heads that the kernels do not take: where CUSTOM was
        named for such a model.
        """
        if alibi_slopes is not None:
            raise NotImplementedError("kerngen: no ALiBi; --attention-backend TRITON_ATTN has it")
        config = get_current_vllm_config()
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads, self.kv_cache_dtype = num_kv_heads or num_heads, kv_cache_dtype
        self.window, self.logit_cap = sliding_window or 0, float(logits_soft_cap or 0.0)
        heads = Heads(num_heads, self.num_kv_heads, head_size, self.window, DTYPE_NAME[config.model_config.dtype],
                      self.logit_cap > 0, _sees_images(config, self.window))  # fmt: skip
        self.heads = heads
        heads.decode(1, 1, 1), heads.prefill(1, 1, 1)  # refused here, not as the first forward asks
        scheduler = config.scheduler_config
        AHEAD.ask_all(Grid(heads, _q_lens(config), scheduler.max_num_seqs, scheduler.max_num_batched_tokens,
                           _max_kv_len(config)))  # fmt: skip
        if kv_sharing_target_layer_name is None:
            AHEAD.ask("kv_write", heads.write())

    def make_heads(self, new: NewHeads) -> str | None:
        """Have `forward` norm and rotate the heads of a projection's output, and write K and V, before attention.

        Returns why the kernel does not serve that, or None: then it will, and `do_kv_cache_update` is not called.
        """
        problem = self.heads.make(new.num_rotated_pairs, new.v_is_k)
        if why := find_kernel("qkv_norm_rope").why_unsupported(problem, target()):
            return why
        AHEAD.withdraw("kv_write", self.heads.write())
        AHEAD.ask("qkv_norm_rope", problem)
        self.new_heads = new
        return None

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """vLLM comes here after the linear layers, which have all kernels loaded where they are kerngen's."""
        if torch.cuda.is_available():
            AHEAD.load(torch.device("cuda", torch.cuda.current_device()))

    def do_kv_cache_update(
        self, layer: AttentionLayer, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """key, value [T, num_kv_heads, head_dim] of the new tokens into kv_cache [blocks, 2 * num_kv_heads, 64,
        head_dim]; slot_mapping [slots] int64, at most T, negative for none.
        """
        tokens = slot_mapping.shape[0]
        k, v = kv_cache.split(self.num_kv_heads, dim=1)
        torch.ops.kerngen.kv_write(key[:tokens], value[:tokens], k, v, slot_mapping)

    def forward(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Metadata,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """query, output [T, num_heads, head_dim], of which the first num_actual_tokens are served; kv_cache as in
        do_kv_cache_update, with the new tokens' K and V. Returns output.

        After `make_heads`, query is the projection's output [T, W] and key the positions [T] int64; K and V
        go where vLLM's forward context says for the layer.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("kerngen: attention's result is not quantised; --attention-backend TRITON_ATTN")
        if attn_metadata is None:  # vLLM measures memory
            if self.new_heads is not None:
                torch.empty_like(output)  # q, which counts
            return output.fill_(0)
        k, v = kv_cache.split(self.num_kv_heads, dim=1)
        query = query.contiguous() if self.new_heads is None else self._made(self.new_heads, layer, query, key, k, v)
        for part in attn_metadata.parts:
            q, out = query[part.first : part.end], output[part.first : part.end]
            if part.q_len:
                torch.ops.kerngen.attn_decode_into(
                    out, q, k, v, part.block_table, part.kv_lens, part.q_len, self.window, part.max_kv_len, self.scale,
                    self.logit_cap,
                )  # fmt: skip
            else:
                torch.ops.kerngen.attn_prefill_into(
                    out, q, k, v, part.block_table, part.kv_lens, part.cu_seqlens_q, part.max_seqlen_q, self.window,
                    part.max_kv_len, self.scale, self.logit_cap, part.ends if self.heads.sees_images else None,
                )  # fmt: skip
        return output

    def _made(self, new: NewHeads, layer: Any, qkv: Tensor, positions: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [slots, num_heads, head_dim] of the first tokens, as many as have a slot. Their K and V are written."""
        slots = get_forward_context().slot_mapping.get(layer.layer_name)
        if slots is None:  # vLLM writes nothing then
            slots = torch.full_like(positions, -1)
        tokens = slots.shape[0]
        q: Tensor = torch.ops.kerngen.qkv_norm_rope(
            qkv[:tokens], new.q_norm.weight, new.k_norm.weight, new.inv_freq, positions[:tokens], k, v, slots,
            self.num_heads, new.num_rotated_pairs, new.q_norm.variance_epsilon,
        )  # fmt: skip
        return q
