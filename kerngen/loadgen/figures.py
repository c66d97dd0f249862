"""Figures of a run, as vLLM's `bench serve` defines them (vLLM 0.24, `vllm/benchmarks/serve.py`).

TTFT is from sending a request to its first chunk, ITL between chunks that follow each other, TPOT the time behind the
first token over the tokens that came in it, E2EL to the last chunk. Requests and tokens a second are over the time
from the first request to the end of the last one. Only requests that were answered to the end count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from kerngen.loadgen.asking import Outcome

PERCENTILES = (50, 90, 99)


def figures(outcomes: Sequence[Outcome], seconds: float) -> dict[str, Any]:
    """Of one run. Times in ms."""
    good = [o for o in outcomes if not o.error]
    prompts, answers = sum(o.num_prompt_tokens for o in good), sum(o.num_tokens for o in good)
    between = [gap for o in good for gap in o.between_s]
    found: dict[str, Any] = {
        "completed": len(good),
        "failed": len(outcomes) - len(good),
        "errors": dict(Counter(o.error for o in outcomes if o.error).most_common()),
        "seconds": seconds,
        "prompt_tokens": prompts,
        "answer_tokens": answers,
        "requests_per_s": len(good) / seconds,
        "answer_tokens_per_s": answers / seconds,
        "tokens_per_s": (prompts + answers) / seconds,
        "ttft_ms": _spread([o.first_s for o in good]),
        "itl_ms": _spread(between),
        "tpot_ms": _spread([o.per_token_s for o in good if o.num_tokens > 1]),
        "e2el_ms": _spread([o.whole_s for o in good]),
    }
    return found


def _spread(seconds: Sequence[float]) -> dict[str, float] | None:
    """None where there is nothing."""
    if not seconds:
        return None
    ms = 1e3 * np.array(seconds)
    return {"mean": float(ms.mean())} | {f"p{p}": float(np.percentile(ms, p)) for p in PERCENTILES} | {
        "max": float(ms.max())
    }  # fmt: skip
