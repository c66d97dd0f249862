"""The torch backend's short way for a single query against what attention means."""

from __future__ import annotations

import pytest
import torch

from kerngen.runtime.ops.eager import _attend
from kerngen.templates.common.attention.attention_torch import attend, first_key, gather_pages
from kerngen.templates.values import KVView, Mask


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [0, 1, 8, 64])
@pytest.mark.parametrize("kv_len", [0, 1, 2, 16, 17, 150])
def test_a_single_query_has_the_same_sums(kv_len: int, window: int, dtype: torch.dtype) -> None:
    """To the bit: a token of a prompt and one of a step must not differ by the way taken."""
    torch.manual_seed(kv_len)
    pools = KVView(*(torch.randn(16, 2, 16, 32).to(dtype) for _ in range(2)))
    pools.k_cache[0], pools.v_cache[0] = torch.nan, torch.nan  # what nobody sees, where no window ends before it
    table = torch.cat((1 + torch.randperm(15), torch.zeros(4))).int()
    q = torch.randn(1, 6, 32).to(dtype)
    first = min(first_key(kv_len, 1, window), kv_len)
    k, v = (gather_pages(pool, table, first, kv_len) for pool in (pools.k_cache, pools.v_cache))
    got = _attend(q, pools, table, kv_len, Mask(window=window))
    assert torch.equal(got, attend(q, k, v, kv_len, window=window).to(dtype))
