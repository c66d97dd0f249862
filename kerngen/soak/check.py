"""Asks again, one by one, and compares token by token; what tells most first."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from kerngen.errors import KerngenError
from kerngen.runtime.drafting import Drafter
from kerngen.runtime.engine import CacheShape
from kerngen.soak.drive import Answer, Phase, Say, Settings, engine_for
from kerngen.soak.faults import parts_at
from kerngen.soak.models import Opened


@dataclass(frozen=True, slots=True)
class Difference:
    """index: of the first token that is another: `together` in the batch, `alone` without; -1 where one has ended."""

    number: int
    num_prompt_tokens: int
    num_tokens: int
    num_preemptions: int
    index: int
    together: int
    alone: int


@dataclass(slots=True)
class Check:
    """How answers of a phase compare with those that their requests get alone.

    unchecked: for want of time. sampled: as the first three, of requests that were sampled, which are asked last.
    distinct: different tokens in an answer, on average; where that is near 1 equal answers say little.
    """

    phase: str
    equal: int = 0
    different: list[Difference] = field(default_factory=list)
    unchecked: int = 0
    preempted_equal: int = 0
    sampled_equal: int = 0
    sampled_different: list[Difference] = field(default_factory=list)
    sampled_unchecked: int = 0
    distinct: float = 0.0
    errors: list[str] = field(default_factory=list)
    stopped: bool = False


PREFILLED = 256  # tokens of a prompt that take as long as one of an answer, about


def in_order(answers: list[Answer]) -> list[Answer]:
    """Those that have tokens: greedy before sampled ones, then preempted ones first. Of such alike the longest get half
    of the time, and the shortest the other half: when it is up, long contexts were compared, and many answers.
    """
    order: list[Answer] = []
    for is_greedy in (True, False):
        for preempted in (True, False):
            alike = [a for a in answers if a.tokens and (a.is_greedy, a.num_preemptions > 0) == (is_greedy, preempted)]
            order += _from_both_ends(alike)
    return order


def _from_both_ends(answers: list[Answer]) -> Iterator[Answer]:
    left = deque(sorted(answers, key=lambda a: (_work(a), a.number)))
    longest = shortest = 0.0  # work of those that came from either end
    while left:
        if longest <= shortest:
            longest += _work(answer := left.pop())
        else:
            shortest += _work(answer := left.popleft())
        yield answer


def _work(answer: Answer) -> float:
    return len(answer.tokens) + answer.num_prompt_tokens / PREFILLED


def check_phase(
    phase: Phase, settings: Settings, opened: Opened, drafter: Drafter | None, seconds: float, say: Say
) -> Check:
    """Compare as many of the phase's answers as `seconds` allow. An answer that was cut short is a beginning."""
    check = Check(phase.name)
    answers = in_order(phase.answers)
    check.unchecked = sum(a.is_greedy for a in answers)
    check.sampled_unchecked = len(answers) - check.unchecked
    if not answers:
        return check
    check.distinct = sum(len(set(a.tokens)) for a in answers) / len(answers)
    try:
        _compare(check, answers, settings, opened, drafter, seconds, say)
    except KeyboardInterrupt:
        check.stopped = True
    except (KerngenError, RuntimeError) as e:
        check.errors.append(f"{type(e).__name__}: {e}")
    return check


def _compare(
    check: Check, answers: list[Answer], settings: Settings, opened: Opened, drafter: Drafter | None, seconds: float,
    say: Say,
) -> None:  # fmt: skip
    model = opened.model
    shape = CacheShape(model.config, model.ops.dtype, settings.page_size, chunk=settings.prefill_chunk)
    engine = engine_for(settings, opened, drafter, shape.pages(1, settings.max_len), alone=True)
    requests = settings.requests(model.config.vocab_size)
    began = time.monotonic()
    for i, answer in enumerate(answers):
        if (elapsed := time.monotonic() - began) >= seconds:
            return
        say(elapsed, f"{check.phase}: {i} of {len(answers)} asked alone, {len(check.different)} differ")
        request = requests.ask(answer.number).request
        if answer.stop_reason == "cancelled":
            request = replace(request, max_new_tokens=len(answer.tokens))
        (alone,) = engine.generate_many([request])
        found = _difference(answer, alone.tokens)
        if answer.is_greedy:
            check.unchecked -= 1
            check.equal += found is None
            check.preempted_equal += found is None and answer.num_preemptions > 0
            check.different += [found] if found is not None else []
        else:
            check.sampled_unchecked -= 1
            check.sampled_equal += found is None
            check.sampled_different += [found] if found is not None else []


def _difference(answer: Answer, alone: list[int]) -> Difference | None:
    tokens = answer.tokens.tolist()
    if (index := parts_at(tokens, alone)) is None:
        return None
    a, b = ((*said, -1)[index] for said in (tokens, alone))
    return Difference(answer.number, answer.num_prompt_tokens, len(tokens), answer.num_preemptions, index, a, b)
