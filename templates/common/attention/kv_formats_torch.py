"""What a row of a cache holds in each format (values.KVFormat), once, in torch.

int8, of each 64 values x of a head: scale = fp16(max |x| / 127), code = x * (1 / scale) in fp32, to the nearest
integer, ties to even, within -127 .. 127; all codes are 0 where the scale is. The divisions are fp32's. What is stored
of a code is code + 128, as an unsigned byte: so it goes into the mantissa of a float as it is. What is read is code *
scale, rounded to the activations' dtype; attn_decode's body=mma multiplies codes and scales apart, and rounds neither.

int4, of each 64 values of a head: they are rotated first (`rotated`), which spreads what is large. Of the rotated ones
the first four of each eight share a scale, and the last four: scale = fp16(max |y| / 8), code = floor(y * (1 / scale))
in fp32, within -8 .. 7; codes are 0 where the scale is. So 16 steps are even on both sides of zero (a mid-rise
quantizer). What is stored of a code is code + 8; eight are a word of 32 bits, from its lowest four on 0, 2, 4, 6, 1,
3, 5, 7. What is read is (code + 1/2) * scale, rotated back, and then rounded; attn_decode rotates q and its output in
place of that.

int3: likewise, of values that are multiplied before the rotation by the signs of the 8 x 8 Hadamard matrix, its rows
one behind the other (`SIGNS`), so that a block of equal values, which the rotation alone makes one large value of, is
spread too; after the rotation back they are multiplied again. scale = fp16(max |y| / 4), code = floor(y * (1 / scale))
within -4 .. 3. What is stored of a code is code + 4. The 64 of a block are 24 bytes, words of 32 bits: eight codes are
in the order of int4's nibbles; four words of their lower two bits have 16 each, eight in the lower two bits of nibbles
and eight in the others; two words of the upper bits have 32 each, the first eight in the lowest bits of nibbles.

fp8: codes are e4m3 (torch.float8_e4m3fn), of values over a scale that a head of K or V has in all rows: code = x /
scale in fp32, to the nearest, ties to even, within -448 .. 448; of a NaN that of a NaN, of a scale of 0 zeros. The
scale is fp16(256 * what the checkpoint says) / 256; pools hold it 256 times as large, for each 64 values. What is read
is code * scale, rounded to the activations' dtype.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kerngen.templates.values import KV_FORMATS, ROTATED, KVFormat, KVView

RAISED = -128  # of a code, xor: the sign bit of its byte
FP8_SCALE = 256.0  # times a scale of fp8: how a pool holds it
FP8_MAX = 448.0


def _rows(pool: Tensor, form: KVFormat, keys: bool) -> Tensor:
    """[P, NKV, S, n], n entries of d values: of a pool that is contiguous, its rows of V, or where `keys` those of K; a
    view. Of a shared pool the turned dims alone are K's.
    """
    pages, heads, size, entries = pool.shape
    width = form.entries(form.head_dim(entries))
    first, width = (size * width, form.entries(ROTATED)) if form.is_shared and keys else (0, width)
    return pool.view(pages, heads, size * entries)[..., first : first + size * width].unflatten(2, (size, width))


def scales_of(pool: Tensor, form: KVFormat, keys: bool = False) -> Tensor:
    """[P, NKV, S, d / group] fp16 of those rows, a view."""
    pages, heads, size, entries = pool.shape
    dim = form.head_dim(entries)
    first = size * form.entries(dim + ROTATED * form.is_shared)
    width = 2 * dim // form.group
    if form.is_shared and keys:
        first, width = first + size * width, 2 * ROTATED // form.group
    part = pool.view(pages, heads, size * entries)[..., first : first + size * width]
    return part.view(torch.float16).unflatten(2, (size, width // 2))


def codes_and_scales(pool: Tensor, form: KVFormat, keys: bool = False) -> tuple[Tensor, Tensor]:
    """Rows [P, NKV, S, n] int8, n entries of d values, and their scales [P, NKV, S, d / group] fp16: views of a pool
    that is contiguous.
    """
    return _rows(pool, form, keys), scales_of(pool, form, keys)


def put_scales(kv: KVView, k_scales: Sequence[float], v_scales: Sequence[float]) -> None:
    """Puts a layer's static scales, of each KV head or one of all, into all rows of its pools, which are of fp8."""
    for pool, scales in ((kv.k_cache, k_scales), (kv.v_cache, v_scales)):
        of_head = (torch.tensor(scales, dtype=torch.float64) * FP8_SCALE).half().to(pool.device)
        scales_of(pool, kv.format).copy_(of_head[:, None, None])


def wipe_page(kv: KVView, page: int) -> None:
    """Zeros to a page of a layer's pools. Static scales stay."""
    for pool in (kv.k_cache, kv.v_cache):
        own = _rows(pool, kv.format, keys=False) if kv.format.is_static else pool
        own[page] = 0


def fp8_codes(x: Tensor, scales: Tensor) -> Tensor:
    """int8 [..., head_dim] of x [..., head_dim], by scales as pools hold them, [..., head_dim / group] fp16."""
    groups, its = x.float().unflatten(-1, (scales.shape[-1], -1)), scales.float()[..., None] / FP8_SCALE
    codes = torch.where(its > 0, groups / its, groups * 0).clamp(-FP8_MAX, FP8_MAX)
    return codes.flatten(-2).to(torch.float8_e4m3fn).view(torch.int8)


def quantized(x: Tensor, form: KVFormat) -> tuple[Tensor, Tensor]:
    """Codes of x [..., head_dim], as they are stored, int8 [..., entries], and scales [..., head_dim / group] fp16, of
    a format that makes its scales.
    """
    if form.is_static:
        raise TypeError(f"scales of {form.name} are not made of values: fp8_codes takes them")
    if form.is_rotated:
        return _quantized_rotated(x, form)
    groups = x.float().unflatten(-1, (-1, form.group))
    scales = (groups.abs().amax(-1) / 127).half()
    codes = (groups * _inverse(scales)).round().clamp(-127, 127)
    return codes.flatten(-2).to(torch.int8) ^ RAISED, scales


def values_of(codes: Tensor, scales: Tensor, form: KVFormat, dtype: torch.dtype) -> Tensor:
    """What stored codes [..., entries] and scales [..., head_dim / group] stand for, [..., head_dim]: fp32, in values
    of `dtype`.
    """
    if form.is_rotated:
        return _values_rotated_back(codes, scales, form).to(dtype).float()
    numbers = codes.view(torch.float8_e4m3fn).float() / FP8_SCALE if form.is_static else (codes ^ RAISED).float()
    groups = numbers.unflatten(-1, (-1, form.group))
    return (groups * scales.float()[..., None]).flatten(-2).to(dtype).float()


CODE_FLIP = 6 / 127  # by which a value of 6 and less differs where its code of int8 is the next one


def code_flip(form: KVFormat) -> float:
    """By which a value of 6 and less differs, at the most, where a code is the next one. Of rotated ones two codes of a
    block, each of which is an eighth of 64 values.
    """
    if not form.group:
        return 0.0
    if form.is_static:
        return 6 / 8  # of three bits of mantissa
    return CODE_FLIP if not form.is_rotated else 2 * 6 / 2 ** (form.bits - 1) / 8


def _inverse(scales: Tensor) -> Tensor:
    """1 / scale in fp32, 0 of 0: [..., 1]."""
    return torch.where(scales > 0, 1 / scales.float(), 0)[..., None]


def rotated(x: Tensor) -> Tensor:
    """Each 64 values of x [..., n] times the Hadamard matrix over 8, in fp32: what it is applied to twice stays.

    Sums are those of a butterfly, of values that are 1, 2, 4, ... 32 apart: device code makes the same bits.
    """
    x = x.float()
    for step in (1, 2, 4, 8, 16, 32):
        pairs = x.unflatten(-1, (-1, 2, step))
        x = torch.stack((pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]), -2).flatten(-3)
    return x / 8


SIGNS = torch.tensor([(-1.0) ** (i & i >> 3 & 7).bit_count() for i in range(64)])


def _signed(x: Tensor, form: KVFormat) -> Tensor:
    """x [..., n] times the signs of a format of three bits."""
    return x if form.bits != 3 else (x.unflatten(-1, (-1, 64)) * SIGNS.to(x.device)).flatten(-2)


def _quantized_rotated(x: Tensor, form: KVFormat) -> tuple[Tensor, Tensor]:
    most = 2 ** (form.bits - 1)
    blocks = rotated(_signed(x, form)).unflatten(-1, (-1, 8, 2, 4))  # [..., blocks, eights, halves of eights, 4]
    scales = (blocks.abs().amax((-3, -1)) / most).half()  # [..., blocks, halves]
    codes = (blocks * _inverse(scales)[..., None, :, :]).floor().clamp(-most, most - 1) + most
    eights = codes.flatten(-2).to(torch.uint8)  # [..., blocks, eights, 8]
    packed = eights[..., [0, 4, 1, 5]] | eights[..., [2, 6, 3, 7]] << 4
    return (packed if form.bits == 4 else _in_planes(packed)).flatten(-3).view(torch.int8), scales.flatten(-2)


def _values_rotated_back(codes: Tensor, scales: Tensor, form: KVFormat) -> Tensor:
    words = codes.view(torch.uint8).unflatten(-1, (-1, 2 * form.bits, 4))  # [..., blocks, words, bytes]
    words = words if form.bits == 4 else _of_planes(words)
    eights = torch.stack((words & 15, words >> 4), -1).flatten(-2)[..., [0, 4, 1, 5, 2, 6, 3, 7]]
    middle = 2 ** (form.bits - 1) - 0.5
    blocks = (eights.float() - middle).unflatten(-1, (2, 4))  # [..., blocks, eights, halves of eights, 4]
    return _signed(rotated((blocks * scales.float().unflatten(-1, (-1, 1, 2, 1))).flatten(-4)), form)


def _in_planes(eights: Tensor) -> Tensor:
    """Codes of three bits in nibbles, [..., 8, 4] uint8, in the six words of a block, [..., 6, 4]."""
    lower, upper = eights & 0x33, eights >> 2 & 0x11
    twos, fours = lower.unflatten(-2, (4, 2)), upper.unflatten(-2, (2, 4))
    of_two = twos[..., 0, :] | twos[..., 1, :] << 2
    of_four = fours[..., 0, :] | fours[..., 1, :] << 1 | fours[..., 2, :] << 2 | fours[..., 3, :] << 3
    return torch.cat((of_two, of_four), -2)


def _of_planes(words: Tensor) -> Tensor:
    of_two, of_four = words[..., :4, :], words[..., 4:, :]
    lower = torch.stack((of_two & 0x33, of_two >> 2 & 0x33), -2).flatten(-3, -2)
    upper = torch.stack([of_four >> i & 0x11 for i in range(4)], -2).flatten(-3, -2)
    return lower | upper << 2


def turned_dims(x: Tensor) -> Tensor:
    """Of heads x [..., 512] the dims that RoPE turns, [..., ROTATED]."""
    part, half = ROTATED // 2, x.shape[-1] // 2
    return torch.cat((x[..., :part], x[..., half : half + part]), -1)


def encoded(values: Tensor, kv_format: str) -> Tensor:
    """A pool, not shared, that holds values [P, NKV, S, head_dim]: those themselves where the format is plain. A NaN
    makes that of its scale; of fp8 it stays, and a head's scale is that of its largest value.
    """
    form = KV_FORMATS[kv_format]
    if not form.group:
        return values
    pool = torch.empty(*values.shape[:3], form.row_entries(values.shape[3]), dtype=form.dtype, device=values.device)
    _encode(pool, form, values, keys=False)
    return pool


def in_format(k: Tensor, v: Tensor, kv_format: str) -> tuple[Tensor, Tensor]:
    """The pools that hold k and v [P, NKV, S, head_dim], likewise; twice the same where they share one."""
    form = KV_FORMATS[kv_format]
    if not form.is_shared:
        return encoded(k, kv_format), encoded(v, kv_format)
    entries, dtype = form.row_entries(v.shape[3]), form.dtype or v.dtype
    pool = torch.empty(*v.shape[:3], entries, dtype=dtype, device=v.device)
    _encode(pool, form, v, keys=False)
    _encode(pool, form, turned_dims(k), keys=True)
    return pool, pool


def _encode(pool: Tensor, form: KVFormat, values: Tensor, keys: bool) -> None:
    if not form.group:
        _rows(pool, form, keys).copy_(values)
        return
    codes, scales = codes_and_scales(pool, form, keys)
    if form.is_static:
        largest = values.float().nan_to_num(0.0).abs().amax((0, 2, 3)).clamp(min=4.0)  # of each head
        scales.copy_((largest * (FP8_SCALE / FP8_MAX)).half()[:, None, None])
        codes.copy_(fp8_codes(values, scales))
        return
    made, its_scales = quantized(values.nan_to_num(1.0), form)
    codes.copy_(made)
    unknown = values.unflatten(-1, (-1, 64)).isnan().any(-1).repeat_interleave(64 // form.group, -1)
    scales.copy_(its_scales.where(~unknown, torch.nan))


def read_rows(
    pool: Tensor, kv_format: str, dtype: torch.dtype, pages: Tensor, rows: Tensor, heads: slice | int = slice(None),
    *, keys: bool,
) -> Tensor:  # fmt: skip
    """Rows `rows` [n] of pages [n] of some heads of a pool, [n, heads, head_dim], or of one head, [n, head_dim]: in its
    own dtype if that is how they are multiplied, else fp32 in values of `dtype`, the activations'.

    keys: of K, not V. Of a shared pool the dims of K that are not turned are V's: their weight is in q.
    """
    form = KV_FORMATS[kv_format]
    if not form.group and not form.is_shared:
        return pool[pages, heads, rows]

    def part(keys: bool) -> Tensor:
        if not form.group:
            return _rows(pool, form, keys)[pages, heads, rows]
        codes, scales = codes_and_scales(pool, form, keys)
        return values_of(codes[pages, heads, rows], scales[pages, heads, rows], form, dtype)

    if not form.is_shared:
        return part(keys)
    found = part(keys=False)
    if keys:
        width, half = ROTATED // 2, found.shape[-1] // 2
        found, turned = found.clone(), part(keys=True)
        found[..., :width], found[..., half : half + width] = turned[..., :width], turned[..., width:]
    return found


def write_rows(pool: Tensor, kv_format: str, pages: Tensor, rows: Tensor, new: Tensor, *, keys: bool) -> None:
    """Puts new [n, heads, head_dim] of V, or where `keys` of K, in rows [n] of pages [n] of a pool."""
    form = KV_FORMATS[kv_format]
    if form.is_shared and keys:
        new = turned_dims(new)
    if not form.group:
        rows_of = pool if not form.is_shared else _rows(pool, form, keys)
        rows_of[pages, :, rows] = new.to(pool.dtype)
        return
    codes, scales = codes_and_scales(pool, form, keys)
    if form.is_static:
        codes[pages, :, rows] = fp8_codes(new, scales[pages, :, rows])
        return
    codes[pages, :, rows], scales[pages, :, rows] = quantized(new, form)


def randomize(kv: KVView) -> None:
    """Fills a cache with random keys and values of about unit size: what a benchmark reads."""
    for pool, keys in ((kv.k_cache, True), (kv.v_cache, False)):
        if not kv.format.group:
            pool.normal_()
            continue
        codes, scales = codes_and_scales(pool, kv.format, keys)
        codes.random_(-127, 128)
        if kv.format.is_static:
            codes[codes & 127 == 127] = 0  # NaN
            scales.fill_(1.0)  # values up to 448 / 256
            continue
        scales.fill_(2.0 ** (2 - kv.format.bits))


def all_values(pool: Tensor, kv_format: str, dtype: torch.dtype) -> Tensor:
    """All that a pool holds, as values [P, NKV, S, n] fp32: n = head_dim, and ROTATED more where it is shared."""
    form = KV_FORMATS[kv_format]
    if not form.group:
        return pool.float()
    parts = [
        values_of(*codes_and_scales(pool, form, keys), form, dtype) for keys in (False, True)[: 1 + form.is_shared]
    ]
    return torch.cat(parts, -1)
