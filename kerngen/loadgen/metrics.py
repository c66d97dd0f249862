"""What a server says of itself at /metrics, under vLLM's names."""

from __future__ import annotations

import re
from collections.abc import Mapping

from kerngen.loadgen.http import Server

_LINE = re.compile(r"^vllm:(\w+)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


async def read_metrics(server: Server) -> dict[str, float]:
    """Its figures by name, sums over their labels; {} where it has none. Raises ServerGone."""
    status, said = await server.ask("GET", "/metrics")
    found: dict[str, float] = {}
    if status == 200:
        for name, value in _LINE.findall(said.decode("utf-8", "replace")):
            found[name] = found.get(name, 0.0) + float(value)
    return found


def drafting(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float] | None:
    """Of what was drafted between two readings: the share that was accepted, and tokens a step of a sequence that
    drafted. None where nothing was.
    """
    drafts, drafted, accepted = (
        after.get(name, 0.0) - before.get(name, 0.0)
        for name in ("spec_decode_num_drafts_total", "spec_decode_num_draft_tokens_total",
                     "spec_decode_num_accepted_tokens_total")
    )  # fmt: skip
    if not drafts or not drafted:
        return None
    return {"acceptance_rate": accepted / drafted, "acceptance_length": 1 + accepted / drafts}
