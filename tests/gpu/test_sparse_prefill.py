"""Block-sparse prefill on a GPU: an engine whose prompts choose the keys that they read, eagerly and in graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kerngen.runtime.engine import Engine, Request
from kerngen.runtime.session import load

MODEL = Path(__file__).parents[2] / "examples" / "tiny" / "gemma-4-tiny"
FULL = 5  # its layer of full attention


def _engine(alpha: float | None, **options: Any) -> Engine:
    session = load(MODEL, draft=False, sparse_prefill=alpha, backend=options.pop("backend", "cuda"),
                   device=options.pop("device", None))  # fmt: skip
    return Engine(session.model, max_len=2048, **options)


def _prompt(n: int, seed: int = 0) -> list[int]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(10, 900, (n,), generator=draw).tolist()


def _tokens(engine: Engine, ids: list[int]) -> list[int]:
    return engine.generate(ids, max_new_tokens=12).tokens


@pytest.mark.parametrize("chunk", [2048, 256])
def test_a_tiny_alpha_gives_what_all_keys_give_and_density_falls(chunk: int) -> None:
    ids = _prompt(1700)
    dense = _tokens(_engine(None, prefill_chunk=chunk), ids)
    shares = []
    for alpha in (1e-30, 0.9, 0.99):
        engine = _engine(alpha, prefill_chunk=chunk)
        found = _tokens(engine, ids)
        if alpha == 1e-30:  # in 16 bits a later token may differ by a rounding
            assert found[:4] == dense[:4]
        shares.append(engine.load.density[FULL])
    assert shares[0] == 1.0
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] < 0.95


def test_it_reads_about_what_the_oracle_reads() -> None:
    ids = _prompt(1700)
    here, oracle = _engine(0.95), _engine(0.95, backend="torch", device="cpu")
    for engine in (here, oracle):
        engine.generate(ids, max_new_tokens=1)
    assert abs(here.load.density[FULL] - oracle.load.density[FULL]) < 0.05


def test_short_prefills_in_graphs_choose_too() -> None:
    """Chunks of a prompt beside a sequence that decodes, as a server has them: padded, and in mixed batches."""
    eager = _engine(0.9, prefill_chunk=256, max_batch=2)
    graphs = _engine(0.9, prefill_chunk=256, max_batch=2)
    graphs.make_ready()
    requests = [Request(_prompt(1500, seed), 40) for seed in (1, 2)]
    found = [[made.tokens[0] for made in engine.generate_many(requests)] for engine in (eager, graphs)]
    assert found[0] == found[1]
    assert graphs.load.density[FULL] < 1
