"""Eight ranks over gloo make the tokens of one: models with the heads, and the cuts, of the released ones."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny_gemma
from checkpoints import edit_config, quantize
from divided_sessions import opens
from test_tensor_parallel import CROWDED, engine_of, requests

from kerngen.runtime.config import read_model_config
from kerngen.runtime.engine.ranks import Ranks
from kerngen.runtime.world import World

SIZE = 8
# Real numbers of heads and real head sizes; the rest is small but for the widths of the 26B, whose 66 and 22 groups of
# 32 eight ranks share unevenly.
WIDTHS = {"hidden_size": 128, "intermediate_size": 512, "vocab_size": 104, "head_dim": 256, "global_head_dim": 512}
MODELS: dict[str, dict[str, Any]] = {
    "31b": {"num_attention_heads": 32, "num_key_value_heads": 16, "num_global_key_value_heads": 4},
    "12b": {"num_attention_heads": 16, "num_key_value_heads": 8, "num_global_key_value_heads": 1},
    "26b-a4b": {
        "num_attention_heads": 16, "num_key_value_heads": 8, "num_global_key_value_heads": 2,
        "enable_moe_block": True, "num_experts": 16, "top_k_experts": 8,
        "intermediate_size": 2112, "moe_intermediate_size": 704,
    },
}  # fmt: skip


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A W4A16 target and its drafter."""
    root, sizes = tmp_path_factory.mktemp(request.param), MODELS[request.param]
    global_heads = {"num_global_key_value_heads": sizes["num_global_key_value_heads"]}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**WIDTHS, **sizes}.items():
            patch.setitem(tiny_gemma.BASE, name, value)
        patch.setitem(tiny_gemma.VARIANTS, "k_eq_v", tiny_gemma.VARIANTS["k_eq_v"] | global_heads)
        tiny_gemma.make_target(root / "target", "k_eq_v")
        for name in ("enable_moe_block", "intermediate_size"):
            patch.delitem(tiny_gemma.BASE, name, raising=False)
        tiny_gemma.make_assistant(root / "drafter", "k_eq_v")
    edit_config(root / "target", lambda c: c.update(global_heads))
    edit_config(root / "drafter", lambda c: c["text_config"].update(global_heads))
    quantize(root / "target", 32)
    return root / "target", root / "drafter"


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    group = Ranks(SIZE, "cpu")
    yield group
    group.close()


def test_they_make_one_ranks_tokens(ranks: Ranks, pair: tuple[Path, Path]) -> None:
    """On the torch backend, and as the kernels' references compute it; with drafts, and preempted."""
    alone = engine_of(opens(pair[0], None, "torch", None, None, None), max_batch=1, prefix_caching=False)
    expected = [alone.generate_many([request])[0].tokens for request in requests()]
    for backend, options in (("torch", CROWDED), ("kernels", {"page_size": 16})):
        session = ranks.load(partial(opens, *pair, backend))
        engine = engine_of(session, num_draft_tokens=2, **options)
        assert [g.tokens for g in engine.generate_many(requests())] == expected, backend


def test_the_mixture_is_cut_unevenly_in_whole_groups(pair: tuple[Path, Path]) -> None:
    whole = read_model_config(pair[0])
    if not whole.num_experts:
        pytest.skip("dense")
    parts = [whole.divided(World(rank, SIZE)) for rank in range(SIZE)]
    assert [part.moe_intermediate_size // 32 for part in parts] == [3] * 6 + [2] * 2
    assert sorted({part.layers[0].intermediate_size // 32 for part in parts}) == [8, 9]
    assert [part.layers[1].num_kv_heads for part in parts] == [1] * SIZE, "of two, each on four ranks"
