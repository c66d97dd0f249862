"""Runs plans that another process wrote down, one a line, on a runner of its own, and prints what each made.

python tests/host/plan_replay.py < plans.jsonl
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from kerngen.runtime.engine import Engine
from kerngen.runtime.engine.plan import StepPlan
from kerngen.runtime.engine.runner import StepOutput
from kerngen.runtime.session import load

TINY = Path(__file__).parents[2] / "examples" / "tiny"


def engine(**options: Any) -> Engine:
    """An engine of the tiny model and its drafter, with few pages, on one core: what it computes is the same anywhere
    on this machine.
    """
    torch.set_num_threads(1)
    session = load(TINY / "gemma-4-tiny", draft=TINY / "gemma-4-tiny-assistant", backend="torch", device="cpu")
    options = {"max_len": 120, "max_batch": 6, "page_size": 8, "prefill_chunk": 40,
               "num_pages": {"full": 26, "sliding": 40}} | options  # fmt: skip
    return Engine(session.model, session.drafter, **options)


def said(output: StepOutput) -> list[Any]:
    """What a plan made, as JSON has it."""
    waits = [None if wait is None else wait.result().tokens for wait in (output.decoded, output.first)]
    return [*waits, [words.tolist() for words in output.prompt_logprobs]]


@torch.inference_mode()
def main() -> None:
    runner = engine().runner
    for line in sys.stdin:
        print(json.dumps(said(runner.run(StepPlan.from_json(line, runner.limits)))))


if __name__ == "__main__":
    main()
