"""Shapes that tests, bench and tuner share: every kind of layer, and where keys begin and end.

What a kernel must not read holds NaN, or faults if it is followed.

Of several ranks one GPU is all, as in exchange_norm's cases: each seems to have the same part.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kerngen.templates.call import Op
from kerngen.templates.common.attention.heads_torch import inverse_frequencies
from kerngen.templates.common.attention.kv_formats_torch import in_format
from kerngen.templates.common.rows.spec import is_shared
from kerngen.templates.common.rows.torch_rows import TORCH_DTYPE, Draw, poisoned
from kerngen.templates.common.w4.pack import drawn, pack
from kerngen.templates.decode_layers.op import decode_layers, decode_layers_over_ranks
from kerngen.templates.decode_layers.spec import (
    EXPERT_MATRICES,
    MATRICES,
    MAX_EXPERTS,
    PEER_ROWS,
    Problem,
    layer_tensors,
    sources,
)
from kerngen.templates.exchange_norm.cases import loopback
from kerngen.templates.kernel import Case, asking

NO_PAGE = 0x3FFFFFFF  # a table entry that faults if it is followed
DEEP = 3  # layers; in more of them each adds less, lest errors grow from layer to layer
LIKED, DISLIKED = 2.0, 1.0  # logits of the chosen experts from here on, of the others up to here
SCORE_STD = 3.0  # single keys carry weight, so that one key too many or too few shows


def case_for(problem: Problem, **options: Any) -> Case:
    """options: `zeros`, rows of products that are exactly zero; `signed`, scales of either sign, as of matrices that
    become int4 on load; `first_position`, what is added to the position.
    """
    p = problem
    heads = f"q{p.num_q_heads}-{p.num_kv_heads}x{p.head_dim}-{p.num_full_kv_heads}x{p.full_head_dim}"
    inner = f"i{p.inner}" + (f"-{p.shared_inner}" if p.shared_inner else "")
    names = [p.layers, f"h{p.hidden}", heads + ("_k=v" if p.k_eq_v else ""), inner]
    names += [f"ple{p.ple_width}"] * bool(p.ple_width)
    names += [f"e{p.num_experts}-{p.top_k}x{p.expert_inner}"] * bool(p.num_experts)
    names += [f"n{p.ranks}" + "-mlp" * (not p.mlp_is_whole)] * (p.ranks > 1)
    names += [p.kv_format] * (p.kv_format != "plain")
    names += [p.taps] * bool(p.taps)
    names += [f"w{p.window}", f"p{p.page_size}", f"g{p.group_size}", f"{p.residual_dtype}-{p.dtype}", *options]
    return Case("_".join([*names, f"kv{p.kv_len}"]), p, p.hidden + p.inner + p.kv_len, options)


def _shape(**fields: Any) -> dict[str, Any]:
    """A small model of one sliding and one full layer."""
    small = {
        "layers": "sf", "hidden": 64, "num_q_heads": 2, "num_kv_heads": 1, "num_full_kv_heads": 1, "k_eq_v": False,
        "inner": 96, "window": 64, "page_size": 16, "kv_len": 40,
    }  # fmt: skip
    return small | fields


def _around() -> tuple[Case, ...]:
    """Lengths around tiles of keys, pages and windows, by turns in both dtypes."""
    turns = (("bf16", "bf16"), ("fp16", "fp32"))
    lens = {
        (64, 16): (1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 66, 79, 80, 81, 200),
        (48, 32): (31, 32, 33, 47, 48, 49, 50, 64, 65, 97),
        (1, 16): (1, 2, 16, 17, 33),
        (512, 64): (511, 512, 513, 576, 577),
    }
    cases = []
    for (window, page_size), some in lens.items():
        for turn, kv_len in enumerate(some):
            dtype, residual = turns[turn % 2]
            shape = _shape(window=window, page_size=page_size, kv_len=kv_len, dtype=dtype, residual_dtype=residual)
            cases.append(case_for(Problem(**shape)))
    return tuple(cases)


def _kinds() -> tuple[Case, ...]:
    """Every letter, with per-layer inputs and without, all group sizes, and heads of all proportions."""
    half: dict[str, Any] = {"dtype": "fp16", "residual_dtype": "fp32"}
    more: dict[str, Any] = {"hidden": 256, "inner": 512, "kv_len": 100}  # blocks, and keys
    shapes: tuple[dict[str, Any], ...] = (
        {"layers": "s", "full_head_dim": 256},  # of a kind that is not there an op knows nothing
        {"layers": "f", "head_dim": 512, "k_eq_v": True, **half},
        {"layers": "ssS", "full_head_dim": 256, "ple_width": 8},
        {"layers": "fF", "head_dim": 512, "ple_width": 256, **half},
        {"layers": "sfSF", "shared_inner": 192, "ple_width": 64, "kv_len": 70},
        {"layers": "sfSF", "shared_inner": 192, "ple_width": 64, "kv_len": 70, **half},
        {"layers": "sfsfSSF", "hidden": 256, "num_q_heads": 4, "inner": 512, "shared_inner": 256, "ple_width": 32},
        {"layers": "sfSsfF", "hidden": 128, "num_q_heads": 4, "ple_width": 24, "kv_len": 130},  # owners after others
        {"layers": "sssssf", "hidden": 320, "num_q_heads": 8, "num_kv_heads": 4, "k_eq_v": True, "kv_len": 300},
        {"layers": "ff", "head_dim": 512, "hidden": 128, "group_size": 64, "inner": 128, **half},
        {"layers": "sf", "hidden": 640, "group_size": 128, "inner": 384, "num_q_heads": 4, "num_kv_heads": 2},
        {"layers": "sf", "hidden": 256, "group_size": 64, "inner": 192, "ple_width": 128, "kv_len": 257, **half},
        {"layers": "sf", "head_dim": 512, "full_head_dim": 256, "num_rotated_pairs": 256, "num_full_rotated_pairs": 32},
        {"layers": "sf", "num_rotated_pairs": 20, "num_full_rotated_pairs": 0, **half},  # pairs that no vector divides
        # q heads of a KV head: 1, 2, 4, 8 and 16
        {"num_q_heads": 1, "kv_len": 100},
        {"num_q_heads": 4, "num_kv_heads": 4, "num_full_kv_heads": 2, **more, **half},
        {"num_q_heads": 8, "num_kv_heads": 2, "num_full_kv_heads": 1, "kv_len": 100},
        {"num_q_heads": 16, "num_kv_heads": 1, "num_full_kv_heads": 2, "k_eq_v": True, **more},
        {"num_q_heads": 16, "num_kv_heads": 8, "num_full_kv_heads": 1, "k_eq_v": True, **more, **half},
        {"num_q_heads": 16, "num_kv_heads": 16, "num_full_kv_heads": 16, **more},
        {"num_q_heads": 32, "num_kv_heads": 16, "num_full_kv_heads": 4, "k_eq_v": True, **more},
    )
    return tuple(case_for(Problem(**_shape(**shape))) for shape in shapes)


def _tapped() -> tuple[Case, ...]:
    """The stream behind the first layer, behind the last, and behind several."""
    half: dict[str, Any] = {"dtype": "fp16", "residual_dtype": "fp32"}
    experts = {"num_experts": 8, "top_k": 2, "expert_inner": 64}
    shapes: tuple[dict[str, Any], ...] = (
        {"taps": "t-"},
        {"taps": "-t", **half},
        {"taps": "-tt-t", "layers": "ssfsf", "hidden": 320, "num_q_heads": 8, "num_kv_heads": 4, "k_eq_v": True},
        {"taps": "-t-", "layers": "ssf", "hidden": 256, "inner": 512, **half},
        {"taps": "tt", "ranks": 2},
        {"taps": "-tt", "layers": "ssf", "k_eq_v": True, **experts},
        {"taps": "tt", "ple_width": 64, **half},
        {"taps": "tt", "ple_width": 32, "inner": 192},
    )
    return tuple(case_for(Problem(**_shape(**shape))) for shape in shapes)


def _drafters() -> tuple[Case, ...]:
    """No layer owns K and V: the last key is one of the cache's, at the ends of tiles, pages and windows."""
    turns = (("bf16", "bf16"), ("fp16", "fp32"))
    lens = {
        ("SSSF", 64, 16): (0, 1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 66, 67, 79, 80, 81, 200),
        ("SF", 49, 32): (31, 32, 33, 47, 48, 49, 50, 51, 64, 65, 97),
        ("SF", 513, 64): (511, 512, 513, 514, 576, 577),
        ("SFSF", 2, 16): (1, 2, 3, 16, 17, 33),
    }
    cases = []
    for (layers, window, page_size), some in lens.items():
        for turn, kv_len in enumerate(some):
            dtype, residual = turns[turn % 2]
            shape = {"window": window, "page_size": page_size, "dtype": dtype, "residual_dtype": residual}
            cases.append(case_for(Problem(**_shape(layers=layers, kv_len=kv_len, **shape)), signed=True))
    more: dict[str, Any] = {"hidden": 256, "inner": 512}
    shapes: tuple[dict[str, Any], ...] = (
        {"layers": "F", "head_dim": 512, "kv_len": 100},
        {"layers": "SS", "full_head_dim": 256, "window": 21, "kv_len": 5000},
        {"layers": "FS", "kv_len": 70, "ple_width": 32},
        {"num_q_heads": 4, "num_kv_heads": 2, "kv_len": 300, **more},
        {"num_q_heads": 16, "num_kv_heads": 8, "kv_len": 300, "dtype": "fp16", "residual_dtype": "fp32", **more},
        {"num_q_heads": 32, "num_kv_heads": 16, "num_full_kv_heads": 4, "kv_len": 1027, "window": 1025, **more},
        {"window": 4001, "kv_len": 5000},  # more than 32 tiles of keys a block
        {"window": 4001, "kv_len": 40000, "page_size": 64},  # and more pages than are kept at hand
    )
    return (*cases, *(case_for(Problem(**_shape(**{"layers": "SSSF"} | s)), signed=True) for s in shapes))


def _experts() -> tuple[Case, ...]:
    """Few and many of them, matrices that no share or slot of the ring divides, all group sizes, and the 26B-A4B's own
    sizes with fewer of them.
    """
    half: dict[str, Any] = {"dtype": "fp16", "residual_dtype": "fp32"}
    real: dict[str, Any] = {
        "hidden": 2816, "num_q_heads": 16, "num_kv_heads": 8, "num_full_kv_heads": 2, "k_eq_v": True, "inner": 2112,
        "num_experts": 16, "top_k": 8, "expert_inner": 704, "window": 1024, "page_size": 64,
    }  # fmt: skip
    shapes: tuple[dict[str, Any], ...] = (
        {"num_experts": 8, "top_k": 1, "expert_inner": 32},
        {"num_experts": 8, "top_k": 2, "expert_inner": 96, "hidden": 128, **half},
        {"num_experts": 16, "top_k": 3, "expert_inner": 160, "layers": "ssfs", "hidden": 320},
        {"num_experts": 128, "top_k": 8, "expert_inner": 224, "hidden": 256, "inner": 512, "layers": "sfSF"},
        {"num_experts": 120, "top_k": 7, "expert_inner": 64, "hidden": 1024, "group_size": 64, "inner": 64, **half},
        {"num_experts": 8, "top_k": 8, "expert_inner": 384, "hidden": 640, "group_size": 128, "inner": 128},
        {
            "num_experts": 8,
            "top_k": 4,
            "expert_inner": 992,
            "hidden": 64,
            "inner": 2112,
            "layers": "f",
            "head_dim": 512,
        },
        {"num_experts": 16, "top_k": 2, "expert_inner": 64, "hidden": 96, "layers": "SSSF"},
        {**real, "layers": "ssf", "kv_len": 300},
        {**real, "layers": "sf", "kv_len": 1500, **half},
    )
    return (
        *(case_for(Problem(**_shape(**shape))) for shape in shapes),
        case_for(Problem(**_shape(**shapes[2] | {"layers": "sf", "kv_len": 50})), zeros=True),
        case_for(Problem(**_shape(**shapes[3] | half)), zeros=True),
    )


def _over_ranks() -> tuple[Case, ...]:
    """Two ranks and more; layers enough for each mailbox to be used again; blocks that share an n-tile, and experts."""
    half: dict[str, Any] = {"dtype": "fp16", "residual_dtype": "fp32"}
    real: dict[str, Any] = {
        "hidden": 5376, "num_q_heads": 16, "num_kv_heads": 8, "num_full_kv_heads": 2, "k_eq_v": True, "inner": 10752,
        "window": 1024, "page_size": 64, "layers": "ssf",
    }  # fmt: skip
    shapes: tuple[dict[str, Any], ...] = (
        {"layers": "SSSF", "ranks": 2},
        {"layers": "ssfs", "ranks": 2},
        {"layers": "sfsfsf", "ranks": 2, "hidden": 320, "num_q_heads": 8, "num_kv_heads": 4, "kv_len": 300, **half},
        {"layers": "sssssf", "ranks": 3, "hidden": 256, "inner": 512, "kv_len": 100},
        {"layers": "ssfssf", "ranks": 4, "hidden": 1024, "inner": 2112, "k_eq_v": True, "kv_len": 100, **half},
        {"layers": "ff", "ranks": 8, "head_dim": 512, "hidden": 640, "group_size": 128, "inner": 384},
        {"layers": "ssf", "ranks": 2, "num_experts": 16, "top_k": 3, "expert_inner": 160, "hidden": 320},
        {"layers": "sfsfsf", "ranks": 4, "num_experts": 8, "top_k": 2, "expert_inner": 96, "hidden": 128, **half},
        {"layers": "SSSF", "ranks": 2, "mlp_is_whole": True, "hidden": 256, "inner": 512, "kv_len": 100},
        {"layers": "ssfsf", "ranks": 3, "mlp_is_whole": True, "hidden": 320, "num_q_heads": 4, "kv_len": 70, **half},
        {**real, "ranks": 2, "kv_len": 600},
        {
            **real,
            "ranks": 4,
            "num_q_heads": 8,
            "num_kv_heads": 4,
            "num_full_kv_heads": 1,
            "inner": 5376,
            "kv_len": 1500,
        },
    )
    return (
        *(case_for(Problem(**_shape(**shape))) for shape in shapes),
        case_for(Problem(**_shape(**shapes[1] | {"kv_len": 50})), zeros=True),
    )


def _formats() -> tuple[Case, ...]:
    """Caches in each format: the ends of tiles, pages and windows, of a unit's first and last tile; all numbers of q
    heads to a KV head, both head dims in either kind; long contexts; layers that own nothing, and drafters; ranks.
    """
    half: dict[str, Any] = {"dtype": "fp16", "residual_dtype": "fp32"}
    turns: tuple[dict[str, Any], ...] = ({}, half)
    shapes: list[dict[str, Any]] = []
    for form in ("int8", "shared", "shared_int8"):
        base: dict[str, Any] = {"kv_format": form, "k_eq_v": form != "int8"}
        for turn, kv_len in enumerate((1, 2, 15, 16, 17, 33, 63, 64, 65, 81, 200)):
            shapes.append(base | {"kv_len": kv_len} | turns[turn % 2])
        for turn, kv_len in enumerate((512, 513, 577)):
            shapes.append(base | {"window": 512, "page_size": 64, "kv_len": kv_len} | turns[turn % 2])
        drafter = base | {"layers": "SSSF", "k_eq_v": False}
        for turn, kv_len in enumerate((0, 1, 16, 17, 64, 66, 67, 81)):
            shapes.append(drafter | {"window": 65, "kv_len": kv_len} | turns[turn % 2])
        more: dict[str, Any] = {"hidden": 256, "inner": 512, "kv_len": 300}
        shapes += [
            base | more | {"layers": "sssssf", "num_q_heads": 8, "num_kv_heads": 4},
            base | more | half | {"num_q_heads": 16, "num_kv_heads": 8},
            base | more | {"num_q_heads": 16, "num_kv_heads": 1, "num_full_kv_heads": 2},
            base | more | half | {"num_q_heads": 32, "num_kv_heads": 16, "num_full_kv_heads": 4, "page_size": 64},
            base | {"window": 4000, "kv_len": 5000},  # more than 32 tiles of keys a block
            base | half | {"window": 4000, "kv_len": 40000, "page_size": 64},  # and more pages than are kept at hand
            base | {"hidden": 1024, "inner": 2112, "window": 1024, "kv_len": 4099, "page_size": 64},
            base | {"layers": "f", "head_dim": 512, "kv_len": 70},
            drafter | more | {"num_q_heads": 32, "num_kv_heads": 16, "num_full_kv_heads": 4, "window": 257},
            base | {"layers": "ssf", "ranks": 2, "hidden": 320, "num_q_heads": 8, "num_kv_heads": 4, "kv_len": 100},
            base | {"layers": "ssf", "num_experts": 16, "top_k": 3, "expert_inner": 160, "hidden": 320, "kv_len": 70},
        ]
    int8: dict[str, Any] = {"kv_format": "int8"}
    shapes += [
        int8 | {"layers": "sfSF", "shared_inner": 192, "ple_width": 64, "kv_len": 70},
        int8 | half | {"layers": "sfSF", "shared_inner": 192, "ple_width": 256, "kv_len": 300, "num_q_heads": 8},
        int8 | {"layers": "s", "full_head_dim": 256},
        int8 | half | {"head_dim": 512, "full_head_dim": 256, "num_rotated_pairs": 256, "num_full_rotated_pairs": 32},
    ]
    return tuple(
        case_for(Problem(**_shape(**shape)), **({"signed": True} if shape.get("layers") == "SSSF" else {}))
        for shape in shapes
    )


CASES = (
    *_kinds(),
    *_over_ranks(),
    *_experts(),
    *_around(),
    *_drafters(),
    *_formats(),
    # every block of a board has weights, and tiles of keys
    case_for(Problem(**_shape(hidden=1024, inner=2112, window=1024, kv_len=4099, k_eq_v=True, page_size=64))),
    case_for(Problem(**_shape(hidden=1024, inner=2400, window=1000, kv_len=4100, dtype="fp16", residual_dtype="fp16"))),
    # few blocks, many tiles
    case_for(Problem(**_shape(layers="sfSF", window=1000, kv_len=1500, ple_width=16))),
    case_for(Problem(**_shape(window=4000, kv_len=5000))),  # more than 32 tiles of keys a block
    case_for(Problem(**_shape(window=4000, kv_len=40000, page_size=64))),  # and more pages than are kept at hand
    case_for(Problem(**_shape(layers="ss", full_head_dim=256, window=20, kv_len=5000))),
    # sums and products that are exactly zero, which posted words cannot be
    case_for(Problem(**_shape(layers="sfSF", hidden=320, ple_width=64, inner=288, kv_len=50)), zeros=True),
    case_for(Problem(**_shape(hidden=192, k_eq_v=True, dtype="fp16", residual_dtype="fp32")), zeros=True),
    case_for(Problem(**_shape(kv_len=70)), first_position=262014),
    *_tapped(),
)


def inputs(case: Case, device: torch.device | str) -> dict[str, Any]:
    """Every argument but the workspace. Rows are normal, weights so that products have a deviation of about 1, norms of
    q so that scores have one of SCORE_STD. `out` is NaN, and so are the rows of the caches that the token's K and V go
    to, and those that it does not see. Where no layer owns K and V the token's position has no key. Pages are
    scattered, otherwise for sliding layers than for full ones; a table has those alone in which keys are seen.
    """
    p: Problem = case.problem
    draw = Draw(case.seed, device)
    zeros = case.options.get("zeros", False)
    tables = {kind: _pages(p, 0 if kind == "f" else p.window, draw) for kind in "sf"}
    layers: list[Tensor | None] = []
    caches: list[tuple[Tensor, Tensor]] = []
    last: dict[str, tuple[Tensor, Tensor]] = {}
    given = sources(p.layers)
    for index, letter in enumerate(p.layers):
        tensors = _layer(p, letter, draw, zeros, signed=case.options.get("signed", False))
        layers += [tensors[name] for name in layer_tensors(p.num_experts)]
        if index in given:
            kind = letter.lower()
            k, v = (_cache(p, letter, *tables[kind], draw) for _ in range(2))
            last[kind] = in_format(k, v, p.kv_format_of(letter))
        caches.append(last[letter.lower()])
    # With experts it is not about 0, by which the routers tell them apart: see _with_experts.
    residual = draw.normal(1, p.hidden, dtype=p.residual_dtype, mean=1.0 if p.num_experts else 0.0)
    ple = None
    if p.ple_width:
        ple = draw.normal(1, len(p.layers), p.ple_width, dtype=p.dtype)
        if zeros:
            ple[:, ::2] = 0.0
    at, rank = p.kv_len - 1 if p.makes_kv else p.kv_len, case.seed % p.ranks
    slots: dict[str, Tensor | None] = {"s": None, "f": None}
    if p.makes_kv:
        slots = {kind: table[:, at // p.page_size].long() * p.page_size + at % p.page_size
                 for kind, (table, _) in tables.items()}  # fmt: skip
    return {
        "out": poisoned(1 + len(p.tapped), p.hidden, dtype=p.dtype, device=device),
        "k_caches": tuple(k for k, _ in caches),
        "v_caches": tuple(v for _, v in caches),
        "residual": residual,
        "ple": ple,
        "layers": tuple(layers),
        "final_norm": _norm(p, draw, p.hidden),
        "positions": torch.tensor([at + case.options.get("first_position", 0)], device=device),
        "kv_lens": torch.tensor([p.kv_len], dtype=torch.int32, device=device),
        "slots": slots["s"],
        "full_slots": slots["f"],
        "block_table": tables["s"][0],
        "full_block_table": tables["f"][0],
        "inv_freq": inverse_frequencies(p.head_dim, p.num_rotated_pairs, device),
        "full_inv_freq": inverse_frequencies(p.full_head_dim, p.num_full_rotated_pairs, device),
        "eps": 1e-6,
        "addresses": loopback(p.ranks, rank, PEER_ROWS, p.hidden, device, 4 * p.hidden) if p.ranks > 1 else None,
        "rank": rank,
    }


def _norm(p: Problem, draw: Draw, size: int, mean: float = 1.0) -> Tensor:
    """Of either sign: int4 weights have a mean of -0.5, by which a row that is not about 0 would outgrow the rest."""
    return draw.normal(size, dtype=p.dtype, mean=mean, std=0.25 * mean) * (2 * draw.integers(0, 2, size) - 1)


def _layer(p: Problem, letter: str, draw: Draw, zeros: bool, *, signed: bool) -> dict[str, Tensor | None]:
    """What layer `letter` brings along. zeros: every third strip of a product is zero. signed: see case_for."""
    _, dim = p.heads_of(letter)
    made: dict[str, Tensor | None] = {}
    for name, (n, k) in zip(MATRICES, p.matrices(letter)[: len(MATRICES)], strict=True):
        packed, scales = pack(*drawn(draw, n, k, p.group_size, p.dtype))
        if zeros:
            scales[::3] = 0.0
        if signed:
            scales *= 2 * draw.integers(0, 2, *scales.shape) - 1
        made |= {f"{name}_packed": packed, f"{name}_scales": scales}
    share = min(1.0, DEEP / len(p.layers))  # that a layer has in the stream, which stays near 1
    for name in ("input_norm", "pre_ffn_norm"):
        made[name] = _norm(p, draw, p.hidden)
    for name in ("post_attention_norm", "post_ffn_norm"):
        made[name] = _norm(p, draw, p.hidden, share)
    made["q_norm"] = _norm(p, draw, dim, SCORE_STD * dim**-0.5)
    reads_shared = letter == "F" and is_shared(p.kv_format)
    made["k_norm"] = _norm(p, draw, dim) if letter.islower() or reads_shared else None
    made |= dict.fromkeys(("ple_gate", "ple_projection", "post_ple_norm"))
    if p.ple_width:
        made["ple_gate"] = draw.normal(p.ple_width, p.hidden, dtype=p.dtype, std=p.hidden**-0.5)
        made["ple_projection"] = draw.normal(p.hidden, p.ple_width, dtype=p.dtype, std=p.ple_width**-0.5)
        made["post_ple_norm"] = _norm(p, draw, p.hidden, share)
    if p.num_experts:
        made |= _with_experts(p, draw, zeros, share)
    made["layer_scalar"] = draw.normal(1, dtype=p.dtype, mean=(1 + share * share) ** -0.5, std=0.1 * share)
    return made


def _with_experts(p: Problem, draw: Draw, zeros: bool, share: float) -> dict[str, Tensor | None]:
    """What they bring along. Logits that lie close to each other may be ordered either way by sums in another order:
    the router's rows are multiples of one row, and some noise, so that the mean of h makes those of top_k experts,
    whichever these are, larger than those of the others. zeros: some of the others' are exactly zero.
    """
    made: dict[str, Tensor | None] = {"router_scale": draw.normal(p.hidden, dtype=p.dtype, mean=1.0, std=0.1)}
    order = draw.permutation(p.num_experts)
    levels = DISLIKED * (draw.permutation(p.num_experts) / p.num_experts * 2 - 1)
    levels[order[: p.top_k]] = LIKED + torch.arange(p.top_k, device=draw.device) / p.top_k
    router = levels[:, None] * p.hidden**-0.5 + draw.normal(p.num_experts, p.hidden, dtype="fp32", std=0.05)
    if zeros:
        router[order[p.top_k :: 2]] = 0.0
    made["router"] = router.to(TORCH_DTYPE[p.dtype])
    made["per_expert_scale"] = draw.normal(p.num_experts, dtype=p.dtype, mean=1.0, std=0.25)
    made["pre_expert_norm"] = _norm(p, draw, p.hidden)
    made["dense_norm"], made["expert_norm"] = _norm(p, draw, p.hidden), _norm(p, draw, p.hidden)
    for name, (n, k) in zip(EXPERT_MATRICES, p.expert_matrices, strict=True):
        packed, scales = pack(*drawn(draw, p.num_experts * n, k, p.group_size, p.dtype))
        if zeros:
            scales[::3] = 0.0
        made[f"{name}_packed"] = packed.view(p.num_experts, -1, *packed.shape[1:])
        made[f"{name}_scales"] = scales.view(p.num_experts, -1, *scales.shape[1:])
    return made


def _pages(p: Problem, window: int, draw: Draw) -> tuple[Tensor, int]:
    """A block table [1, max_pages], scattered, with no pages before the window, and how many pages there are."""
    seen = range((max(0, p.kv_len - window) if window else 0) // p.page_size, -(-p.kv_len // p.page_size))
    num_pages = len(seen) + 2
    table = torch.full((1, seen.stop + 1), NO_PAGE, dtype=torch.int32, device=draw.device)
    table[0, seen.start : seen.stop] = draw.permutation(num_pages)[: len(seen)].int()
    return table, num_pages


def _cache(p: Problem, letter: str, table: Tensor, num_pages: int, draw: Draw) -> Tensor:
    """[num_pages, heads, page_size, head_dim]: numbers in rows of older keys that are seen, NaN in all others."""
    heads, dim = p.heads_of(letter)
    cache = poisoned(num_pages, heads, p.page_size, dim, dtype=p.dtype, device=draw.device)
    first, end = max(0, p.kv_len - p.window) if letter in "sS" else 0, p.kv_len - 1 if p.makes_kv else p.kv_len
    at = torch.arange(first, end, device=draw.device)
    cache[table[0, at // p.page_size].long(), :, at % p.page_size] = draw.normal(len(at), heads, dim, dtype=p.dtype)
    return cache


def op_call(case: Case, inputs: dict[str, Any]) -> tuple[Op[..., Any], dict[str, Any]]:
    """The op that asks for this case, and its arguments."""
    p: Problem = case.problem
    given: dict[str, Any] = {"layers": p.layers, "max_kv_len": p.kv_len, "taps": p.taps}
    own = layer_tensors(p.num_experts)
    for i, name in enumerate(layer_tensors(MAX_EXPERTS)):
        plural = name if name.endswith(("packed", "scales")) else f"{name}s"
        given[plural] = [t for t in inputs["layers"][i :: len(own)] if t is not None] if name in own else []
    for name in ("k_caches", "v_caches"):
        given[name] = [inputs[name][index] for index in sources(p.layers)]
    if p.ranks == 1:
        return asking(decode_layers, case, inputs, **given)
    return asking(decode_layers_over_ranks, case, inputs, **given)
