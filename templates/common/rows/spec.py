"""Shared parts of the row kernels' specs: element sizes, vectors of eight, and the checks that read alike."""

from __future__ import annotations

from math import ceil

from kerngen.arch import Arch
from kerngen.errors import ProblemError

VEC = 8  # elements that a thread moves at once: 16 bytes of a 16-bit type
ELEMENT_BYTES = {"fp16": 2, "bf16": 2, "fp32": 4}
DTYPES = tuple(ELEMENT_BYTES)
ACTIVATIONS = ("gelu_tanh", "silu")  # of gated MLPs: activation(gate) * up
# What rows of the residual stream are multiplied by where they are put down for a drafter, a power of two: with fp16
# the stream is fp32, and may leave fp16's range.
TAP_SCALE = {"bf16": 1.0, "fp16": 2.0**-8, "fp32": 1.0}
# Formats of a cache, with the values that share a scale, and the bits of a value's code (values.py, KVFormat).
KV_GROUPS = {
    "plain": 0, "int8": 64, "shared": 0, "shared_int8": 64, "int4": 32, "shared_int4": 32, "int3": 32,
    "shared_int3": 32, "fp8": 64,
}  # fmt: skip
KV_BITS = {
    "plain": 0, "int8": 8, "shared": 0, "shared_int8": 8, "int4": 4, "shared_int4": 4, "int3": 3, "shared_int3": 3,
    "fp8": 8,
}  # fmt: skip
MAX_BLOCK_THREADS = 1024
INT32_MAX = 2**31 - 1
SPARE_REGISTERS = 36  # what the row kernels need beside their data, by the ptxas reports


def keys_that_matter(kv_len: int, num_queries: int, window: int) -> int:
    """`kv_len`, or the power of two from which on a longer context changes nothing for queries with a window."""
    seen = window + num_queries - 1
    return min(kv_len, 1 << (seen - 1).bit_length()) if window else kv_len


def require(holds: bool, message: str) -> None:
    """Raises ProblemError(message) unless `holds`."""
    if not holds:
        raise ProblemError(message)


def require_dtypes(dtype: str, **others: str) -> None:
    """Raises ProblemError unless `dtype` is fp16, bf16 or fp32 and the others are that type or fp32."""
    require(dtype in DTYPES, f"dtype={dtype!r} is not one of: {', '.join(DTYPES)}")
    for name, value in others.items():
        require(value in (dtype, "fp32"), f"{name}={value!r} is not one of: {dtype} (the dtype), fp32")


def require_vectors(**sizes: int) -> None:
    """Raises ProblemError unless each size is a positive multiple of 8, which 16-byte accesses need."""
    for name, size in sizes.items():
        require(size > 0 and size % VEC == 0, f"{name}={size} is not a positive multiple of {VEC}")


def require_heads(num_q_heads: int, num_kv_heads: int) -> None:
    """Raises ProblemError unless every kv head has as many q heads, one at least."""
    shared = num_kv_heads > 0 and num_q_heads > 0 and num_q_heads % num_kv_heads == 0
    require(shared, f"num_q_heads={num_q_heads} is no multiple of num_kv_heads={num_kv_heads}")


def require_page_heads(page_heads: int, num_kv_heads: int) -> None:
    """Raises ProblemError unless a page has room for the heads of a cache, or is said to be just that (0)."""
    fits = page_heads == 0 or page_heads >= num_kv_heads
    require(
        fits, f"page_heads={page_heads}: a page has at least the num_kv_heads={num_kv_heads} of a cache, or 0 for those"
    )


def is_shared(kv_format: str) -> bool:
    """Whether K and V have one pool in such a cache."""
    return kv_format.startswith("shared")


def apart_format(kv_format: str) -> str:
    """What such a cache is called where K and V have a pool each, as in sliding layers beside such full ones."""
    return kv_format.removeprefix("shared").removeprefix("_") or "plain"


def sliding_format(kv_format: str) -> str:
    """Of sliding layers' caches beside such ones of full layers. None is shared; beside rotated ones they are int8: few
    keys, each of which weighs more.
    """
    return "int8" if is_rotated(kv_format) else apart_format(kv_format)


def has_codes(kv_format: str) -> bool:
    """Whether such a cache holds codes and scales, which are converted as they are read."""
    return KV_GROUPS[kv_format] > 0


def is_rotated(kv_format: str) -> bool:
    """Whether such a cache holds rotated values: queries are rotated too then, and outputs back."""
    return KV_BITS.get(kv_format) in (3, 4)


def is_static(kv_format: str) -> bool:
    """Whether such a cache holds codes in e4m3, by scales that are its heads' own."""
    return kv_format == "fp8"


def require_kv_format(kv_format: str, head_dim: int, page_size: int, page_heads: int) -> None:
    """Raises ProblemError for a format of the cache that is none, or that cannot hold such heads."""
    if kv_format == "plain":
        return
    if kv_format not in KV_GROUPS:
        raise ProblemError(f"kv_format={kv_format!r} is not one of: {', '.join(KV_GROUPS)}")
    whole = not has_codes(kv_format) or head_dim % 128 == 0  # blocks of 64 in each half of a head, which RoPE pairs
    require(whole, f"kv_format={kv_format}: head_dim={head_dim} is no multiple of 128")
    require(page_size % 16 == 0, f"kv_format={kv_format}: page_size={page_size} is no multiple of 16")
    require(not page_heads, f"page_heads={page_heads}: a cache in {kv_format} is contiguous; 0")
    known = not is_shared(kv_format) or head_dim == 512
    require(known, f"kv_format={kv_format}: head_dim={head_dim}; heads of 512 are shared, of which 128 dims turn")


def require_shared(kv_format: str, k_eq_v: bool, num_rotated_pairs: int) -> None:
    """Raises ProblemError where heads are made for a shared cache whose K is not V but for 64 pairs."""
    if is_shared(kv_format):
        require(k_eq_v, f"kv_format={kv_format} is for heads whose K is V")
        turn = f"kv_format={kv_format} is for heads of which 64 pairs turn"
        require(num_rotated_pairs == 64, f"{turn}, not {num_rotated_pairs}")


def kv_row_bytes(kv_format: str, head_dim: int, dtype: str) -> int:
    """Half of what K and V of a head of a token take in a cache, scales included."""
    group, values = KV_GROUPS[kv_format], head_dim
    if is_shared(kv_format):
        values = (head_dim + 128) // 2
    return values * KV_BITS[kv_format] // 8 + 2 * values // group if group else values * ELEMENT_BYTES[dtype]


def require_tokens(num_tokens: int) -> None:
    require(0 < num_tokens <= INT32_MAX, f"num_tokens={num_tokens} is not in 1..{INT32_MAX}")


def require_activation(activation: str) -> None:
    require(activation in ACTIVATIONS, f"activation={activation!r} is not one of: {', '.join(ACTIVATIONS)}")


def why_no_dtype(arch: Arch, dtype: str) -> str | None:
    """Why activations of `dtype` cannot run on `arch`, with what can. fp32 is the reference's alone."""
    if dtype == "fp32":
        return f"no body computes in fp32; use dtype={arch.dtype}, or the reference"
    if dtype == "bf16" and not arch.has_bf16:
        return f"bf16 needs sm80 or newer and {arch} has none; use fp16, and fp32 for a residual stream"
    return None


def why_block_too_large(threads: int, made_of: str) -> str | None:
    """Why a block of `threads` cannot be launched. made_of: how the number came about."""
    if threads > MAX_BLOCK_THREADS:
        return f"{threads} threads a block ({made_of}); at most {MAX_BLOCK_THREADS}"
    return None


def row_threads(elements: int, vecs_per_thread: int) -> int:
    """Threads that share a row of `elements`, a multiple of 32.

    The templates' ROW_THREADS; the contract suite holds every launch's block to its kernel's __launch_bounds__.
    """
    return ceil(ceil(elements / VEC) / vecs_per_thread / 32) * 32


def row_scratch_bytes(threads: int, rows: int) -> int:
    """Shared memory of one sum over each of `rows` rows: a float a warp, in whole 16 bytes; none for a single warp."""
    return rows * ceil(threads / 128) * 16 if threads > 32 else 0


def fewest_vecs(elements: int, candidates: tuple[int, ...], max_threads: int) -> int:
    """The fewest vectors a thread with which a row takes at most `max_threads` threads, or the most there are."""
    return next((v for v in candidates if row_threads(elements, v) <= max_threads), candidates[-1])


def why_row_invalid(elements: int, vecs_per_thread: int, rows: int, registers_per_vec: int,
                    candidates: tuple[int, ...], arch: Arch) -> str | None:  # fmt: skip
    """Why a block of `rows` rows of `elements`, with vecs_per_thread vectors a thread, cannot or should not run.

    registers_per_vec: 32-bit registers that hold one vector of every tensor of the row. candidates: the values of
    vecs_per_thread that are searched; one that gives no fewer threads than a smaller one is refused as its twin.
    """
    row = row_threads(elements, vecs_per_thread)
    twin = next((v for v in candidates if v < vecs_per_thread and row_threads(elements, v) == row), None)
    if twin is not None:
        return f"vecs_per_thread={vecs_per_thread} takes {row} threads a row of {elements}, as {twin} does"
    made_of = f"{rows} rows of {elements} by {row} threads"
    if why := why_block_too_large(rows * row, made_of):
        return why
    available = min(arch.max_regs_per_thread, arch.regs_per_sm // (rows * row) // 8 * 8)
    data = vecs_per_thread * registers_per_vec
    if data + SPARE_REGISTERS > available:
        return (
            f"{data} registers a thread for the data and {SPARE_REGISTERS} for the arithmetic; "
            f"{rows * row} threads a block ({made_of}) leave {available}"
        )
    return None


def require_flat(num_tokens: int, elements: int) -> None:
    """Raises ProblemError unless the vectors of num_tokens rows of `elements` can be counted in 31 bits."""
    if (vecs := num_tokens * elements // VEC) > INT32_MAX:  # said only then: torch.compile's numbers have no format
        raise ProblemError(f"num_tokens={num_tokens} rows of {elements} are {vecs:,} vectors of {VEC}; "
                           f"at most {INT32_MAX:,}")  # fmt: skip
