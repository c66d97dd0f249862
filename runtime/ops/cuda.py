"""The cuda backend: every op that has a kernel folder runs that kernel, as the tuning database says.

Dense matrices go through torch (cuBLAS): a well-kept library where kerngen has nothing to add. Per-layer embeddings
and the grouped experts have no kernel yet and run as TorchOps computes them, on the GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kerngen.errors import ProblemError
from kerngen.runtime.launcher import Launcher
from kerngen.runtime.ops import DenseLinear, KVPages, Linear, Rope, W4Linear
from kerngen.runtime.ops.eager import TorchOps
from kerngen.templates import Kernel, find_kernel

if TYPE_CHECKING:
    from kerngen.tuning_db import Store

_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


@cache
def _kernel(name: str) -> tuple[Kernel, type[Any]]:
    kernel = find_kernel(name)
    return kernel, kernel.problem_type


class CudaOps(TorchOps):
    """See `kerngen.runtime.ops.Ops` for every method's contract.

    stores: the tuning databases that `launcher` asks. max_kv_len: the longest context that the next decode steps will
    see, where the engine knows it on the host; the KV splits are chosen for it (0: the capacity of the block table).
    Raises ProblemError for a dtype that this GPU's kernels do not take.
    """

    name = "cuda"
    supports_graphs = True
    max_decode_len = 8

    def __init__(self, device: torch.device, dtype: torch.dtype, stores: Sequence[Store] = ()) -> None:
        self.launcher = Launcher(stores, index=device.index or 0)
        super().__init__(device, dtype)
        if dtype == torch.float32 or (dtype == torch.bfloat16 and not self.launcher.target.arch.has_bf16):
            raise ProblemError(
                f"the cuda backend does not run {_NAMES[dtype]} on {self.launcher.target.arch}",
                hint="--dtype fp16" if not self.launcher.target.arch.has_bf16 else "--dtype bf16, or --backend torch",
            )
        self._dtype = _NAMES[dtype]
        self._residual = _NAMES[self.residual_dtype]
        self.max_kv_len = 0

    def _run(self, name: str, problem: dict[str, Any], **arguments: Any) -> None:
        kernel, problem_type = _kernel(name)
        self.launcher.run(kernel, problem_type(dtype=self._dtype, **problem), **arguments)

    def _empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)

    def sources(self) -> dict[str, int]:
        return dict(Counter(function.source for _, _, function in self.launcher.functions).most_common())

    def prepare(self, weights: Linear) -> Linear:
        """Packed weights in the kernel's order. Raises ProblemError for shapes that w4a16_gemm does not take."""
        if isinstance(weights, DenseLinear):
            return weights
        from kerngen.templates.w4a16_gemm.pack import pack

        packed, scales = pack(weights.packed, weights.scales)
        return W4Linear(packed, scales, weights.out_features, weights.in_features, weights.group_size)

    def embed(self, ids: Tensor, table: Tensor, scale: float) -> Tensor:
        tokens, (vocab, hidden) = len(ids), table.shape
        out = self._empty(tokens, hidden, dtype=self.residual_dtype)
        if tokens:
            self._run(
                "embed",
                {"hidden": hidden, "vocab_size": vocab, "residual_dtype": self._residual, "num_tokens": tokens},
                out=out, ids=ids, table=table, scale=scale, num_tokens=tokens,
            )  # fmt: skip
        return out

    def rmsnorm(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        hidden = x.shape[-1]
        tokens = x.numel() // hidden
        out = self._empty(*x.shape)
        if tokens:
            problem = {"hidden": hidden, "residual_dtype": _NAMES[x.dtype], "has_weight": weight is not None}
            self._run("rmsnorm", problem | {"num_tokens": tokens}, out=out, x=x.contiguous(), weight=weight, eps=eps,
                      num_tokens=tokens)  # fmt: skip
        return out

    def add_norm(
        self,
        residual: Tensor,
        h: Tensor,
        post_weight: Tensor,
        layer_scalar: Tensor | None,
        next_weight: Tensor | None,
        eps: float,
    ) -> Tensor | None:
        tokens, hidden = residual.shape
        out = None if next_weight is None else self._empty(tokens, hidden)
        if tokens:
            self._run(
                "add_norm",
                {
                    "hidden": hidden, "residual_dtype": self._residual, "has_scalar": layer_scalar is not None,
                    "has_next": next_weight is not None, "num_tokens": tokens,
                },
                residual_out=residual, out=out, residual=residual, h=h, post_weight=post_weight,
                layer_scalar=layer_scalar, next_weight=next_weight, eps=eps, num_tokens=tokens,
            )  # fmt: skip
        return out

    def linear(self, x: Tensor, weights: Linear) -> Tensor:
        if isinstance(weights, DenseLinear):
            return F.linear(x, weights.weight)
        tokens = x.shape[0]
        out = self._empty(tokens, weights.out_features)
        if tokens:
            self._run(
                "w4a16_gemm",
                {
                    "n": weights.out_features, "k": weights.in_features, "group_size": weights.group_size,
                    "num_tokens": tokens,
                },
                out=out, x=x.contiguous(), w_packed=weights.packed, scales=weights.scales, num_tokens=tokens,
            )  # fmt: skip
        return out

    def qkv_norm_rope(
        self,
        qkv: Tensor,
        num_q_heads: int,
        q_norm: Tensor,
        k_norm: Tensor | None,
        rope: Rope,
        positions: Tensor,
        cache: KVPages | None,
        slot_mapping: Tensor | None,
        eps: float,
    ) -> Tensor:
        tokens, width = qkv.shape
        dim = rope.head_dim
        q = self._empty(tokens, num_q_heads, dim)
        num_kv_heads = 0 if cache is None else cache.num_kv_heads
        if tokens:
            self._run(
                "qkv_norm_rope",
                {
                    "num_q_heads": num_q_heads, "num_kv_heads": num_kv_heads, "head_dim": dim,
                    "num_rotated_pairs": rope.num_rotated, "page_size": 64 if cache is None else cache.page_size,
                    "k_eq_v": cache is not None and width == (num_q_heads + num_kv_heads) * dim,
                    "q_only": cache is None, "num_tokens": tokens,
                },
                q=q, k_cache=None if cache is None else cache.k, v_cache=None if cache is None else cache.v, qkv=qkv,
                q_weight=q_norm, k_weight=k_norm, inv_freq=rope.inv_freq, positions=positions,
                slot_mapping=slot_mapping, eps=eps, num_tokens=tokens,
            )  # fmt: skip
        return q

    def attn_decode(
        self, q: Tensor, cache: KVPages, block_table: Tensor, kv_lens: Tensor, q_len: int, window: int
    ) -> Tensor:
        batch, max_pages = block_table.shape
        out = torch.empty_like(q)
        self._run(
            "attn_decode",
            self._heads(q, cache, window)
            | {"q_len": q_len, "batch": batch, "kv_len": self.max_kv_len or max_pages * cache.page_size},
            out=out, q=q, k_cache=cache.k, v_cache=cache.v, block_table=block_table, kv_lens=kv_lens, sm_scale=1.0,
            logit_cap=0.0, batch=batch, max_pages=max_pages,
        )  # fmt: skip
        return out

    def attn_prefill(
        self,
        q: Tensor,
        cache: KVPages,
        block_table: Tensor,
        kv_lens: Tensor,
        cu_seqlens_q: Tensor,
        max_seqlen_q: int,
        window: int,
    ) -> Tensor:
        batch, max_pages = block_table.shape
        out = torch.empty_like(q)
        self._run(
            "attn_prefill",
            self._heads(q, cache, window)
            | {"causal": True, "batch": batch, "num_tokens": q.shape[0], "kv_len": max_pages * cache.page_size},
            out=out, q=q, k=cache.k, v=cache.v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=None, kv_lens=kv_lens,
            block_table=block_table, sm_scale=1.0, logit_cap=0.0, batch=batch, max_pages=max_pages,
            max_seqlen_q=max_seqlen_q,
        )  # fmt: skip
        return out

    def _heads(self, q: Tensor, cache: KVPages, window: int) -> dict[str, Any]:
        return {
            "head_dim": cache.head_dim, "num_q_heads": q.shape[1], "num_kv_heads": cache.num_kv_heads,
            "page_size": cache.page_size, "window": window, "logit_cap": False,
        }  # fmt: skip

    def gelu_gate(self, gate_up: Tensor) -> Tensor:
        tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = self._empty(tokens, width)
        if tokens:
            self._run("gelu_gate", {"width": width, "packed": True, "num_tokens": tokens}, out=out, gate=gate_up,
                      up=None, num_tokens=tokens, up_stride=0)  # fmt: skip
        return out

    def logits(self, h: Tensor, head: Linear, logit_cap: float) -> Tensor:
        return self._argmax(self.linear(h, head), logit_cap, write=True)[1]

    def greedy(self, h: Tensor, head: Linear, logit_cap: float) -> Tensor:
        return self._argmax(self.linear(h, head), logit_cap, write=False)[0]

    def _argmax(self, logits: Tensor, logit_cap: float, *, write: bool) -> tuple[Tensor, Tensor]:
        tokens, vocab = logits.shape
        ids = self._empty(tokens, dtype=torch.int64)
        capped = self._empty(tokens, vocab, dtype=torch.float32) if write else ids
        if tokens:
            self._run(
                "softcap_argmax",
                {
                    "vocab_size": vocab, "logits_dtype": self._dtype, "has_cap": logit_cap > 0, "round_steps": False,
                    "write_capped": write, "num_tokens": tokens,
                },
                ids=ids, capped=capped if write else None, logits=logits, cap=logit_cap, num_tokens=tokens,
            )  # fmt: skip
        return ids, capped

    def moe_route(self, logits: Tensor, per_expert_scale: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        tokens, num_experts = logits.shape
        ids = self._empty(tokens, top_k, dtype=torch.int32)
        weights = self._empty(tokens, top_k, dtype=torch.float32)
        if tokens:
            self._run(
                "moe_route",
                {"num_experts": num_experts, "top_k": top_k, "logits_dtype": self._dtype, "num_tokens": tokens},
                topk_ids=ids, topk_weights=weights, logits=logits, per_expert_scale=per_expert_scale,
                num_tokens=tokens,
            )  # fmt: skip
        return ids, weights
