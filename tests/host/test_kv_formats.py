"""Formats of the KV cache: what is stored, who reads and writes it, and that tokens follow from it alone."""

from __future__ import annotations

import ctypes
import json
import math
import shutil
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import kernel_on_cpu
import numpy as np
import pytest
import torch
from checkpoints import add_kv_scales
from command import Kerngen

from kerngen.arch import ARCHES, Target, find_arch
from kerngen.compiler.render import render
from kerngen.errors import ConfigRefused, NumericsError, ProblemError, UsageError
from kerngen.quality.kv import Distance, kv_quality
from kerngen.runtime.batch import Batch
from kerngen.runtime.cache import KVCache
from kerngen.runtime.config import KV_CACHES, Keeping, read_model_config
from kerngen.runtime.engine import Engine
from kerngen.runtime.executors.reference import Reference
from kerngen.runtime.ops.eager import TorchOps
from kerngen.runtime.ops.kernels import KernelOps, heads_at_once
from kerngen.runtime.session import Session, load, open_checkpoint
from kerngen.templates import find_kernel
from kerngen.templates.attn_decode.op import attn_decode, attn_decode_qkv
from kerngen.templates.common.attention.heads_torch import inverse_frequencies
from kerngen.templates.common.attention.kv_formats_torch import (
    all_values,
    codes_and_scales,
    encoded,
    fp8_codes,
    put_scales,
    quantized,
    randomize,
    read_rows,
    values_of,
    wipe_page,
    write_rows,
)
from kerngen.templates.common.rows.spec import KV_BITS, KV_GROUPS, apart_format, is_shared, kv_row_bytes
from kerngen.templates.common.rows.torch_rows import TORCH_DTYPE
from kerngen.templates.kernel import Case, Kernel
from kerngen.templates.qkv_norm_rope.op import qkv_norm_rope
from kerngen.templates.values import (
    FP8,
    INT3,
    INT4,
    INT8,
    KV_FORMATS,
    SHARED,
    SHARED_INT3,
    SHARED_INT4,
    SHARED_INT8,
    AttnBatch,
    HeadNorms,
    KVFormat,
    KVView,
)
from kerngen.timing.measure import compare
from kerngen.workload.workload import find_model

TINY = Path(__file__).resolve().parents[2] / "examples" / "tiny"
MODEL, ASSISTANT = TINY / "gemma-4-tiny-w4a16", TINY / "gemma-4-tiny-assistant"
PROMPT = (TINY / "prompt.txt").read_text()
ATTENTION = tuple(find_kernel(name) for name in ("attn_decode", "attn_prefill", "qkv_norm_rope"))
KEPT = [Keeping(kv_cache_dtype=d, kv_cache_layout=x) for d, x in KV_CACHES]
CPU = torch.device("cpu")


def test_names_agree() -> None:
    assert {name: form.group for name, form in KV_FORMATS.items()} == KV_GROUPS
    assert {name: form.bits * (form.group > 0) for name, form in KV_FORMATS.items()} == KV_BITS
    config = replace(read_model_config(MODEL), has_kv_scales=True)
    layer = next(layer for layer in config.layers if layer.v_is_k)
    made = {config.keeping(kept).kv_format_of(layer) for kept in KEPT}
    assert made == set(KV_FORMATS)
    assert [form.is_shared for form in KV_FORMATS.values()] == [is_shared(name) for name in KV_FORMATS]
    for name, form in KV_FORMATS.items():
        each = form.page_bytes(1, 1, 512, torch.bfloat16) / 2
        assert kv_row_bytes(name, 512, "bf16") == each
        assert form.head_dim(form.row_entries(512)) == 512


def test_codes_and_scales_are_numpys() -> None:
    """Rows of all sizes, among them zeros, one value alone, ties, and what is too small for a scale of fp16."""
    rng = np.random.default_rng(5)
    x = rng.standard_normal((400, 256)).astype(np.float32) * 10.0 ** rng.integers(-8, 4, (400, 1))
    x[0], x[1], x[1, 70] = 0, 0, -3.0
    x[2, :64] = np.arange(64) * 2  # of a scale of about 1
    x = torch.from_numpy(x).bfloat16().float().numpy()
    groups = x.reshape(400, 4, 64)
    scales = (np.abs(groups).max(-1) / np.float32(127)).astype(np.float16)
    inverse = np.divide(np.float32(1), scales.astype(np.float32), where=scales > 0, out=np.zeros_like(groups[..., 0]))
    codes = np.clip(np.rint(groups * inverse[..., None]), -127, 127).astype(np.int8).reshape(400, 256)
    got, its_scales = quantized(torch.from_numpy(x), INT8)
    assert np.array_equal(got.numpy().view(np.uint8), codes.astype(np.int16) + 128)
    assert np.array_equal(its_scales.numpy(), scales)
    assert int(np.abs(codes[3:]).max()) == 127
    assert not codes[0].any()
    back = values_of(got, its_scales, INT8, torch.float32).numpy().reshape(400, 4, 64)
    largest = np.abs(groups).max(-1, keepdims=True)
    normal = scales >= np.float16(2**-14)  # of smaller ones fewer bits are left
    assert (np.abs(back - groups) <= largest * (0.51 / 127))[normal].all()
    assert (np.abs(back - groups) <= largest * 0.51 / 127 + 2.0**-24 * 127)[~normal].all()


def _hadamard() -> np.ndarray[Any, Any]:
    """The matrix over 8, by its definition: -1 to the power of the bits that row and column have in common."""
    bits = [[(row & column).bit_count() for column in range(64)] for row in range(64)]
    return (1 - 2 * (np.array(bits) % 2)) / 8


def test_rows_of_int4_are_rotated_and_numpys() -> None:
    """As the first lines of kv_formats_torch.py say: rows of a few large values have no larger errors than others."""
    rng = np.random.default_rng(5)
    x = rng.standard_normal((400, 256))
    x[:200, rng.choice(256, 8, False)] *= 8
    x = torch.from_numpy(x / np.sqrt((x**2).mean(-1, keepdims=True))).bfloat16().double().numpy()
    x[0] = 0
    y = x.reshape(400, 4, 64) @ _hadamard()
    halves = y.reshape(400, 4, 8, 2, 4)
    scales = (np.abs(halves).max((2, 4)) / 8).astype(np.float16)  # [row, block, half]
    inverse = np.divide(1.0, scales, where=scales > 0, out=np.zeros(scales.shape))[:, :, None, :, None]
    codes = np.clip(np.floor(halves * inverse), -8, 7).astype(int).reshape(400, 256) + 8
    stored, its_scales = quantized(torch.from_numpy(x).float(), INT4)
    assert (stored.shape, stored.dtype, its_scales.shape) == ((400, 128), torch.int8, (400, 8))
    words = np.ascontiguousarray(stored.numpy()).view("<u4").astype(np.int64)
    nibbles = np.stack([words >> 4 * i & 15 for i in (0, 4, 1, 5, 2, 6, 3, 7)], -1).reshape(400, 256)
    assert (nibbles != codes).mean() < 1e-3  # sums in fp32 may fall to the other side of a step
    assert (nibbles[0] == 8).all()
    assert (its_scales.numpy() != scales.reshape(400, 8)).mean() < 1e-2
    back = values_of(stored, its_scales, INT4, torch.float32).numpy()
    parts = (nibbles - 7.5).reshape(400, 4, 8, 2, 4) * its_scales.numpy().astype(float).reshape(400, 4, 1, 2, 1)
    np.testing.assert_allclose(back.reshape(400, 4, 64), parts.reshape(400, 4, 64) @ _hadamard(), atol=1e-5)
    errors = [np.sqrt(((back - x)[rows] ** 2).mean()) for rows in (slice(1, 200), slice(200, None))]
    assert all(0.07 < error < 0.095 for error in errors), errors


def _rows_of(name: str) -> np.ndarray[Any, Any]:
    """[200, 512] of RMS 1: normal, with a few large channels, of Student's t with 3 degrees, nearly one value."""
    rng = np.random.default_rng(11)
    x = {
        "normal": lambda: rng.standard_normal((200, 512)),
        "outliers": lambda: rng.standard_normal((200, 512)) * np.where(rng.permutation(512) < 8, 10, 1),
        "t3": lambda: rng.standard_t(3, (200, 512)),
        "constant": lambda: 2 + 0.3 * rng.standard_normal((200, 512)),
    }[name]()
    return np.asarray(x / np.sqrt((x**2).mean(-1, keepdims=True)))


@pytest.mark.parametrize("name", ["normal", "outliers", "t3", "constant"])
def test_rows_of_int3_are_numpys_and_as_exact_as_tq3s(name: str) -> None:
    """As the first lines of kv_formats_torch.py say. TQ3_0 (TurboQuant) has groups of 128 times random signs and a
    Hadamard matrix, the eight levels of Lloyd and Max for a normal distribution, and a norm each.
    """
    x = _rows_of(name)
    signs = np.array([-1 if (i & i >> 3).bit_count() % 2 else 1 for i in range(64)])
    assert set(np.abs(signs @ _hadamard())) == {1.0}  # of equal values
    halves = (x.reshape(200, 8, 64) * signs @ _hadamard()).reshape(200, 8, 8, 2, 4)
    scales = (np.abs(halves).max((2, 4)) / 4).astype(np.float16)  # [row, block, half]
    codes = np.clip(np.floor(halves / scales.astype(float)[:, :, None, :, None]), -4, 3).astype(int) + 4
    stored, its_scales = quantized(torch.from_numpy(x).float(), INT3)
    assert (stored.shape, its_scales.shape) == ((200, 192), (200, 16))
    words = np.ascontiguousarray(stored.numpy()).view("<u4").astype(np.int64).reshape(200, 8, 6)
    found = np.empty((200, 8, 8, 8), int)
    for nth in range(8):
        for i, nibble in enumerate((0, 4, 1, 5, 2, 6, 3, 7)):
            lower = words[..., nth // 2] >> 4 * nibble + nth % 2 * 2 & 3
            found[..., nth, i] = lower | (words[..., 4 + nth // 4] >> 4 * nibble + nth % 4 & 1) << 2
    assert (found != codes.reshape(200, 8, 8, 8)).mean() < 1e-3  # sums in fp32 may fall to the other side of a step
    assert (its_scales.numpy() != scales.reshape(200, 16)).mean() < 1e-2
    parts = (found - 3.5).reshape(200, 8, 8, 2, 4) * its_scales.numpy().astype(float).reshape(200, 8, 1, 2, 1)
    wanted = parts.reshape(200, 8, 64) @ _hadamard() * signs
    back = values_of(stored, its_scales, INT3, torch.float32).numpy()
    np.testing.assert_allclose(back.reshape(200, 8, 64), wanted, atol=1e-5)
    assert np.sqrt(((back - x) ** 2).mean()) < np.sqrt(((_by_tq3(x) - x) ** 2).mean()) < 0.2


def _by_tq3(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """x [n, 512] as TQ3_0 reads it."""
    rng = np.random.default_rng(12)
    signs = 1 - 2 * rng.integers(0, 2, (2, 128))
    matrix = np.array([[(-1.0) ** (row & column).bit_count() for column in range(128)] for row in range(128)])
    y = (x.reshape(-1, 128) * signs[0]) @ matrix / np.sqrt(128) * signs[1]
    upper = np.array([0.2451, 0.7560, 1.3439, 2.1520])
    levels = np.concatenate((-upper[::-1], upper))
    unit = y / np.sqrt((y**2).mean(-1, keepdims=True))
    near = levels[np.searchsorted((levels[1:] + levels[:-1]) / 2, unit)]
    norm = np.sqrt((y**2).sum(-1, keepdims=True) / (near**2).sum(-1, keepdims=True)).astype(np.float16)
    return ((near * norm * signs[1]) @ matrix / np.sqrt(128) * signs[0]).reshape(x.shape)


@pytest.mark.parametrize(("head_dim", "page_size"), [(128, 16), (256, 64), (512, 64)])
@pytest.mark.parametrize("form", [INT8, INT4, INT3], ids=lambda form: form.name)
def test_a_heads_page_is_its_rows_of_codes_and_then_their_scales(form: KVFormat, head_dim: int, page_size: int) -> None:
    """As common/attention/kv_int8.cuh says, in bytes: what kernels of another process or machine read."""
    kv = form.allocate((5, 3, page_size, head_dim), torch.bfloat16, CPU)
    assert (kv.head_dim, kv.page_heads, kv.num_bytes) == (
        head_dim,
        0,
        5 * form.page_bytes(3, page_size, head_dim, torch.bfloat16),
    )
    new = torch.randn(2, 3, head_dim)
    write_rows(kv.k_cache, form.name, torch.tensor([4, 2]), torch.tensor([page_size - 1, 0]), new, keys=True)
    codes, scales = quantized(new, form)
    groups, width = head_dim // form.group, head_dim * form.bits // 8
    head_page = page_size * (width + 2 * groups)
    assert head_page % 16 == 0
    memory = kv.k_cache.view(-1).numpy()
    for token, (page, row) in enumerate([(4, page_size - 1), (2, 0)]):
        for head in range(3):
            at = (page * 3 + head) * head_page
            assert np.array_equal(memory[at + row * width :][:width], codes[token, head].numpy())
            its = memory[at + page_size * width + row * 2 * groups :][: 2 * groups].view(np.float16)
            assert np.array_equal(its, scales[token, head].numpy())
    assert int((kv.k_cache != 0).sum()) <= 6 * (width + 2 * groups)
    randomize(kv)
    assert 0.4 < float(all_values(kv.v_cache, form.name, torch.bfloat16).std()) < 2
    assert len(codes_and_scales(kv.k_cache, form)[1].unique()) == 1


def _e4m3() -> np.ndarray[Any, Any]:
    """What the codes from 0 to 126 stand for, by definition: exponents of four bits, mantissas of three."""
    codes = np.arange(127)
    exponent, mantissa = codes >> 3, codes & 7
    return np.where(exponent == 0, mantissa / 512, (8 + mantissa) * 2.0 ** (exponent - 10.0))


def _floats() -> torch.Tensor:
    """Of all sizes and both signs: codes' values, what lies in the middle of two, what is next to that, and beyond."""
    values = np.float32(_e4m3())
    middles = (values[1:] + values[:-1]) / 2
    nearly = [np.nextafter(middles, np.float32(to)) for to in (0, np.inf)]
    beyond = np.float32([464, 480, 1e30, np.inf, 1e-30, 2.0**-149])
    rng = np.random.default_rng(7)
    rest = rng.standard_normal(4000).astype(np.float32) * 10.0 ** rng.integers(-5, 4, 4000)
    sizes = np.concatenate((values, middles, *nearly, beyond, rest)).astype(np.float32)
    return torch.from_numpy(np.concatenate((sizes, -sizes, np.float32([np.nan]))))


def test_codes_of_e4m3_are_numpys() -> None:
    """Each float is the nearest value, an even code of two; 448 of more."""
    floats, values = _floats(), _e4m3()
    padded = torch.nn.functional.pad(floats, (0, -len(floats) % 64)).view(-1, 64)
    for scale in (1.0, 2.0**-5, 0.0371):
        its = torch.tensor([[256 * scale]]).half()
        got = fp8_codes(padded, its.expand(len(padded), 1)).flatten()[: len(floats)].numpy().view(np.uint8)
        sizes = np.abs(floats.numpy()[:-1] / (its.item() / np.float32(256))).astype(np.float64)
        distances = np.abs(np.minimum(sizes, 448)[:, None] - values)
        two = np.argsort(distances + (np.arange(127) % 2) * 1e-300, axis=1, kind="stable")[:, :2]
        tied = np.take_along_axis(distances, two, 1)
        nearest = np.where((tied[:, 0] == tied[:, 1]) & (two[:, 0] % 2 == 1), two[:, 1], two[:, 0])
        assert np.array_equal(got[:-1] & 127, nearest)
        assert np.array_equal(got[:-1] >> 7, np.signbit(floats.numpy()[:-1]))
        assert got[-1] & 127 == 127
        back = values_of(torch.arange(127).to(torch.int8)[None], its, replace(FP8, group=127), torch.float32)
        assert np.array_equal(back[0].numpy(), np.float32(values * its.item() / 256))
    assert not fp8_codes(torch.randn(3, 64), torch.zeros(3, 1).half()).bitwise_and(127).any()
    with pytest.raises(TypeError, match="scales of fp8 are not made of values"):
        quantized(torch.zeros(1, 64), FP8)


def test_scales_of_fp8_stay_in_their_pools() -> None:
    """Those of each head, in all rows: whatever is written, and where a page is wiped."""
    kv = FP8.allocate((3, 2, 16, 128), torch.bfloat16, CPU)
    put_scales(kv, (0.5, 0.037), (0.25,))
    wanted = [torch.tensor(x).double().mul(256).half() for x in ((0.5, 0.037), (0.25, 0.25))]
    new = torch.randn(4, 2, 128)
    new[0, 1, 5] = torch.nan
    for pool, scales, keys in ((kv.k_cache, wanted[0], True), (kv.v_cache, wanted[1], False)):
        write_rows(pool, "fp8", torch.zeros(4).long(), torch.arange(4), new, keys=keys)
        its = codes_and_scales(pool, FP8)[1]
        assert torch.equal(its, scales[:, None, None].expand(3, 2, 16, 2))
        back = all_values(pool, "fp8", torch.float32)[0, :, :4].transpose(0, 1)
        assert back.isnan().sum() == 1
        held = scales.float()[:, None] / 256
        step = torch.maximum(new.abs() / 16, held / 1024).nan_to_num(0) * 1.001
        assert bool(((back - new).nan_to_num(0).abs() <= step).all())
    wipe_page(kv, 0)
    for pool, scales in ((kv.k_cache, wanted[0]), (kv.v_cache, wanted[1])):
        codes, its = codes_and_scales(pool, FP8)
        assert not codes.any()
        assert torch.equal(its, scales[:, None, None].expand(3, 2, 16, 2))


@pytest.mark.parametrize("name", ["int8", "int4", "int3", "fp8"])
def test_a_poisoned_row_stays_poison(name: str) -> None:
    values = torch.randn(2, 1, 16, 128)
    values[1, 0, 3, 70] = torch.nan
    back = all_values(encoded(values, name), name, torch.float16)
    assert back.isnan().sum() == (1 if name == "fp8" else 64)
    assert bool((back[1, 0, 3, 64:] if name != "fp8" else back[1, 0, 3, 70]).isnan().all())


def test_a_shared_page_is_v_then_what_turns_of_k() -> None:
    """As common/attention/kv_shared.cuh says: rows of V, of turned dims, then the scales of both."""
    row_bytes = {SHARED: 640 * 2, SHARED_INT8: 660, SHARED_INT4: 360, SHARED_INT3: 280}
    for form, size in ((form, 64 * row) for form, row in row_bytes.items()):
        kv = form.allocate((3, 2, 64, 512), torch.float16, CPU)
        assert (kv.head_dim, kv.num_bytes, kv.k_cache is kv.v_cache) == (512, 3 * 2 * size, True)
        k, v = torch.randn(2, 1, 2, 512).half()
        at = torch.tensor([1]), torch.tensor([5])
        write_rows(kv.k_cache, form.name, *at, k, keys=True)
        write_rows(kv.v_cache, form.name, *at, v, keys=False)
        memory = kv.k_cache.view(-1).view(torch.uint8).numpy()[(1 * 2 + 1) * size :][:size]  # head 1 of page 1
        turned = torch.cat((k[0, 1, :64], k[0, 1, 256:320]))
        if form is SHARED:
            assert np.array_equal(memory[5 * 1024 :][:1024].view(np.float16), v[0, 1].numpy())
            assert np.array_equal(memory[64 * 1024 + 5 * 256 :][:256].view(np.float16), turned.numpy())
            continue
        code, scale = form.bits / 8, 2 / form.group  # bytes of a value
        for part, first, width, scales_before in ((v[0, 1], 0, 512, 0), (turned, 512, 128, 512)):
            codes, scales = quantized(part, form)
            at = int(64 * first * code + 5 * width * code)
            assert np.array_equal(memory[at:][: int(width * code)].view(np.int8), codes.numpy())
            at = int(64 * 640 * code + 64 * scales_before * scale + 5 * width * scale)
            assert np.array_equal(memory[at:][: int(width * scale)].view(np.float16), scales.numpy())


@pytest.mark.parametrize(("name", "k_eq_v"), [
    ("int8", False), ("int8", True), ("int4", False), ("shared", True), ("shared_int8", True), ("shared_int4", True),
    ("int3", False), ("shared_int3", True), ("fp8", False), ("fp8", True),
])  # fmt: skip
def test_new_tokens_are_used_as_they_are_stored(name: str, k_eq_v: bool) -> None:
    """By one call or by two: the same bytes in the caches, and the same result as reading them again."""
    torch.manual_seed(3)
    form = KV_FORMATS[name]
    dim, lens, q_len = 512, torch.tensor([5, 40], dtype=torch.int32), 3
    pools = [form.allocate((6, 2, 16, dim), torch.float16, CPU) for _ in range(2)]
    randomize(pools[0])
    pools[1].k_cache.copy_(pools[0].k_cache), pools[1].v_cache.copy_(pools[0].v_cache)
    table = torch.tensor([[1, 0, 0], [2, 3, 4]], dtype=torch.int32)
    at = lens[:, None] - q_len + torch.arange(q_len)
    slots = (table.gather(1, at.long() // 16) * 16 + at % 16).flatten().long()
    qkv = torch.randn(6, (4 + (1 if k_eq_v else 2) * 2) * dim).half()
    weights = (1 + 0.2 * torch.randn(2, dim)).half()
    heads = HeadNorms(weights[0], inverse_frequencies(dim, 64, CPU), 64, 1e-6, weights[1], 4)
    batch = AttnBatch(table, lens, max_kv_len=48, q_len=q_len, positions=at.flatten().long(), slot_mapping=slots)
    ops = Reference()
    at_once = ops.run(attn_decode_qkv(qkv, heads, pools[0], batch, 0.1), "")
    q = ops.run(qkv_norm_rope(qkv, heads, at.flatten().long(), pools[1], slots), "")
    halves = ops.run(attn_decode(q, pools[1], batch, 0.1), "")
    assert torch.equal(at_once, halves)
    assert torch.equal(pools[0].k_cache, pools[1].k_cache)
    assert torch.equal(pools[0].v_cache, pools[1].v_cache)
    every = torch.arange(6).repeat_interleave(16), torch.arange(16).repeat(6)
    both = ((pools[0].k_cache, True), (pools[0].v_cache, False))
    rows = (read_rows(pool, name, torch.float16, *every, keys=keys).half() for pool, keys in both)
    plain = KVView(*(x.view(6, 16, 2, dim).transpose(1, 2).contiguous() for x in rows))
    torch.testing.assert_close(ops.run(attn_decode(q, plain, batch, 0.1), ""), halves, rtol=0, atol=0)
    if form.is_shared:  # what a cache apart gives, but for rounding q once in place of K
        apart = KV_FORMATS[apart_format(name)]
        own = apart.allocate((6, 2, 16, dim), torch.float16, CPU)
        short = replace(batch, kv_lens=torch.tensor([3, 3], dtype=torch.int32))
        slots = torch.arange(16, 22)
        first = AttnBatch(
            torch.tensor([[1, 0], [1, 0]], dtype=torch.int32), short.kv_lens, max_kv_len=32, q_len=3,
            positions=torch.arange(3).repeat(2), slot_mapping=slots,
        )  # fmt: skip
        first = replace(first, slot_mapping=torch.cat((slots[:3], slots[:3])))
        alike = torch.cat((qkv[:3], qkv[:3]))
        a, b = (ops.run(attn_decode_qkv(alike, heads, kv, first, 0.1), "").float() for kv in (own, pools[1]))
        assert float((a - b).abs().max()) < {16: 0.004, 8: 0.02, 4: 0.6, 3: 1.2}[form.bits if form.group else 16]


CODES = [
    c for c in ATTENTION[2].cases.CASES
    if c.problem.kv_format != "plain" and c.problem.dtype == "bf16" and c.problem.num_tokens < 10
    and c.problem.v_norm
]  # fmt: skip
NO_COMPILER = pytest.mark.skipif(kernel_on_cpu.COMPILER is None, reason="neither g++ nor clang++ is on the PATH")


@NO_COMPILER
@pytest.mark.parametrize("case", CODES, ids=str)
def test_qkv_norm_rope_stores_what_the_reference_does(case: Case, tmp_path: Path) -> None:
    kernel, target = ATTENTION[2], Target.of(find_arch("sm90"))
    config = kernel.default_config(case.problem, target)
    inputs = kernel.cases.inputs(case, "cpu")
    inputs["qkv"][2, -1] = torch.nan  # which stays one: whoever reads the head shall see it
    expected = kernel.reference.expected(case.problem, inputs)
    kernel_on_cpu.run_kernel(kernel, case.problem, config, target, inputs, tmp_path)
    result = compare(kernel, case, inputs, expected)
    assert result.ok, result.message
    slot, size = int(inputs["slot_mapping"][2]), case.problem.page_size
    stored = kernel.values_of(case.problem, "v_cache", inputs["v_cache"])[slot // size, -1, slot % size]
    assert bool(stored[: case.problem.head_dim].isnan().all())
    if case.problem.kv_format == "fp8":  # whose scales stay as they were
        for name in ("k_cache", "v_cache"):
            assert torch.equal(*(codes_and_scales(of[name], FP8)[1] for of in (inputs, expected))), name
    for name in ("k_cache", "v_cache"):  # a sum in another order may flip a rounding, and that a code
        got, want = (kernel.values_of(case.problem, name, of[name]) for of in (inputs, expected))
        assert float(((got == want) | want.isnan()).float().mean()) > 0.998, name


@NO_COMPILER
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_kernels_read_the_values_of_codes(dtype: str, tmp_path: Path) -> None:
    """Each code, by scales of all sizes, and those of a few values as they are made."""
    kernel, target = ATTENTION[2], Target.of(find_arch("sm90"))
    problem = replace(next(c.problem for c in CODES if c.problem.kv_format == "int8"), dtype=dtype)
    source = (
        render(kernel, problem, kernel.default_config(problem, target), target)
        + """
extern "C" __global__ void probe(uint4* out, const uint2* codes, const uint16_t* scales, int num_scales) {
    for (int s = 0; s < num_scales; ++s)
        for (int i = 0; i < 32; ++i) out[s * 32 + i] = KvFormat::converted(codes[i], scales[s]);
}
"""
    )
    library = kernel_on_cpu.on_cpu(source, "probe", tmp_path)
    codes = torch.arange(-127, 129).clamp(max=127).to(torch.int8)
    scales = torch.cat((torch.tensor([0.0, 2.0**-24, 2.0**-14, 1.0, 65504 / 127]), torch.rand(200) / 10)).half()
    form = TORCH_DTYPE[dtype]
    out = torch.empty(len(scales), 256, dtype=form)
    stored = (codes.short() + 128).to(torch.uint8)
    library.run(1, 1, 0, *(ctypes.c_void_p(t.data_ptr()) for t in (out, stored, scales)), len(scales))
    wanted = (codes.float() * scales.float()[:, None]).to(form)
    assert torch.equal(out, wanted)


@NO_COMPILER
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_kernels_read_and_make_codes_of_e4m3(dtype: str, tmp_path: Path) -> None:
    """All codes, NaN among them, by scales as pools hold them; what becomes of fp32 of all sizes, and of each number
    of 16 bits over scales of many bits.
    """
    kernel, target = ATTENTION[2], Target.of(find_arch("sm90"))
    problem = replace(next(c.problem for c in CODES if c.problem.kv_format == "fp8"), dtype=dtype)
    source = (
        str(render(kernel, problem, kernel.default_config(problem, target), target))
        + """
extern "C" __global__ void probe(uint4* out, const uint2* codes, const uint16_t* scales, int num_scales, uint8_t* made,
                                 const float* values, int num_values, uint2* stored, const uint4* all) {
    for (int s = 0; s < num_scales; ++s)
        for (int i = 0; i < 32; ++i) out[s * 32 + i] = KvFormat::converted(codes[i], scales[s]);
    for (int i = 0; i < num_values; ++i) made[i] = uint8_t(e4m3_of(values[i]));
    for (int s = 0; s < num_scales; ++s)
        for (int i = 0; i < 8192; ++i)
            stored[s * 8192 + i] = KvFormat::quantized(all[i], Half<false>::to_float(scales[s]) / 256);
}
"""
    )
    library = kernel_on_cpu.on_cpu(source, "probe", tmp_path)
    codes = torch.arange(256).to(torch.uint8)
    scales = torch.cat((torch.tensor([0.0, 2.0**-6, 2.0**-14, 1.0, 256.0, 32768.0]), 20 * torch.rand(40))).half()
    form = TORCH_DTYPE[dtype]
    every = torch.arange(-32768, 32768).to(torch.int16).view(form)
    stored = torch.empty(len(scales), 65536, dtype=torch.int8)
    out, values = torch.empty(len(scales), 256, dtype=form), _floats()
    made = torch.empty(len(values), dtype=torch.int8)
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (out, codes, scales, made, values, stored, every)]
    library.run(1, 1, 0, *pointers[:3], len(scales), *pointers[3:5], len(values), *pointers[5:])
    wanted = values_of(codes.view(torch.int8).expand(len(scales), -1), scales[:, None].expand(-1, 4), FP8, form)
    assert torch.equal(out.isnan(), wanted.isnan())
    assert out[:, [127, 255]].isnan().all()
    assert torch.equal(out.nan_to_num(9), wanted.to(form).nan_to_num(9))
    assert torch.equal(made, values.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.int8))
    wanted = torch.stack([fp8_codes(every[None], scale[None, None])[0] for scale in scales])
    unknown = [x & 127 == 127 for x in (stored, wanted)]
    assert torch.equal(*unknown)
    assert torch.equal(stored[~unknown[0]], wanted[~unknown[0]])


MEANS = find_kernel("key_means")


@NO_COMPILER
@pytest.mark.parametrize("case", [
    c for c in MEANS.cases.CASES if KV_FORMATS[c.problem.kv_format].is_rotated and c.problem.dtype == "bf16"
], ids=str)  # fmt: skip
def test_key_means_rotates_back(case: Case, tmp_path: Path) -> None:
    target = Target.of(find_arch("sm90"))
    config = MEANS.default_config(case.problem, target)
    source = render(MEANS, case.problem, config, target)
    library = kernel_on_cpu.on_cpu(source, "key_means", tmp_path)
    inputs = MEANS.cases.inputs(case, "cpu")
    expected = MEANS.reference.expected(case.problem, inputs)
    (launch,), (args,) = MEANS.launches(case.problem, config, target), MEANS.body(config, target.arch).args.values()
    x, y, z = launch.grid
    library.set_grid(x, y, 1)
    given = [inputs[a.name] for a in args]
    values = [ctypes.c_void_p(v.data_ptr()) if isinstance(v, torch.Tensor) else ctypes.c_int(v) for v in given]
    library.run(x * y * z, launch.block[0], 0, *values)
    result = compare(MEANS, case, inputs, expected)
    assert result.ok, result.message


@NO_COMPILER
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("name", list(KV_FORMATS))
def test_kernels_read_the_values_of_rows(name: str, dtype: str, tmp_path: Path) -> None:
    """`load_values` of each format is `read_rows`, to the bit: what goes to prompts' attention in 16 bits."""
    target, of, form = Target.of(find_arch("sm90")), TORCH_DTYPE[dtype], KV_FORMATS[name]
    problem = MEANS.problem_type(num_kv_heads=2, page_size=16, mean_keys=16, kv_format=name, dtype=dtype)
    source = (
        str(render(MEANS, problem, MEANS.default_config(problem, target), target))
        + """
extern "C" __global__ void probe(uint4* out, const KvFormat::Element* pool, int pages, int is_key) {
    for (int row = 0; row < pages * 2 * PAGE_SIZE; ++row) {
        const int page = row / (2 * PAGE_SIZE), head = row / PAGE_SIZE % 2;
        const auto from = KvFormat::at(pool, KvFormat::place(page, row % PAGE_SIZE, head, threadIdx.x), is_key);
        out[row * CHUNKS + threadIdx.x] = KvFormat::load_values(from, true);
    }
}
"""
    )
    library = kernel_on_cpu.on_cpu(source, "probe", tmp_path)
    kv = form.allocate((3, 2, 16, 512), of, CPU)
    randomize(kv)
    at = torch.arange(3).repeat_interleave(16), torch.arange(16).repeat(3)
    for keys, pool in ((True, kv.k_cache), (False, kv.v_cache)):
        out = torch.empty(3, 2, 16, 512, dtype=of)
        pointers = (ctypes.c_void_p(x.data_ptr()) for x in (out, pool))
        library.run(1, 64, 0, *pointers, 3, int(keys))
        wanted = read_rows(pool, name, of, *at, keys=keys).to(of).view(3, 16, 2, 512).transpose(1, 2)
        assert torch.equal(out, wanted)


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint, with scales of an fp8 cache."""
    folder = tmp_path_factory.mktemp("fp8") / MODEL.name
    shutil.copytree(MODEL, folder)
    add_kv_scales(folder)
    return folder


@pytest.fixture(scope="module")
def sessions(scaled: Path) -> dict[tuple[str, str], Session]:
    how: dict[str, Any] = {
        "draft": ASSISTANT,
        "device": "cpu",
        "backend": "torch",
        "dtype": "fp32",
        "num_draft_tokens": 3,
    }
    each = [(kept.kv_cache_dtype, kept.kv_cache_layout) for kept in KEPT]
    return {(d, x): load(scaled, kv_cache_dtype=d, kv_cache_layout=x, **how) for d, x in each}


def _tokens(session: Session, drafts: int | None = 0, **options: Any) -> list[list[int]]:
    """Of three prompts, the last of which begins as the first does."""
    drafter = session.drafter if drafts else None
    engine = Engine(session.model, drafter, max_len=400, max_batch=3, num_draft_tokens=drafts, **options)
    prompts = [session.encode(text, chat=False) for text in (PROMPT, PROMPT[::2], PROMPT + " And then")]
    return [engine.generate(prompt, max_new_tokens=24).tokens for prompt in prompts]


@pytest.mark.parametrize("kept", KEPT[1:], ids=lambda k: f"{k.kv_cache_dtype}-{k.kv_cache_layout}")
def test_tokens_do_not_depend_on_drafts_chunks_or_kept_prefixes(
    sessions: dict[tuple[str, str], Session], kept: Keeping
) -> None:
    session = sessions[kept.kv_cache_dtype, kept.kv_cache_layout]
    wanted = _tokens(session, prefix_caching=False)
    assert len(wanted[0]) == 24
    for options in ({"drafts": 3}, {"drafts": 5, "prefill_chunk": 32}, {}):
        assert _tokens(session, **options) == wanted, options
    if kept.kv_cache_dtype == "auto":  # in fp32 a weight in q is as good as one in K
        assert wanted == _tokens(sessions["auto", "apart"])


def test_the_cache_is_in_its_format_and_a_drafter_reads_it(sessions: dict[tuple[str, str], Session]) -> None:
    plain = sessions["auto", "apart"].cache_shape.token_bytes
    for (dtype, layout), session in sessions.items():
        engine = session.reserve(64)
        pools = [(layer, engine.cache.pages(layer)) for layer in session.config.layers]
        assert {pool.k_cache.dtype for _, pool in pools} == {torch.float32 if dtype == "auto" else torch.int8}
        for layer, pool in pools:
            assert pool.format.is_shared == (layout == "shared" and layer.v_is_k)
            few = {"int4": 4, "int3": 3} if layer.kind == "full" else {}
            assert pool.format.bits == few.get(dtype, 8)
        assert engine.cache.num_bytes == engine.shape.num_bytes(engine.cache.num_pages)
        codes_8 = (1 + 2 / 64) / 4
        part = {"auto": 1.0, "int8": codes_8, "int4": (1 / 2 + 2 / 32) / 4, "int3": (3 / 8 + 2 / 32) / 4}  # of fp32
        wanted = part.get(dtype, codes_8) * (0.625 if layout == "shared" else 1)
        assert session.cache_shape.token_bytes / plain == wanted
        answer = session.generate(PROMPT, max_new_tokens=24)
        assert answer.stats.acceptance_length > 2, (dtype, layout)


@pytest.mark.parametrize("kept", KEPT[1:], ids=lambda k: f"{k.kv_cache_dtype}-{k.kv_cache_layout}")
def test_the_kernels_path_has_the_oracles_tokens(scaled: Path, kept: Keeping) -> None:
    """With the references in place of kernels, in fp32: only sums in another order differ."""
    found = []
    for ops in (TorchOps(CPU, torch.float32), KernelOps(Reference(), torch.float32)):
        session = open_checkpoint(scaled, ops, drafts=[ASSISTANT], kept=kept)
        session.num_draft_tokens = 3
        found.append(session.generate(PROMPT[:60], max_new_tokens=12).tokens)
    assert found[0] == found[1]


@pytest.mark.parametrize("kernel", ATTENTION, ids=lambda k: k.name)
@pytest.mark.parametrize("arch", ARCHES.values(), ids=str)
def test_every_arch_serves_every_format(kernel: Kernel, arch: Any) -> None:
    for case in (c for c in kernel.cases.CASES if c.problem.kv_format != "plain"):
        problem = replace(case.problem, dtype="fp16")
        if getattr(problem, "lists", False):  # which sm70 has not, in any format
            continue
        config = kernel.default_config(problem, Target.of(arch))
        kernel.require_valid(problem, config, Target.of(arch))
        plain = replace(problem, kv_format="plain")
        assert kernel.cost(problem).bytes < kernel.cost(plain).bytes


def test_what_brings_rows_as_they_lie_refuses_codes() -> None:
    target = Target.of(find_arch("sm90"))
    decode, prefill, _ = ATTENTION
    problem: Any = decode.problem_type(head_dim=512, kv_format="int8")
    by_warpgroups = decode.config_type(body="wgmma_ws", num_stages=6, split_d=8, num_warps=8, k_column_parts=4)
    with pytest.raises(ConfigRefused, match=r"body=wgmma_ws brings rows in boxes.*kv_format=int8 use body=mma"):
        decode.require_valid(problem, by_warpgroups, target)
    problem = prefill.problem_type(page_size=64, kv_format="int8")
    config = replace(prefill.default_config(problem, target), use_tma=True)
    with pytest.raises(
        ConfigRefused, match="use_tma=True brings rows as they lie, and those of kv_format=int8 are made"
    ):
        prefill.require_valid(problem, config, target)


def test_prompts_attention_refuses_rotated_values() -> None:
    """It rotates no queries: what it would give is wrong and looks right. So it is given plain pages."""
    prefill, target = ATTENTION[1], Target.of(find_arch("sm90"))
    for name, form in KV_FORMATS.items():
        problem: Any = prefill.problem_type(head_dim=512, page_size=64, kv_format=name)
        why = prefill.why_unsupported(problem, target)
        assert (why is None) == (not form.is_rotated), name
        batch = AttnBatch(torch.zeros(4, 4096, dtype=torch.int32), torch.zeros(4, dtype=torch.int32), max_kv_len=262144,
                          max_seqlen_q=1)  # fmt: skip
        assert heads_at_once(4, form.allocate((1, 2, 64, 512), torch.float16, CPU), batch) == form.is_rotated
    why = prefill.why_unsupported(replace(problem, kv_format="shared_int4"), target)
    assert why == "kv_format=shared_int4 holds rotated values: use gather_kv, and plain pages"


@pytest.mark.parametrize(("fields", "says"), [
    ({"kv_format": "int7"}, "kv_format='int7' is not one of: plain, int8, shared, shared_int8, int4, shared_int4, "
     "int3, shared_int3, fp8"),
    ({"kv_format": "shared", "head_dim": 256}, "heads of 512 are shared"),
    ({"kv_format": "int8", "page_heads": 32}, "page_heads=32: a cache in int8 is contiguous"),
    ({"kv_format": "int8", "page_size": 24}, "page_size=24 is no multiple of 16"),
])  # fmt: skip
def test_problems_that_cannot_be_are_refused(fields: dict[str, Any], says: str) -> None:
    prefill = ATTENTION[1]
    with pytest.raises(ProblemError, match=says):
        prefill.problem_type(**{"page_size": 64, **fields})
    with pytest.raises(ProblemError, match="dense k and v are plain"):
        prefill.problem_type(kv_format="int8")


def test_heads_that_have_no_whole_scales_are_refused(tmp_path: Path) -> None:
    config = read_model_config(MODEL)
    narrow = replace(config, layers=tuple(replace(layer, head_dim=64) for layer in config.layers))
    with pytest.raises(UsageError, match="heads of 64 do not"):
        narrow.keeping(Keeping(kv_cache_dtype="int8"))
    assert narrow.keeping(Keeping()) == narrow
    for field in ("dtype", "layout"):
        with pytest.raises(UsageError, match=f"a KV cache of {field} 'fp7' is not known"):
            Keeping(**{f"kv_cache_{field}": "fp7"})
    with pytest.raises(UsageError) as refused:
        Keeping(kv_cache_dtype="tq3")
    assert "int3" in str(refused.value.hint)
    apart = replace(config, layers=tuple(replace(layer, v_is_k=False) for layer in config.layers))
    with pytest.raises(UsageError, match="for layers whose K is V, and this model has none"):
        apart.keeping(Keeping(kv_cache_layout="shared"))
    reads = replace(config, layers=tuple(replace(layer, kv_source=0) for layer in config.layers))
    with pytest.raises(UsageError, match="not for layers that read another's K and V"):
        reads.keeping(Keeping(kv_cache_layout="shared"))
    for kept in KEPT[1:]:
        with pytest.raises(UsageError, match="inside vLLM caches are vLLM's"):
            find_model("gemma-4-31b", kept=kept).on("vllm")
    assert Keeping("int4", "int8", "shared").options == (
        "--draft-weights", "int4", "--kv-cache-dtype", "int8", "--kv-cache-layout", "shared",
    )  # fmt: skip


def test_eval_says_what_a_format_costs(kerngen: Kerngen) -> None:
    """On the trained tiny checkpoint: little, and not nothing. A format against itself is nothing at all."""
    code, out, _ = kerngen(
        "eval", "kv", str(MODEL), "--backend", "torch", "--device", "cpu", "--tokens", "300", "--json"
    )
    said = json.loads(out)
    assert (code, said["tokens"]) == (0, 299)
    assert [each["kv_cache_dtype"] for each in said["formats"]] == ["int8", "int4", "int3"]
    bounds = ((2e-3, 0.98, 0.01), (2e-2, 0.95, 0.01), (3e-2, 0.93, 0.03))
    for found, (most, least, drift) in zip(said["formats"], bounds, strict=True):
        assert [(d["first"], d["end"]) for d in found["buckets"]] == [(0, 128), (128, 299)]
        whole = found["whole"]
        assert 0 < whole["kl_mean"] < most
        assert whole["kl_mean"] <= whole["kl_p99"] <= whole["kl_max"]
        assert whole["top1"] > least
        assert abs(whole["perplexity"] / whole["reference_perplexity"] - 1) < drift
    how = ("--backend", "torch", "--device", "cpu", "--tokens", "40", "--kv-cache-layout", "shared")
    shown = kerngen("eval", "kv", str(MODEL), *how, "--kv-cache-dtype", "auto,int8")[1]
    assert "39 tokens, torch on cpu, float32" in shown
    assert "\nauto, shared\n" in shown
    assert "same token" in shown
    broken = load(MODEL, draft=False, device="cpu", backend="torch").model
    broken.weights.layers[0].q_norm.fill_(torch.nan)
    with pytest.raises(NumericsError, match=r"behind token 0 .* with --kv-cache-dtype int8 or without"):
        kv_quality(broken, range(9, 30), KEPT[2:3])
    itself = kv_quality(load(MODEL, draft=False, device="cpu", backend="torch").model, range(9, 60), [Keeping()])[
        0
    ].whole
    assert (itself.kl_max, itself.top1, itself.perplexity) == (0.0, 1.0, itself.reference_perplexity)


@pytest.mark.parametrize(("found", "reference", "shown"), [
    (5.62371, 5.62252, "5.6237 / 5.6225"), (10.0004, 9.99996, "10.000 / 10.000"),
    (206361.2254, 206312.4749, "206,361 / 206,312"), (math.inf, 12.3456, "inf / 12.346"),
])  # fmt: skip
def test_a_perplexity_has_the_digits_that_mean_something(found: float, reference: float, shown: str) -> None:
    said = import_module("kerngen.cli.eval")._perplexities(Distance(0, 9, 0.0, 0.0, 0.0, 1.0, found, reference))
    assert said == shown


def test_eval_is_what_two_softmaxes_say(sessions: dict[tuple[str, str], Session]) -> None:
    plain = sessions["auto", "apart"]
    ids = plain.encode(PROMPT, chat=False)[:70]
    found = kv_quality(plain.model, ids, KEPT[2:3], chunk=32)[0].whole
    rows = []
    for session in (plain, sessions["int8", "apart"]):
        model, cache = session.model, KVCache.whole(session.config, session.ops, batch=1, max_len=69)
        with torch.inference_mode():
            hidden = model.forward(Batch.prefill(torch.tensor(ids[:69]), 0, cache), cache)
            rows.append(torch.log_softmax(model.logits(hidden).double(), -1))
    p, q = rows
    kl = (p.exp() * (p - q)).nan_to_num(0).sum(-1)
    assert found.kl_mean == pytest.approx(float(kl.mean()), rel=1e-2)
    assert found.kl_max == pytest.approx(float(kl.max()), rel=1e-2)
    said = -q.gather(1, torch.tensor(ids[1:])[:, None]).mean()
    assert found.perplexity == pytest.approx(float(said.exp()), rel=1e-5)


@pytest.mark.parametrize(("options", "says"), [
    (("--kv-cache-dtype", "fp7"), "'fp7' is not known"), (("--kv-cache-dtype", ","), "names no format"),
    (("--text", "nowhere.txt"), "--text nowhere.txt: No such file or directory\n"),
    (("--text", str(MODEL / "model.safetensors")), "is binary, no text: byte 2 is 0\n  name a text file"),
    (("--text", "latin1.txt"), "--text latin1.txt is not UTF-8: byte 3 is 0xe9\n  name a text file"),
])  # fmt: skip
def test_eval_refuses(kerngen: Kerngen, options: tuple[str, ...], says: str) -> None:
    (kerngen.folder / "latin1.txt").write_bytes("caf\xe9".encode("latin1"))
    code, _, err = kerngen("eval", "kv", str(MODEL), *options)
    assert (code, says in err) == (2, True), err
