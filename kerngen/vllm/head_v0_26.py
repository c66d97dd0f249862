"""vLLM 0.26's MTP drafter of Gemma-4, which gives a draft's token by greedy_head or centroid_head, without logits.

What a draft is, is the same as without: the greatest logit's token. Parameters and how a checkpoint is loaded are
vLLM's. Source of the contract: vLLM 0.26, vllm/model_executor/models/gemma4_mtp.py and, for the choice among ranks,
vllm/model_executor/layers/logits_processor.py.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed import tensor_model_parallel_all_gather
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.model_executor.models import gemma4_mtp

import kerngen.ops  # noqa: F401 - torch.ops.kerngen
from kerngen.errors import DeviceError, ProblemError, UnknownName
from kerngen.templates import find_kernel
from kerngen.templates.centroid_head import spec as centroids
from kerngen.templates.common.rows.torch_rows import DTYPE_NAME
from kerngen.templates.common.screen.screen import head_screen
from kerngen.templates.greedy_head import spec as heads
from kerngen.vllm.ahead import AHEAD
from kerngen.vllm.linear import target

log = logging.getLogger("vllm.kerngen")
GRAPHED = 64  # drafts at once, up to which vLLM captures the head with centroids, whatever --max-num-seqs is


@dataclass(frozen=True, slots=True)
class Rows:
    """A head's problem for 1 to `most` drafts at once."""

    kernel: str
    problem: Any
    most: int

    def problems(self) -> Iterator[tuple[str, Any]]:
        """Each of them: (kernel, problem)."""
        return ((self.kernel, replace(self.problem, num_tokens=n)) for n in range(1, self.most + 1))


class Gemma4MTP(gemma4_mtp.Gemma4MTP):
    """vLLM's, whose `get_top_tokens` is of any head, and by kerngen's kernels where they serve it."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        _serve(self, vllm_config)

    def get_top_tokens(self, hidden_states: Tensor) -> Tensor:
        """The drafts [T] int64 of hidden_states [T, hidden]: of each the token with the greatest logit."""
        method, has_centroids = self.lm_head.quant_method, self.masked_embedding is not None
        if has_centroids and not self._suppress_token_ids:  # vLLM's looks at no others there
            tokens: Tensor = super().get_top_tokens(hidden_states)
        elif not has_centroids and isinstance(method, Screened) and len(hidden_states) <= method.max_tokens:
            tokens = method.best(self.lm_head, hidden_states)
        else:
            tokens = self.compute_logits(hidden_states).argmax(dim=-1)
        return tokens


class MaskedEmbedder(gemma4_mtp.Gemma4MTPMaskedEmbedder):
    """vLLM's head with centroids, whose tokens are by centroid_head."""

    def get_top_tokens(self, hidden_states: Tensor, lm_head_weight: Tensor) -> Tensor:
        """[T] int64 of hidden_states [T, hidden]; lm_head_weight [vocab, hidden], of all ranks."""
        clusters = self.token_ordering.view(self.num_centroids, self.vocab_size_per_centroid)
        tokens: Tensor = torch.ops.kerngen.centroid_greedy(
            hidden_states.contiguous(),
            self.centroids.weight,
            self.centroid_intermediate_top_k,
            clusters,
            lm_head_weight,
        )
        return tokens


class Screened(UnquantizedEmbeddingMethod):
    """vLLM's method of a head whose weights are as they were trained, with the weights once more in four bits.

    greedy_head reads those, and of the weights the few rows that may be the greatest. problem: of the rank's rows.
    max_tokens: rows at once that it serves. excluded: tokens that are never drafted.
    """

    def __init__(self, problem: heads.Problem, max_tokens: int, excluded: list[int]) -> None:
        super().__init__()
        self.max_tokens = max_tokens
        self._problem, self._excluded = problem, excluded
        AHEAD.ask_all(Rows("greedy_head", problem, max_tokens))

    def process_weights_after_loading(self, layer: ParallelLMHead) -> None:
        """Make the codes and bounds, in the same memory if weights are loaded again: CUDA graphs may hold it. Have all
        kernels loaded, as `KerngenLinearKernel.process_weights_after_loading`. Raises TuningMiss as `load_ahead`.
        """
        super().process_weights_after_loading(layer)
        rows, span = layer.weight.data[: self._problem.vocab_size], layer.shard_indices
        first, behind = span.org_vocab_start_index, span.org_vocab_end_index
        excluded = [token - first for token in self._excluded if first <= token < behind]
        made = head_screen(
            rows, excluded, self._problem.bits, likely=True
        )  # a draft is verified: likely bounds will do
        for name, tensor in zip(("kerngen_codes", "kerngen_bounds"), made, strict=True):
            if (before := getattr(layer, name, None)) is None:
                layer.register_buffer(name, tensor, persistent=False)
            else:
                before.copy_(tensor)
        _load_ahead(layer.weight.device)

    def best(self, head: ParallelLMHead, x: Tensor) -> Tensor:
        """[T] int64 of x [T, hidden], T <= max_tokens: the lowest token on a tie.

        Ranks exchange their tokens and logits, and choose as vLLM's LogitsProcessor does.
        """
        rows = head.weight[: self._problem.vocab_size]
        tokens: Tensor = torch.ops.kerngen.greedy_head(x, rows, head.kerngen_codes, head.kerngen_bounds)
        if head.tp_size == 1:
            return tokens
        logits = (x.float() * rows[tokens].float()).sum(-1).to(x.dtype)
        of_whole = tokens + head.shard_indices.org_vocab_start_index
        pairs = torch.stack((logits.float(), of_whole.float()), dim=-1)  # fp32 holds any token of a vocabulary
        every = tensor_model_parallel_all_gather(pairs, dim=-1).view(len(x), head.tp_size, 2)
        chosen = every[:, :, 0].argmax(dim=-1, keepdim=True)
        return every[:, :, 1].gather(-1, chosen).squeeze(-1).to(torch.int64)


class Beside(UnquantizedEmbeddingMethod):
    """vLLM's method of a head whose rows centroid_head gathers. Kernels are loaded with it: vLLM processes no weights
    of the centroids.
    """

    def process_weights_after_loading(self, layer: ParallelLMHead) -> None:
        """As vLLM's, and have all kernels loaded. Raises TuningMiss as `load_ahead`."""
        super().process_weights_after_loading(layer)
        _load_ahead(layer.weight.device)


def _load_ahead(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # kernels may read weights before the one that wrote them has ended
        AHEAD.load(device)


def _serve(model: Gemma4MTP, config: VllmConfig) -> None:
    """Have kerngen's kernels give the drafts if they can, and say which, or why not."""
    dtype = DTYPE_NAME.get(model.lm_head.weight.dtype, str(model.lm_head.weight.dtype))
    try:
        why = _why_not(model)
        if why is None and model.masked_embedding is None:
            why = _serve_dense(model, dtype)
        elif why is None:
            why = _serve_centroids(model, dtype, config.scheduler_config.max_num_seqs)
    except (DeviceError, ProblemError, UnknownName) as e:
        why = e.message
    if why is not None:
        log.info("kerngen: the drafter's head stays vLLM's: %s", why)


def _why_not(model: Gemma4MTP) -> str | None:
    """The same on all ranks: they take part in each other's choice."""
    head, dtype = model.lm_head, model.logits_processor.head_dtype
    if type(head.quant_method) is not UnquantizedEmbeddingMethod:
        return f"its weights are of {type(head.quant_method).__name__}, not as they were trained"
    if dtype not in (None, head.weight.dtype):
        return f"its logits are asked for in {dtype}"
    if head.tp_size > 1 and head.org_vocab_size != head.tp_size * head.num_embeddings_per_partition:
        return f"its {head.org_vocab_size} tokens are not as many for each of {head.tp_size} ranks"
    return None


def _serve_dense(model: Gemma4MTP, dtype: str) -> str | None:
    head = model.lm_head
    hidden, rows = head.embedding_dim, head.shard_indices.num_org_elements
    problem = heads.Problem(rows, hidden, dtype, bits=heads.bits_for(hidden, likely=True))
    if why := find_kernel("greedy_head").why_unsupported(problem, target()):
        return why
    most = heads.most_tokens(target())
    head.quant_method = Screened(problem, most, list(model._suppress_token_ids or ()))
    log.info("kerngen: up to %d drafts at once by greedy_head, from %d tokens of %d", most, rows, head.org_vocab_size)
    return None


def _serve_centroids(model: Gemma4MTP, dtype: str, max_num_seqs: int) -> str | None:
    embedder = model.masked_embedding
    if model._suppress_token_ids:
        return "it has centroids, and some tokens are never drafted"
    problem = centroids.Problem(embedder.num_centroids, embedder.vocab_size_per_centroid,
                                embedder.centroid_intermediate_top_k, embedder.hidden_size, dtype)  # fmt: skip
    if problem.num_centroids * problem.cluster_size != embedder.vocab_size:
        return f"{problem.num_centroids} centroids do not divide its {embedder.vocab_size} tokens"
    if why := find_kernel("centroid_head").why_unsupported(problem, target()):
        return why
    embedder.__class__ = MaskedEmbedder
    model.lm_head.quant_method = Beside()
    AHEAD.ask_all(Rows("centroid_head", problem, max(GRAPHED, max_num_seqs)))
    log.info("kerngen: drafts by centroid_head, from %d of %d tokens", problem.num_selected, embedder.vocab_size)
    return None
