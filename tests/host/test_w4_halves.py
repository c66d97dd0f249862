"""The arithmetic of common/w4_halves.cuh, restated lane by lane: nibbles as fp16 subnormals times tokens in fp16."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kerngen.templates.common.w4_pack import pack

LANES = np.arange(32)


def of_half(bits: np.ndarray) -> np.ndarray:
    return bits.astype(np.uint16).view(np.float16).astype(np.float64)


def pairs(words: np.ndarray) -> np.ndarray:
    """[..., 2]: the halves of words."""
    return of_half(np.stack([words & 0xFFFF, words >> 16], -1))


def product(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """m16n8k16 from the lanes' registers (mma.cuh): a [32, 4], b [32, 2], c [32, 4]."""
    g, t = LANES // 4, LANES % 4
    rows, columns, sums = np.zeros((16, 16)), np.zeros((16, 8)), np.zeros((32, 4))
    for i in range(4):
        for half in range(2):
            rows[g + i % 2 * 8, 2 * t + i // 2 * 8 + half] = pairs(a[:, i])[:, half]
            if i < 2:
                columns[2 * t + 8 * i + half, g] = pairs(b[:, i])[:, half]
    whole = rows @ columns
    for i in range(4):
        sums[:, i] = whole[g + i // 2 * 8, 2 * t + i % 2]
    return sums + c


def turned(words: np.ndarray) -> np.ndarray:
    """turn_words: two exchanges between lanes."""
    w = words.copy()
    for bit, low, high in ((1, (0, 2), (1, 3)), (2, (0, 1), (2, 3))):
        upper = LANES & bit > 0
        for i, j in zip(low, high, strict=True):
            got = np.where(upper, w[:, i], w[:, j])[LANES ^ bit]
            w[:, i], w[:, j] = np.where(upper, got, w[:, i]), np.where(upper, w[:, j], got)
    return w


def tokens_of(x: np.ndarray, bf16: bool) -> tuple[np.ndarray, np.ndarray]:
    """x [8, columns] as a warp keeps it: words [tile, lane, 4] in fp16, and what gives each token back."""
    exponents = np.maximum(np.abs(x).max(1).astype(np.float32).view(np.uint32) >> 23, 16)
    up = ((269 - exponents) << 23).astype(np.uint32).view(np.float32) if bf16 else np.ones(8, np.float32)
    down = ((exponents - 15) << 23).astype(np.uint32).view(np.float32) if bf16 else np.ones(8, np.float32)
    halves = (x.astype(np.float32) * up[:, None]).astype(np.float16)
    words = np.ascontiguousarray(halves).view(np.uint32).reshape(8, -1, 4, 4)  # [token, tile, lane % 4, word]
    return np.stack([turned(words[:, i].reshape(32, 4)) for i in range(words.shape[1])]), down


def multiplied(words: np.ndarray, scales: np.ndarray, x: np.ndarray, bf16: bool) -> np.ndarray:
    """[32 rows, 8 tokens] of a strip: words [tile, lane, 4], scales [group, 32]."""
    halves, down = tokens_of(x, bf16)
    g, t = LANES // 4, LANES % 4
    step = len(words) // len(scales)
    minus_8 = np.broadcast_to(np.array([0x80088008, 0x80808080] * 2, np.uint32), (32, 4))
    acc, out = np.zeros((32, 2, 4)), np.zeros((32, 8))
    for group, by_row in enumerate(scales):
        tiles = range(group * step, (group + 1) * step)
        begin = np.zeros((32, 4))
        for tile in tiles:
            for k in range(2):
                begin = product(minus_8, halves[tile][:, 2 * k : 2 * k + 2], begin)
        for h in range(2):
            d = begin
            for tile in tiles:
                for k in range(2):
                    word = words[tile][:, 2 * h + k]
                    upper = word >> 8
                    a = np.stack([word & 0x000F000F, word & 0x00F000F0, upper & 0x000F000F, upper & 0x00F000F0], -1)
                    d = product(a, halves[tile][:, 2 * k : 2 * k + 2], d)
            for j in range(4):
                acc[:, h, j] += d[:, j] * by_row[4 * g + 2 * h + j // 2]
    for r in range(4):
        for j in range(2):
            unit = 2.0**20 if r % 2 else 2.0**24
            out[4 * g + r, 2 * t + j] = acc[:, r // 2, r % 2 * 2 + j] * unit * down[2 * t + j]
    return out


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize(("dtype", "magnitude"), [("fp16", 1.0), ("fp16", 1e-5), ("bf16", 1e-30), ("bf16", 3e35)])
def test_a_strip_of_packed_weights(group: int, dtype: str, magnitude: float) -> None:
    draw = torch.Generator().manual_seed(group)
    type_ = torch.float16 if dtype == "fp16" else torch.bfloat16
    nibbles = torch.randint(0, 16, (32, 256), generator=draw)
    weight = (nibbles.view(32, 32, 8) << torch.arange(0, 32, 4)).sum(-1)
    weight = torch.where(weight >= 1 << 31, weight - (1 << 32), weight).to(torch.int32)
    scale = (torch.rand(32, 256 // group, generator=draw) + 0.5).to(type_)
    x = torch.randn(8, 256, generator=draw) * magnitude
    x[1, ::50] *= 300  # an outlier leaves the others exact
    x[5:] = 0
    x = x.to(type_)
    w_packed, scales = pack(weight, scale)
    words = w_packed[0].numpy().view(np.uint32)
    found = multiplied(words, scales[0].double().numpy(), x.double().numpy(), dtype == "bf16")
    dense = (nibbles.double() - 8) * scale.double().repeat_interleave(group, 1)
    expected = (dense @ x.double().T).numpy()
    assert np.abs(found - expected).max() <= 1e-9 * np.abs(expected).max()
    assert not found[:, 5:].any()


@pytest.mark.parametrize("exponent", [-126, -40, 0, 60, 127])
def test_bf16_keeps_all_bits_down_to_a_small_part_of_the_largest(exponent: int) -> None:
    mantissas = 1 + np.arange(128) / 128
    powers = 2.0 ** np.arange(exponent, max(exponent - 40, -127), -1)
    x = np.zeros((8, powers.size * 128))
    x[0] = (powers[:, None] * mantissas).ravel()
    halves, down = tokens_of(np.pad(x, ((0, 0), (0, -x.shape[1] % 32))), True)
    back = pairs(np.stack([turned(tile) for tile in halves]))[:, :4].reshape(-1)[: x.shape[1]] * down[0]
    assert np.abs(back - x[0]).max() <= 2.0**-40 * x.max()
    if exponent > -80:
        kept = x[0] >= 2.0**-32 * x.max()
        assert np.array_equal(back[kept], x[0][kept])
