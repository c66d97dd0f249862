"""Generates for many requests at once: they join and leave at any step,
and drafts only decide how many tokens come of one.

core.py puts it together: scheduler.py says who runs on which pages (pages.py), planning.py makes plans of that, which
are data (plan.py); runner.py runs them, as CUDA graphs where that pays (graphs, prefill_graphs, mixed_batches).
logit_processors.py holds what rows want changed in their logits, mask.py lets a guide say which tokens may come,
draft_length.py says how many tokens to draft, prefill_budget.py how many to prefill beside those who decode, sizing.py
how many pages there are, request.py what is asked and what came out.
"""

from kerngen.runtime.engine.core import Engine, require_draft_tokens
from kerngen.runtime.engine.mask import TokenMask
from kerngen.runtime.engine.request import Event, Generation, Handle, Load, Request, Stats
from kerngen.runtime.engine.sizing import PREFILL_CHUNK, CacheShape
from kerngen.runtime.logprobs import TokenLogprobs

__all__ = [
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
