"""ggml's blocks: decoders in torch against the formats read one element at a time, and against the package gguf."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest
import torch
from gguf_files import NUMBERS, SCALES, TYPES
from torch import Tensor

from kerngen.errors import CheckpointError
from kerngen.runtime.gguf import blocks
from kerngen.runtime.gguf.blocks import decode, q4_0_words, take_apart
from kerngen.runtime.gguf.ggml_types import GGML_TYPES, READ
from kerngen.templates.common.w4.pack import dequantize, pack_nibbles

QUANTISED = tuple(kind for kind in READ if kind not in blocks.FLOAT_TYPES)
ROWS, BLOCKS = 6, 5


def random_blocks(kind: str, rows: int = ROWS, count: int = BLOCKS) -> Tensor:
    """uint8 [rows, count, bytes]: any bytes, but for the fp16, which are finite."""
    rng = torch.Generator().manual_seed(NUMBERS[kind])
    raw = torch.randint(0, 256, (rows, count, TYPES[kind].block_bytes), dtype=torch.uint8, generator=rng)
    for at, _ in SCALES.get(kind, ((0, 1),)):
        scale = torch.randn(rows, count, 1, generator=rng).half()
        raw[..., at : at + 2] = scale.view(torch.uint8)
    if kind == "MXFP4":
        raw[..., 0] = raw[..., 0].clamp(max=250)  # 12 * 2^127 is more than fp32 holds
    return raw


def half(raw: bytes, at: int) -> float:
    return float(struct.unpack_from("<e", raw, at)[0])


def nibble(raw: bytes, at: int, j: int, size: int = 32) -> int:
    """Element j of a run of `size` whose low halves come first."""
    return raw[at + j] & 15 if j < size // 2 else raw[at + j - size // 2] >> 4


def bit(raw: bytes, at: int, j: int) -> int:
    return raw[at + j // 8] >> j % 8 & 1


def k_scales(raw: bytes, j: int) -> tuple[int, int]:
    s = raw[4:16]
    if j < 4:
        return s[j] & 63, s[j + 4] & 63
    return s[j + 4] & 15 | s[j - 4] >> 6 << 4, s[j + 4] >> 4 | s[j] >> 6 << 4


def k_value(raw: bytes, e: int, code: int) -> float:
    scale, minimum = k_scales(raw, e // 32)
    return half(raw, 0) * scale * code - half(raw, 2) * minimum


def q4_k(raw: bytes, e: int) -> float:
    byte = raw[16 + e // 64 * 32 + e % 32]
    return k_value(raw, e, byte >> 4 if e // 32 % 2 else byte & 15)


def q5_k(raw: bytes, e: int) -> float:
    byte = raw[48 + e // 64 * 32 + e % 32]
    return k_value(raw, e, (byte >> 4 if e // 32 % 2 else byte & 15) + 16 * (raw[16 + e % 32] >> e // 32 & 1))


def q6_k(raw: bytes, e: int) -> float:
    h, quarter, at = e // 128, e % 128 // 32, e % 32
    low = raw[64 * h + at + 32 * (quarter % 2)]
    code = (low >> 4 if quarter > 1 else low & 15) | (raw[128 + 32 * h + at] >> 2 * quarter & 3) << 4
    (scale,) = struct.unpack_from("b", raw, 192 + e // 16)
    return half(raw, 208) * scale * (code - 32)


def iq4_xs(raw: bytes, e: int) -> float:
    group = e // 32
    low = raw[4 + group // 2] >> 4 * (group % 2) & 15
    high = struct.unpack_from("<H", raw, 2)[0] >> 2 * group & 3
    return half(raw, 0) * ((low | high << 4) - 32) * blocks.IQ4_TABLE[nibble(raw, 8 + 16 * group, e % 32)]


REFERENCE: dict[str, Callable[[bytes, int], float]] = {
    "Q4_0": lambda b, j: half(b, 0) * (nibble(b, 2, j) - 8),
    "Q4_1": lambda b, j: half(b, 0) * nibble(b, 4, j) + half(b, 2),
    "Q5_0": lambda b, j: half(b, 0) * (nibble(b, 6, j) + 16 * bit(b, 2, j) - 16),
    "Q5_1": lambda b, j: half(b, 0) * (nibble(b, 8, j) + 16 * bit(b, 4, j)) + half(b, 2),
    "Q8_0": lambda b, j: half(b, 0) * struct.unpack_from("b", b, 2 + j)[0],
    "Q4_K": q4_k, "Q5_K": q5_k, "Q6_K": q6_k,
    "IQ4_NL": lambda b, j: half(b, 0) * blocks.IQ4_TABLE[nibble(b, 2, j)],
    "IQ4_XS": iq4_xs,
    "MXFP4": lambda b, j: 2.0 ** (b[0] - 128) * blocks.FP4_TABLE[nibble(b, 1, j)],
}  # fmt: skip


@pytest.mark.parametrize("kind", QUANTISED)
def test_a_block_is_what_the_format_says(kind: str) -> None:
    """In fp64, so to fp32's rounding of a product and of a sum."""
    raw = random_blocks(kind)
    got = decode(kind, raw).view(ROWS, BLOCKS, -1)
    for row in range(ROWS):
        for index in range(BLOCKS):
            block = raw[row, index].numpy().tobytes()
            want = torch.tensor([REFERENCE[kind](block, j) for j in range(TYPES[kind].block)], dtype=torch.float64)
            size = want.abs().max()
            torch.testing.assert_close(got[row, index].double(), want, rtol=1.2e-7, atol=float(size) * 1.2e-7)


@pytest.mark.parametrize("kind", READ)
def test_decoders_equal_those_of_the_package_gguf(kind: str) -> None:
    gguf = pytest.importorskip("gguf", reason="needs the package gguf: pip install -e '.[dev]'")
    raw = random_blocks(kind, rows=64, count=33)
    want = gguf.quants.dequantize(raw.flatten(-2).numpy(), gguf.GGMLQuantizationType(NUMBERS[kind]))
    got = decode(kind, raw)
    torch.testing.assert_close(got, torch.from_numpy(want.copy()), rtol=0, atol=0, equal_nan=True)


def test_sizes_are_those_of_the_package_gguf() -> None:
    gguf = pytest.importorskip("gguf", reason="needs the package gguf: pip install -e '.[dev]'")
    theirs = {int(kind): (kind.name, *sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    assert {n: (t.name, t.block, t.block_bytes) for n, t in GGML_TYPES.items()} == theirs


@pytest.mark.parametrize("kind", QUANTISED)
def test_what_a_kernel_takes_is_what_a_decoder_gives(kind: str) -> None:
    """codes * scale + minimum in fp32, with as few groups as the type has."""
    raw = random_blocks(kind)
    made = take_apart(kind, raw)
    columns = BLOCKS * TYPES[kind].block
    assert made.codes.dtype == torch.int8
    assert made.codes.shape == (ROWS, columns)
    assert made.group_size == (16 if kind == "Q6_K" else 32)
    assert made.scales.shape == (ROWS, columns // made.group_size)
    assert (made.minima is not None) == (kind in ("Q4_1", "Q5_1", "Q4_K", "Q5_K"))
    by_hand = made.codes.float() * made.scales.repeat_interleave(made.group_size, -1)
    if made.minima is not None:
        by_hand += made.minima.repeat_interleave(made.group_size, -1)
    assert torch.equal(by_hand, decode(kind, raw))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q4_K"])
def test_codes_of_four_bits_fit_them(kind: str) -> None:
    codes = take_apart(kind, random_blocks(kind)).codes
    assert [int(v) for v in codes.aminmax()] == ([-8, 7] if kind == "Q4_0" else [0, 15])


@pytest.mark.parametrize("leading", [(), (3,), (2, 3)])
def test_q4_0_is_compressed_tensors_int4_in_another_order(leading: tuple[int, ...]) -> None:
    raw = random_blocks("Q4_0", rows=max(1, torch.Size(leading).numel())).view(*leading, BLOCKS, 18)
    words, scales = q4_0_words(raw), raw.view(torch.float16)[..., 0]
    assert words.dtype == torch.int32
    assert words.shape == (*leading, BLOCKS * 4)
    assert (scales < 0).any(), "scales have either sign"
    codes = (take_apart("Q4_0", raw).codes + 8).to(torch.uint8)
    assert torch.equal(words, pack_nibbles(codes))
    alone = raw.view(-1, 18)[3:4]
    assert torch.equal(q4_0_words(alone), words.view(-1, 4)[3]), "one block, which lies at no multiple of 8"
    flat = words.view(-1, words.shape[-1]), scales.view(-1, scales.shape[-1])
    assert torch.equal(dequantize(*flat, torch.float32).view(*leading, -1), decode("Q4_0", raw))


def test_the_smallest_scales_of_mxfp4_are_no_normal_numbers() -> None:
    raw = torch.zeros(1, 256, 17, dtype=torch.uint8)
    raw[0, :, 0] = torch.arange(256)
    raw[0, :, 1] = 0x01  # a code of 1, and a half of it
    want = torch.arange(256, dtype=torch.float64).sub(128).exp2().float()
    assert torch.equal(decode("MXFP4", raw).view(256, 32)[:, 0], want)


def test_every_type_that_is_read_has_a_decoder() -> None:
    assert set(READ) == {*blocks.FLOAT_TYPES, *blocks._TYPES}
    with pytest.raises(CheckpointError, match="the type Q2_K is not read; F32, F16") as error:
        decode("Q2_K", torch.zeros(1, 1, 84, dtype=torch.uint8))
    assert error.value.hint is not None
