"""Tensors to calls of decode_layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from kerngen.errors import ProblemError
from kerngen.templates.call import Call, op
from kerngen.templates.common.rows.spec import keys_that_matter, require, sliding_format
from kerngen.templates.common.rows.torch_rows import DTYPE_NAME, TORCH_DTYPE, empty
from kerngen.templates.common.w4.tiling import STRIP
from kerngen.templates.decode_layers.spec import (
    EXPERT_MATRICES,
    MATRICES,
    PEER_ROWS,
    Problem,
    layer_tensors,
    sources,
)
from kerngen.templates.values import KV_FORMATS, Peers

EVERY_TENSOR = layer_tensors(num_experts=1)
EXPERT_TENSORS = EVERY_TENSOR[len(layer_tensors(num_experts=0)) :]
PLE_TENSORS = ("ple_gate", "ple_projection", "post_ple_norm")


@dataclass(frozen=True, slots=True)
class Token:
    """Where the one new token stands, and of sliding and of full layers: the row of the caches that its K and V go to
    (None where no layer writes any), the block table, and the frequencies of RoPE.
    """

    positions: Tensor
    kv_lens: Tensor
    slots: Tensor | None
    full_slots: Tensor | None
    block_table: Tensor
    full_block_table: Tensor
    inv_freq: Tensor
    full_inv_freq: Tensor


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """What the layers bring along, a list of tensors each, in the order of the layers: see decode_layers."""

    input_norms: list[Tensor]
    qkv_packed: list[Tensor]
    qkv_scales: list[Tensor]
    q_norms: list[Tensor]
    k_norms: list[Tensor]
    k_caches: list[Tensor]
    v_caches: list[Tensor]
    out_packed: list[Tensor]
    out_scales: list[Tensor]
    post_attention_norms: list[Tensor]
    pre_ffn_norms: list[Tensor]
    gate_up_packed: list[Tensor]
    gate_up_scales: list[Tensor]
    down_packed: list[Tensor]
    down_scales: list[Tensor]
    post_ffn_norms: list[Tensor]
    ple_gates: list[Tensor]
    ple_projections: list[Tensor]
    post_ple_norms: list[Tensor]
    layer_scalars: list[Tensor]
    router_scales: list[Tensor]
    routers: list[Tensor]
    per_expert_scales: list[Tensor]
    pre_expert_norms: list[Tensor]
    dense_norms: list[Tensor]
    expert_norms: list[Tensor]
    expert_gate_up_packed: list[Tensor]
    expert_gate_up_scales: list[Tensor]
    expert_down_packed: list[Tensor]
    expert_down_scales: list[Tensor]

    def by_name(self) -> dict[str, list[Tensor]]:
        """The lists by what each tensor of theirs is: "input_norm", "qkv_packed"."""
        names = (*EVERY_TENSOR, "k_cache", "v_cache")
        return {n: getattr(self, n if n.endswith(("packed", "scales")) else f"{n}s") for n in names}


@dataclass(frozen=True, slots=True)
class Stack:
    """Figures of the model. window, num_rotated_pairs: of sliding layers. top_k: experts of a token, 0 for none.
    kv_format: of the full layers' caches, and so of the sliding ones' (Problem.kv_format_of). taps: Problem.taps.
    """

    num_q_heads: int
    window: int
    num_rotated_pairs: int
    num_full_rotated_pairs: int
    eps: float
    max_kv_len: int = 0
    top_k: int = 0
    kv_format: str = "plain"
    taps: str = ""


_TAKES: dict[str, str] = {
    "residual": "R[1, H]",
    "ple": "D[1, L, P]",
    "positions": "int64[1]",
    "kv_lens": "int32[1]",
    "slots": "int64[1]",
    "full_slots": "int64[1]",
    "block_table": "int32[1, M]",
    "full_block_table": "int32[1, FM]",
    "inv_freq": "fp32[HALF]",
    "full_inv_freq": "fp32[FHALF]",
    "input_norms": "each D[H]",
    **{f"{name}_packed": "each int32[_, _, 32, 4]" for name in MATRICES},
    **{f"{name}_scales": "each D[_, _, 32]" for name in MATRICES},
    "q_norms": "each D[_]",
    "k_norms": "each D[_]",
    "k_caches": "each C[_, _, _, _]",
    "v_caches": "each C[_, _, _, _]",
    "post_attention_norms": "each D[H]",
    "pre_ffn_norms": "each D[H]",
    "post_ffn_norms": "each D[H]",
    "ple_gates": "each D[P, H]",
    "ple_projections": "each D[H, P]",
    "post_ple_norms": "each D[H]",
    "layer_scalars": "each D[1]",
    "router_scales": "each D[H]",
    "routers": "each D[E, H]",
    "per_expert_scales": "each D[E]",
    "pre_expert_norms": "each D[H]",
    "dense_norms": "each D[H]",
    "expert_norms": "each D[H]",
    **{f"{name}_packed": "each int32[E, _, _, 32, 4]" for name in EXPERT_MATRICES},
    **{f"{name}_scales": "each D[E, _, _, 32]" for name in EXPERT_MATRICES},
    "final_norm": "D[H]",
}


@op(mutates=("k_caches", "v_caches"), takes=_TAKES)
def decode_layers(
    residual: Tensor,
    ple: Tensor | None,
    token: Token,
    tensors: LayerTensors,
    final_norm: Tensor,
    layers: str,
    stack: Stack,
) -> Call[Tensor]:
    """All layers of an int4 model for one token. sm90 and sm100; the formulas: decode_layers' Problem.

    layers: a letter each, s for sliding and f for full attention; S and F own no K and V and attend to those of the
    last s or f before them. Lists have a tensor a layer in this order, but k_norms, k_caches and v_caches one for each
    layer that owns K and V, those of the per-layer inputs none where ple is None, and those of the experts, from
    router_scales to expert_down_scales, none where there are no experts. Layers may be S and F alone, a
    drafter's: k_norms is empty then, slots and full_slots are None, and k_caches and v_caches have one for each of the
    two letters, in the order in which they come first. Where K and V share a pool (kv_format), k_norms have those of F
    layers too, the weight of the keys that each reads, and both lists of caches name that pool.

    residual [1, H] in the weights' dtype or fp32, not written; ple [1, L, P] or None; positions [1] int64, kv_lens [1]
    int32, what full attention sees, the token with it if any layer owns its key. Of sliding layers, and of full ones:
    slots [1] int64, the row of the caches that the token's K and V go to, block_table [1, max_pages] int32, inv_freq
    [d / 2] fp32 with its first num_rotated_pairs to turn. Matrices as w4a16_gemm's, packed [N / 32, K / 32, 32, 4]
    int32 and scales [N / 32, K / group_size, 32]: qkv as qkv_norm_rope's, q alone in S and F; out; gate_up as
    w4a16_gated's; down. Norms [H], those of heads [d]; caches [num_pages, nkv, page_size, d], or as
    values.py, KVFormat, has them: of the format kv_format in full layers, in sliding ones of "plain" where that is
    "shared" and of "int8" where it is "shared_int8"; ple_gates [P, H],
    ple_projections [H, P]; layer_scalars [1]. Routers [E, H], their scales [H], per_expert_scales [E]; the experts'
    matrices as moe_w4a16's, expert_gate_up_packed [E, 2 I / 32, H / 32, 32, 4] and expert_down_packed [E, H / 32, I /
    32, 32, 4], and top_k of them a token, 0 without experts: E is a multiple of 8 up to 128, top_k 8 at most, and such
    layers have no per-layer inputs. window: of sliding layers. max_kv_len: no kv_len is longer; 0 for what the block
    table holds. All but what is said above is of the weights' dtype, and on a GPU each tensor begins at a multiple of
    16 bytes. Returns norm(h; final_norm) [1, H], and with taps, a letter a layer, t or -, below it the h that each
    layer of a t ends with, in their order, in fp16 times 2^-8. Raises ProblemError where lists, shapes and `layers` do
    not fit.
    """
    return _call(residual, ple, token, tensors, final_norm, layers, stack, None)


@op(mutates=("k_caches", "v_caches"), takes={**_TAKES, "addresses": "int64[N]"})
def decode_layers_over_ranks(
    residual: Tensor,
    ple: Tensor | None,
    token: Token,
    tensors: LayerTensors,
    final_norm: Tensor,
    layers: str,
    mlp_is_whole: bool,
    addresses: Tensor,
    rank: int,
    stack: Stack,
) -> Call[Tensor]:
    """As decode_layers, of this rank's part of each layer: what out, down and the experts' down give is summed over the
    ranks. residual is the same on all, and so is what is returned, bit for bit.

    mlp_is_whole: the MLP is not divided, and its down is not summed: a drafter's; there are no experts.
    addresses [ranks + 1] int64 and rank: as of `Peers`, memory for rows of H through which nothing else is exchanged,
    of PEER_ROWS rows a slot. Every rank makes the same calls in the same order on one stream, with parts of the same
    shapes and the same configuration. On the CPU, where no memory is shared, this rank's part stands for every rank's.
    """
    peers = Peers(addresses, rank, PEER_ROWS)
    return _call(residual, ple, token, tensors, final_norm, layers, stack, peers, mlp_is_whole)


def _call(
    residual: Tensor,
    ple: Tensor | None,
    token: Token,
    tensors: LayerTensors,
    final_norm: Tensor,
    layers: str,
    stack: Stack,
    peers: Peers | None,
    mlp_is_whole: bool = False,
) -> Call[Tensor]:
    require(len(residual) == 1, f"decode_layers takes one token, not {len(residual)}")
    count, own = len(layers), [letter.islower() for letter in layers]
    kinds = [layers[index].lower() for index in sources(layers)]  # of the caches
    form = KV_FORMATS.get(stack.kv_format)
    if form is None:
        raise ProblemError(f"kv_format={stack.kv_format!r} is not one of: {', '.join(KV_FORMATS)}")
    has_k_norm = [letter.islower() or (letter == "F" and form.is_shared) for letter in layers]
    require(count > 0, "there are no layers")
    given = tensors.by_name()
    num_experts = tensors.routers[0].shape[0] if tensors.routers else 0
    kv_of_owners = {"k_norm": sum(has_k_norm), "k_cache": len(kinds), "v_cache": len(kinds)}
    wanted = kv_of_owners | dict.fromkeys(PLE_TENSORS, 0 if ple is None else count)
    wanted |= dict.fromkeys(EXPERT_TENSORS, count if num_experts else 0)
    for name, those in given.items():
        want = wanted.get(name, count)
        require(len(those) == want, f"{len(those)} tensors of {name}; {want} go with layers={layers!r}")
    for name, slot in (("slots", token.slots), ("full_slots", token.full_slots)):
        why = "a row of the caches" if any(own) else "None: no layer writes to a cache"
        require((slot is not None) == any(own), f"{name} of layers={layers!r} is {why}")
    require(ple is None or ple.shape[1] == count, f"ple has {ple is not None and ple.shape[1]} layers, not {count}")

    first = dict(zip(reversed(kinds), reversed(tensors.k_caches), strict=True))  # of each kind
    sliding, full = (first.get(letter, tensors.k_caches[0]) for letter in "sf")
    formats = {"f": form, "s": KV_FORMATS[sliding_format(form.name)]}
    dims = {letter: formats[letter if letter in first else kinds[0]].head_dim(cache.shape[3])
            for letter, cache in zip("sf", (sliding, full), strict=True)}  # fmt: skip
    full_rows = tensors.qkv_packed[layers.index("f")].shape[0] * STRIP if "f" in layers else 0
    inner = {letter.isupper(): w.shape[1] * STRIP for letter, w in zip(layers, tensors.down_packed, strict=True)}
    own_inner = inner[min(inner)]  # of layers that own K and V, or of all if none does
    table, window = (token.full_block_table, 0) if "f" in first else (token.block_table, stack.window)
    max_keys = stack.max_kv_len or table.shape[1] * sliding.shape[2]
    problem = Problem(
        layers, residual.shape[1], stack.num_q_heads, sliding.shape[1], dims["s"], full.shape[1], dims["f"],
        full_rows == (stack.num_q_heads + full.shape[1]) * dims["f"], own_inner,
        0 if inner.get(True, own_inner) == own_inner else inner[True], 0 if ple is None else ple.shape[2],
        stack.window, sliding.shape[2], stack.num_rotated_pairs, stack.num_full_rotated_pairs,
        tensors.out_packed[0].shape[1] * STRIP // tensors.out_scales[0].shape[1], DTYPE_NAME[final_norm.dtype],
        DTYPE_NAME[residual.dtype], keys_that_matter(max_keys, 1, window), num_experts, stack.top_k,
        tensors.expert_down_packed[0].shape[2] * STRIP if num_experts else 0,
        1 if peers is None else peers.addresses.shape[0] - 1, mlp_is_whole, form.name, stack.taps,
    )  # fmt: skip
    if peers is not None:
        require(0 <= peers.rank < problem.ranks, f"rank={peers.rank} is not in 0..{problem.ranks - 1}")
    for name, frequencies, dim in (
        ("inv_freq", token.inv_freq, problem.head_dim), ("full_inv_freq", token.full_inv_freq, problem.full_head_dim),
    ):  # fmt: skip
        require(2 * len(frequencies) == dim, f"{name} has {len(frequencies)} entries for heads of {dim}")
    caches = (*tensors.k_caches, *tensors.v_caches)
    require(all(c.is_contiguous() for c in caches), "decode_layers takes contiguous caches, no heads of larger pages")
    attended = {name: list(_of_last_source(layers, given[name])) for name in ("k_cache", "v_cache")}
    norms, in_each = iter(tensors.k_norms), {n: those for n, those in given.items() if n not in kv_of_owners}
    flat: list[Tensor | None] = []
    for index, letter in enumerate(layers):
        of_layer: dict[str, Tensor | None] = {n: those[index] if those else None for n, those in in_each.items()}
        of_layer["k_norm"] = next(norms) if has_k_norm[index] else None
        of_layer |= {name: those[index] for name, those in attended.items()}
        _require_shapes(problem, f"layer {index} ({letter})", letter, of_layer)
        flat += [of_layer[name] for name in layer_tensors(num_experts)]
    out = empty(final_norm, 1 + len(problem.tapped), problem.hidden)
    arguments = {
        "out": out, "k_caches": tuple(attended["k_cache"]), "v_caches": tuple(attended["v_cache"]),
        "residual": residual, "ple": ple, "layers": tuple(flat), "final_norm": final_norm,
        "positions": token.positions, "kv_lens": token.kv_lens, "slots": token.slots, "full_slots": token.full_slots,
        "block_table": token.block_table, "full_block_table": token.full_block_table, "inv_freq": token.inv_freq,
        "full_inv_freq": token.full_inv_freq, "eps": stack.eps,
        "addresses": None if peers is None else peers.addresses, "rank": 0 if peers is None else peers.rank,
    }  # fmt: skip
    return Call("decode_layers", problem, arguments, out)


def _of_last_source(layers: str, tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Of each layer the cache that it attends to: its own, or that of the last of `sources` of its kind before it."""
    given, last = dict(zip(sources(layers), tensors, strict=True)), {}
    for index, letter in enumerate(layers):
        if index in given:
            last[letter.lower()] = given[index]
        yield last[letter.lower()]


def _require_shapes(p: Problem, where: str, letter: str, tensors: Mapping[str, Tensor | None]) -> None:
    """Raises ProblemError unless what differs from layer to layer is as the problem has it."""
    num_kv_heads, dim = p.heads_of(letter)
    wanted: dict[str, tuple[int, ...]] = {"q_norm": (dim,), "k_norm": (dim,)}
    for name, (n, k) in zip(MATRICES, p.matrices(letter)[: len(MATRICES)], strict=True):
        wanted[f"{name}_packed"] = n // STRIP, k // STRIP, 32, 4
        wanted[f"{name}_scales"] = n // STRIP, k // p.group_size, STRIP
    if p.num_experts:
        wanted["router"], wanted["per_expert_scale"] = (p.num_experts, p.hidden), (p.num_experts,)
    for name, (n, k) in zip(EXPERT_MATRICES, p.expert_matrices, strict=True):
        wanted[f"{name}_packed"] = p.num_experts, n // STRIP, k // STRIP, 32, 4
        wanted[f"{name}_scales"] = p.num_experts, n // STRIP, k // p.group_size, STRIP
    if (cache := tensors["k_cache"]) is not None:
        form = KV_FORMATS[p.kv_format_of(letter)]
        wanted |= dict.fromkeys(
            ("k_cache", "v_cache"), (cache.shape[0], num_kv_heads, p.page_size, form.row_entries(dim))
        )
        dtype = form.dtype or TORCH_DTYPE[p.dtype]
        for name in ("k_cache", "v_cache"):
            its = tensors[name]
            require(its is None or its.dtype == dtype, f"{where}: {name} is {its is not None and its.dtype}; kv_format="
                    f"{form.name} takes {dtype}")  # fmt: skip
        if form.is_shared:
            is_one = cache is tensors["v_cache"]
            require(is_one, f"{where}: k_cache and v_cache are two tensors; kv_format={form.name} has one pool")
    for name, shape in wanted.items():
        if (tensor := tensors[name]) is not None:
            require(tuple(tensor.shape) == shape, f"{where}: {name} is {list(tensor.shape)}; it takes {list(shape)}")
