"""Arguments that are tensor maps: what a bulk copy would bring by them, and that the launcher makes each once."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kerngen.errors import LaunchError
from kerngen.runtime import launcher, tensor_maps
from kerngen.templates import find_kernel
from kerngen.templates.kernel import Arg, TensorMap

PREFILL, GEMM = find_kernel("attn_prefill"), find_kernel("w4a16_gemm")


def box_of(tensor: Tensor, seen: TensorMap, at: tuple[int, ...]) -> Tensor:
    """What a copy from element `at` of each axis brings, [.., box's axes outermost first]: the driver's rules."""
    assert len(seen.dims) == len(seen.box) == len(seen.strides) + 1 <= 5
    assert all(s % 16 == 0 for s in seen.strides), "strides of 16 bytes"
    assert all(1 <= b <= 256 for b in seen.box)
    if seen.swizzled:
        assert seen.box[0] * tensor.element_size() == 128, "a row of the swizzle"
    flat, steps = tensor.reshape(-1), (1, *(s // tensor.element_size() for s in seen.strides))
    brought = torch.zeros(seen.box[::-1], dtype=tensor.dtype)
    for inner in product(*map(range, seen.box)):
        where = [a + i for a, i in zip(at, inner, strict=True)]
        if all(0 <= w < d for w, d in zip(where, seen.dims, strict=True)):
            brought[inner[::-1]] = flat[sum(w * s for w, s in zip(where, steps, strict=True))]
    return brought


def test_what_streams_once_is_fetched_by_lines_and_what_is_read_again_by_two() -> None:
    decode = find_kernel("attn_decode")
    problem = decode.problem_type(head_dim=512, num_q_heads=32, num_kv_heads=4)
    config = decode.config_type(8, 16, 4, 4, 6, body="wgmma_ws")
    keys = decode.tensor_map(problem, config, "k_cache", (3, 4, 64, 512))
    again = PREFILL.problem_type(head_dim=128, num_q_heads=4, num_kv_heads=2, page_size=64)
    boxes = PREFILL.tensor_map(again, PREFILL.config_type(128, 64, body="wgmma_ws", use_tma=True), "k", (3, 2, 64, 128))
    assert keys is not None
    assert (keys.l2_bytes, boxes.l2_bytes) == (128, 256)


@pytest.mark.parametrize(
    ("page_size", "block_n", "rows"), [(16, 80, 16), (64, 32, 32), (8, 64, 8), (64, 64, 64), (64, 80, 16), (24, 64, 8)]
)
def test_keys_in_pages(page_size: int, block_n: int, rows: int) -> None:
    problem = PREFILL.problem_type(head_dim=128, num_q_heads=4, num_kv_heads=2, page_size=page_size)
    config = PREFILL.config_type(128, block_n, body="wgmma_ws", use_tma=True)
    cache = torch.arange(3 * 2 * page_size * 128, dtype=torch.int16).view(3, 2, page_size, 128)
    seen = PREFILL.tensor_map(problem, config, "k", tuple(cache.shape))
    assert seen is not None
    first = page_size - rows
    brought = box_of(cache, seen, (64, first, 1, 2))
    assert torch.equal(brought[0, 0], cache[2, 1, first:, 64:128])
    assert brought.shape == (1, 1, rows, 64)


@pytest.mark.parametrize(
    ("page_size", "cluster", "k_rows", "v_rows"), [(0, 1, 64, 16), (64, 2, 32, 16), (16, 4, 16, 16), (8, 2, 8, 8)]
)
def test_chunks_of_wide_heads(page_size: int, cluster: int, k_rows: int, v_rows: int) -> None:
    """Keys come in chunks of 64 rows, a part for each block of a cluster, and values in chunks of 16."""
    problem = PREFILL.problem_type(head_dim=512, num_q_heads=4, num_kv_heads=2, page_size=page_size)
    config = PREFILL.config_type(64, 64, warps_d=2, num_stages=9, body="wgmma_ws", use_tma=True, cluster=cluster)
    shape = (3, 2, page_size, 512) if page_size else (100, 2, 512)
    boxes = [seen.box for of in "kv" if (seen := PREFILL.tensor_map(problem, config, of, shape))]
    assert boxes == [(64, k_rows, 1, 1), (64, v_rows, 1, 1)]


def test_keys_that_lie_dense() -> None:
    problem = PREFILL.problem_type(head_dim=256, num_q_heads=6, num_kv_heads=3)
    config = PREFILL.config_type(128, 80, body="wgmma_ws", use_tma=True)
    keys = torch.arange(100 * 3 * 256).to(torch.int16).view(100, 3, 256)
    seen = PREFILL.tensor_map(problem, config, "v", tuple(keys.shape))
    assert seen is not None
    assert torch.equal(box_of(keys, seen, (192, 17, 2, 0))[0, 0], keys[17:97, 2, 192:])
    beyond = box_of(keys, seen, (0, 90, 0, 0))[0, 0]
    assert torch.equal(beyond[:10], keys[90:, 0, :64])
    assert not beyond[10:].any(), "what is not there is zeros"


@pytest.mark.parametrize(("page_size", "block_n"), [(12, 48), (4, 64), (20, 80)])
def test_pages_that_tiles_cannot_be_made_of_are_refused(page_size: int, block_n: int) -> None:
    from kerngen.arch import Target, find_device

    problem = PREFILL.problem_type(head_dim=128, page_size=page_size)
    config = PREFILL.config_type(128, block_n, body="wgmma_ws", use_tma=True)
    why = PREFILL.why_invalid(problem, config, Target.of(find_device("H200")))
    assert f"page_size={page_size}" in why
    assert PREFILL.tensor_map(problem, config, "k", (2, 16, page_size, 128)) is None


@pytest.mark.parametrize("block_m", [32, 80])
@pytest.mark.parametrize(("tokens", "block_k", "cluster"), [(1, 64, 1), (5, 64, 2), (300, 128, 2), (40, 192, 1)])
def test_tokens(tokens: int, block_k: int, cluster: int, block_m: int) -> None:
    problem = GEMM.problem_type(n=256, k=384, num_tokens=tokens)
    config = GEMM.config_type(block_m, 128, block_k, 16, body="wgmma_ws", cluster=cluster)
    x = torch.arange(tokens * 384).to(torch.int16).view(tokens, 384)
    seen = GEMM.tensor_map(problem, config, "x", tuple(x.shape))
    assert seen is not None
    brought = box_of(x, seen, (0, 0, 3, 0))[0]
    blocks, rows, _ = brought.shape
    assert blocks * rows * cluster == block_m * block_k // 64, "each block of a cluster brings its part of a stage"
    for i, block in enumerate(brought):
        assert torch.equal(block[:tokens], x[:rows, 64 * (3 + i) : 64 * (4 + i)])
        assert not block[tokens:].any()


@pytest.mark.parametrize(("group_size", "block_k"), [(32, 128), (64, 64), (128, 64), (128, 256)])
def test_weights_and_their_scales(group_size: int, block_k: int) -> None:
    n, k, strip, stage = 320, 512, 4, 1
    problem = GEMM.problem_type(n=n, k=k, group_size=group_size)
    config = GEMM.config_type(32, 192, block_k, 16, body="wgmma_ws")
    packed = torch.arange(n * k // 4).to(torch.int16).view(n // 32, k // 32, 256)
    seen = GEMM.tensor_map(problem, config, "w_packed", (n // 32, k // 32, 32, 4))
    assert not seen.swizzled
    tiles = block_k // 32
    brought = box_of(packed, seen, (0, stage * tiles, strip, 0))[0]
    assert torch.equal(brought, packed[strip : strip + 6, stage * tiles : (stage + 1) * tiles])
    assert not box_of(packed, seen, (0, 0, 8, 0))[0, 2:].any(), "strips beyond the last are zeros"

    scales = torch.arange(n * k // group_size).to(torch.int16).view(n // 32, k // group_size, 32)
    seen = GEMM.tensor_map(problem, config, "scales", tuple(scales.shape))
    assert seen is not None
    first, groups = stage * block_k // group_size, max(1, block_k // group_size)
    assert torch.equal(box_of(scales, seen, (0, first, strip, 0))[0], scales[strip : strip + 6, first : first + groups])


def test_each_is_made_when_it_is_first_launched_with_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[Any, ...]] = []
    monkeypatch.setattr(tensor_maps, "encode", lambda *what: made.append(what) or len(made))
    monkeypatch.setattr(tensor_maps, "Encoded", lambda: "zeros")
    problem, config = GEMM.problem_type(n=256, k=192), GEMM.config_type(32, 128, 64, 16, body="wgmma_ws")
    function = SimpleNamespace(kernel=GEMM, config=config, _maps={})
    of: Any = launcher.Function._map
    arg, x, other = Arg("x_map", "map", of="x"), torch.zeros(3, 192), torch.zeros(3, 192)
    assert [of(function, problem, arg, t) for t in (x, other, x, x[:2], None)] == [1, 2, 1, 3, "zeros"]
    assert [address for _, _, address in made] == [x.data_ptr(), other.data_ptr(), x.data_ptr()]
    assert made[0][1].dims == (64, 3, 3, 1)


def test_its_memory_is_where_the_driver_wants_it() -> None:
    maps = [tensor_maps.Encoded() for _ in range(50)]
    assert all(m.getPtr() % 128 == 0 for m in maps)
    assert len({m.getPtr() for m in maps}) == 50


def test_an_address_is_no_tensor() -> None:
    function = SimpleNamespace(kernel=GEMM, config=GEMM.config_type(), _maps={})
    of: Any = launcher.Function._map
    with pytest.raises(LaunchError, match=r"x .*CUDA tensor.*4096"):
        of(function, GEMM.problem_type(n=256, k=192), Arg("x_map", "map", of="x"), 4096)


def test_calls_do_not_pass_them() -> None:
    inputs = GEMM.cases.inputs(GEMM.cases.CASES[0], torch.device("cpu"))
    GEMM.require_arguments(inputs)
    assert "x_map" not in inputs
