"""Figures of a run, as vLLM's `bench serve` defines them (vLLM 0.24, `vllm/benchmarks/serve.py`).

TTFT is from sending a request to its first chunk, ITL between chunks that follow each other, TPOT the time behind the
first token over the tokens that came in it, E2EL to the last chunk. Requests and tokens a second are over the time
from the first request to the end of the last one. Only requests that were answered to the end count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
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


_COLUMNS = ("ttft_ms", "itl_ms", "tpot_ms", "e2el_ms")


def table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Runs beside each other, for people."""
    heads = [f"{name[:-3].upper()} p50/p90/p99 ms" for name in _COLUMNS]
    yield (f"{'rate':>7} {'at once':>7} {'done':>5} {'failed':>6} {'req/s':>7} {'out tok/s':>9} {'tok/s':>8}  "
           + "  ".join(f"{h:>22}" for h in heads) + "  drafts")  # fmt: skip
    for r in rows:
        rate = "inf" if r["rate"] is None else f"{r['rate']:.3g}"
        spreads = (_cell(r[name]) for name in _COLUMNS)
        drafted = r["drafting"]
        drafts = "-"
        if drafted is not None:
            drafts = f"{drafted['acceptance_rate']:.0%}, {drafted['acceptance_length']:.2f} a step"
        head = f"{rate:>7} {r['concurrency'] or 'any':>7} {r['completed']:5} {r['failed']:6}"
        speeds = f"{r['requests_per_s']:7.2f} {r['answer_tokens_per_s']:9.1f} {r['tokens_per_s']:8.1f}"
        yield f"{head} {speeds}  " + "  ".join(f"{s:>22}" for s in spreads) + f"  {drafts}"
    for r in rows:
        rate = "inf" if r["rate"] is None else f"{r['rate']:.3g}"
        for error, count in r["errors"].items():
            yield f"at rate {rate}: {count} times {error}"


def _cell(spread: dict[str, float] | None) -> str:
    return "-" if spread is None else "/".join(f"{spread[f'p{p}']:.{_digits(spread['p99'])}f}" for p in PERCENTILES)


def _digits(ms: float) -> int:
    return 1 if ms < 1000 else 0
