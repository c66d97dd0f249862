"""Lists of tiles on a GPU, from keys to attention: by the kernels one after the other what their references make."""

from __future__ import annotations

import math

import pytest
import torch

from kerngen import ops
from kerngen.templates.common.attention.attention_torch import attend
from kerngen.templates.common.attention.tile_lists import NOTHING
from kerngen.templates.common.attention.tile_lists_torch import of_lists


@pytest.mark.parametrize(("num_q", "num_kv"), [(16, 2), (32, 4), (16, 1)])
@pytest.mark.parametrize("start", [0, 3072])
def test_from_keys_to_attention(num_q: int, num_kv: int, start: int) -> None:
    n, dim, alpha = 4096, 512, 0.1
    draw = torch.Generator("cuda").manual_seed(num_q + start)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, device="cuda").to(torch.float16)

    # Keys come in runs that some queries look for: tiles weigh differently.
    topics = torch.randn(16, num_kv, dim, generator=draw, device="cuda")
    of = torch.randint(0, 16, (n // 64,), generator=draw, device="cuda").repeat_interleave(64)
    k = (topics[of] + 0.5 * normal(n, num_kv, dim)).to(torch.float16)
    wanted = topics[torch.randint(0, 16, (n,), generator=draw, device="cuda")].repeat_interleave(num_q // num_kv, 1)
    q, v = (0.05 * wanted + 0.01 * normal(n, num_q, dim)).to(torch.float16)[start:], normal(n, num_kv, dim)
    table = torch.randperm(n // 64, generator=draw, device="cuda").int()[None]
    caches = [torch.empty(n // 64, num_kv, 64, dim, dtype=torch.float16, device="cuda") for _ in range(2)]
    at = torch.arange(n, device="cuda")
    for cache, rows in zip(caches, (k, v), strict=True):
        cache[table[0, at // 64].long(), :, at % 64] = rows
    means = torch.full((n // 64, num_kv, 2, dim), torch.nan, dtype=torch.float16, device="cuda")
    ints = {
        name: torch.tensor(value, dtype=torch.int32, device="cuda")
        for name, value in {"starts": [0], "kv_lens": [n], "cu": [0, n - start], "dense": [n - 256]}.items()
    }
    ops.key_means(means, *caches, table, ints["kv_lens"], ints["starts"], n)
    told = means[table[0].long()].transpose(1, 2).flatten(0, 1)
    torch.testing.assert_close(told.float(), k.float().unflatten(0, (-1, 32)).mean(1), atol=2e-3, rtol=2e-3)
    scores = ops.tile_scores(q, means, table, ints["kv_lens"], ints["cu"], 64, n, 1.0)
    density = torch.zeros(2, dtype=torch.int64, device="cuda")
    rule = math.log2(alpha), 2, 4
    counts, lists = ops.tile_lists(
        scores, density, ints["dense"], num_kv, n - start, table, ints["kv_lens"], ints["cu"], *rule
    )
    assert 0 < density[0] < density[1]
    blocks = (n - start) // 128
    assert (scores[:blocks, :, 0] > NOTHING / 2).all()
    out = ops.attn_prefill(q, *caches, table, ints["kv_lens"], ints["cu"], n - start, max_kv_len=n, counts=counts,
                           lists=lists)  # fmt: skip
    kept = of_lists(counts, lists, lists.shape[2])
    assert kept[:blocks].diagonal(offset=start // 128, dim1=0, dim2=2).all()
    right = attend(q, k, v, n, kept=kept)
    torch.testing.assert_close(out.float(), right, atol=4e-3, rtol=4e-3)
