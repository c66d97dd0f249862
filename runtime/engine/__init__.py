"""The engine: continuous batching with chunked prefill, prefix caching and speculative decoding.

core.py ties it together. scheduler.py decides which requests run on which pages (pages.py), planning.py makes plans of
that, which are data (plan.py), and runner.py runs them, as CUDA graphs where that pays (graphs, prefill_graphs,
mixed_batches). logit_processors.py has the rows' logit processors, mask.py the masks of guided decoding,
draft_length.py who drafts and how many tokens, prefill_budget.py the token budget of chunked prefill, sizing.py the
number of pages, media_cache.py which embeddings of images and sounds are kept, request.py requests and results.
ranks.py and rank_worker.py are the processes of a divided model.
"""

from kerngen.runtime.engine.core import Engine, require_draft_tokens
from kerngen.runtime.engine.mask import TokenMask
from kerngen.runtime.engine.media_cache import MEDIA_CACHE_BYTES
from kerngen.runtime.engine.request import Event, Generation, Handle, Load, Request, Stats
from kerngen.runtime.engine.sizing import PREFILL_CHUNK, CacheShape
from kerngen.runtime.logprobs import TokenLogprobs

__all__ = [
    "MEDIA_CACHE_BYTES",
    "PREFILL_CHUNK",
    "CacheShape",
    "Engine",
    "Event",
    "Generation",
    "Handle",
    "Load",
    "Request",
    "Stats",
    "TokenLogprobs",
    "TokenMask",
    "require_draft_tokens",
]
