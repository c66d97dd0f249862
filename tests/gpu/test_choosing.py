"""What requests ask of their tokens, in captured steps on a GPU: each has beside others what it has alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kerngen.runtime.backend import open_backend
from kerngen.runtime.engine import Engine, Request
from kerngen.runtime.engine.plan import SamplingMode
from kerngen.runtime.sampling import Sampling
from kerngen.runtime.session import Session, open_checkpoint

TINY = Path(__file__).parents[2] / "examples" / "tiny"
COUNT = 40


class Turns:
    """A mask: even tokens and odd ones by turns."""

    def __init__(self) -> None:
        self.told: list[int] = []

    def accept(self, token: int) -> None:
        assert token % 2 == len(self.told) % 2
        self.told.append(token)

    def fill(self, bits: NDArray[np.int32]) -> bool:
        bits.fill(-0x55555556 if len(self.told) % 2 else 0x55555555)
        return True


@pytest.fixture(scope="module")
def session() -> Session:
    ops = open_backend("cuda", device="cuda", dtype=None)
    return open_checkpoint(TINY / "gemma-4-tiny-w4a16", ops, drafts=[TINY / "gemma-4-tiny-assistant"])


def requests_of(session: Session) -> list[Request]:
    """Of all kinds, plain ones between them."""
    text = session.encode((TINY / "prompt.txt").read_text())
    asked = [
        Request(text, COUNT),
        Request(text, COUNT, Sampling(repetition_penalty=1.3), logprobs=0),
        Request(text, COUNT, Sampling(frequency_penalty=0.8, presence_penalty=1.5), logprobs=20),
        Request(text, COUNT, Sampling(0.9, 40, 0.95, seed=1, min_p=0.05)),
        Request(text, COUNT, Sampling(1.2, seed=2, frequency_penalty=-0.5, repetition_penalty=1.1), logprobs=3),
        Request(text, COUNT, Sampling(logit_bias=((7, 3.0), (11, -100.0))), suppressed_ids=(12,)),
        Request(text, COUNT, Sampling(min_tokens=COUNT // 2), session.stop_ids),
        Request(text, COUNT, mask=Turns(), logprobs=2),
        Request(text, COUNT, Sampling(1.0, 50, seed=3, presence_penalty=1.0), mask=Turns()),
        Request(text, COUNT, logprobs=1),
    ]
    return [replace(r, prompt=r.prompt[i:]) for i, r in enumerate(asked)]


def fresh(request: Request) -> Request:
    return request if request.mask is None else replace(request, mask=Turns())


@pytest.mark.parametrize("drafts", [0, 3])
def test_each_has_beside_others_what_it_has_alone(session: Session, drafts: int) -> None:
    requests = requests_of(session)
    longest = max(len(r.prompt) for r in requests) + COUNT
    engine = Engine(session.model, session.drafter, max_len=longest, max_batch=6, num_draft_tokens=drafts,
                    reproducible=True)  # fmt: skip
    alone = [engine.generate_many([fresh(r)])[0] for r in requests]
    assert {mode for _, _, mode, _ in engine.runner._steps} >= {SamplingMode()}
    together = engine.generate_many([fresh(r) for r in requests])
    for request, one, other in zip(requests, alone, together, strict=True):
        assert other.tokens == one.tokens
        assert other.logprobs == one.logprobs
        assert len(one.logprobs) == (0 if request.logprobs is None else len(one.tokens))
        assert all(p.token == t for p, t in zip(one.logprobs, one.tokens, strict=False))
    assert alone[9].logprobs[0].top[0] == (alone[9].tokens[0], alone[9].logprobs[0].logprob)
    assert not {11, 12} & set(alone[5].tokens)
    assert len(alone[6].tokens) > COUNT // 2
    assert [t % 2 for t in alone[7].tokens] == [i % 2 for i in range(len(alone[7].tokens))]


def test_a_plain_request_leaves_what_it_left_before(session: Session) -> None:
    """The same graphs whether or not others asked for more in between."""
    text = session.encode((TINY / "prompt.txt").read_text())
    plain = Request(text, COUNT)
    engine = Engine(session.model, session.drafter, max_len=len(text) + COUNT, num_draft_tokens=3)
    tokens = engine.generate_many([plain])[0].tokens
    graphs = set(engine.runner._steps)
    engine.generate_many([replace(plain, sampling=Sampling(presence_penalty=2.0, min_tokens=9))])
    assert {mode for _, _, mode, _ in set(engine.runner._steps) - graphs} <= {
        SamplingMode(penalized=True, held=True), SamplingMode(penalized=True)
    }  # fmt: skip
    known = set(engine.runner._steps)
    assert engine.generate_many([plain])[0].tokens == tokens
    assert set(engine.runner._steps) == known
