"""What a row of a cache holds in each format (values.KVFormat), once, in torch.

int8, of each 64 values x of a head: scale = fp16(max |x| / 127), code = x * (1 / scale) in fp32, to the nearest
integer, ties to even, within -127 .. 127; all codes are 0 where the scale is. The divisions are fp32's. What is stored
of a code is code + 128, as an unsigned byte: so it goes into the mantissa of a float as it is. What is read is code *
scale, rounded to the activations' dtype; attn_decode's body=mma multiplies codes and scales apart, and rounds neither.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kerngen.templates.values import KV_FORMATS, ROTATED, KVFormat, KVView

RAISED = -128  # of a code, xor: the sign bit of its byte
CODE_FLIP = 6 / 127  # by which a value of 6 and less differs where its code is the next one


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
    """Rows [P, NKV, S, d] int8 and their scales [P, NKV, S, d / group] fp16: views of a pool that is contiguous."""
    return _rows(pool, form, keys), scales_of(pool, form, keys)


def quantized(x: Tensor, form: KVFormat) -> tuple[Tensor, Tensor]:
    """Codes [..., head_dim], as they are stored, int8, and scales [..., head_dim / group] fp16 of x [..., head_dim]."""
    groups = x.float().unflatten(-1, (-1, form.group))
    scales = (groups.abs().amax(-1) / 127).half()
    inverse = torch.where(scales > 0, 1 / scales.float(), 0)
    codes = (groups * inverse[..., None]).round().clamp(-127, 127)
    return codes.flatten(-2).to(torch.int8) ^ RAISED, scales


def values_of(codes: Tensor, scales: Tensor, form: KVFormat, dtype: torch.dtype) -> Tensor:
    """What stored codes [..., head_dim] and scales [..., head_dim / group] stand for: fp32, in values of `dtype`."""
    return (
        ((codes ^ RAISED).float().unflatten(-1, (-1, form.group)) * scales.float()[..., None])
        .flatten(-2)
        .to(dtype)
        .float()
    )


def turned_dims(x: Tensor) -> Tensor:
    """Of heads x [..., 512] the dims that RoPE turns, [..., ROTATED]."""
    part, half = ROTATED // 2, x.shape[-1] // 2
    return torch.cat((x[..., :part], x[..., half : half + part]), -1)


def encoded(values: Tensor, kv_format: str) -> Tensor:
    """A pool, not shared, that holds values [P, NKV, S, head_dim]: those themselves where the format is plain. A NaN
    makes that of its scale.
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
    made, its_scales = quantized(values.nan_to_num(1.0), form)
    codes.copy_(made)
    scales.copy_(its_scales.where(~values.unflatten(-1, (-1, form.group)).isnan().any(-1), torch.nan))


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
    codes[pages, :, rows], scales[pages, :, rows] = quantized(new, form)


def randomize(kv: KVView) -> None:
    """Fills a cache with random keys and values of about unit size: what a benchmark reads."""
    for pool, keys in ((kv.k_cache, True), (kv.v_cache, False)):
        if not kv.format.group:
            pool.normal_()
            continue
        codes, scales = codes_and_scales(pool, kv.format, keys)
        codes.random_(-127, 128)
        scales.fill_(1 / 64)


def all_values(pool: Tensor, kv_format: str, dtype: torch.dtype) -> Tensor:
    """All that a pool holds, as values [P, NKV, S, n] fp32: n = head_dim, and ROTATED more where it is shared."""
    form = KV_FORMATS[kv_format]
    if not form.group:
        return pool.float()
    parts = [
        values_of(*codes_and_scales(pool, form, keys), form, dtype) for keys in (False, True)[: 1 + form.is_shared]
    ]
    return torch.cat(parts, -1)
