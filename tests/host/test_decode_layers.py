"""decode_layers without a GPU: what it means beside the model's own steps, what its op refuses, what goes around it."""

from __future__ import annotations

import gc
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import kerngen
from kerngen.arch import Target, find_arch
from kerngen.compiler.compile import compile_cubin
from kerngen.compiler.render import render
from kerngen.errors import ProblemError
from kerngen.runtime.batch import Batch
from kerngen.runtime.cache import KVCache
from kerngen.runtime.config import DrafterConfig, Keeping, LayerConfig, ModelConfig, read_model_config
from kerngen.runtime.drafting import MtpDrafter
from kerngen.runtime.executors.launch import Launch
from kerngen.runtime.executors.record import Record
from kerngen.runtime.executors.reference import Reference
from kerngen.runtime.launcher import shares_sms
from kerngen.runtime.model import Gemma4, Taps
from kerngen.runtime.ops import Linear, Ops, dense_weights, int4_weights
from kerngen.runtime.ops.eager import TorchOps
from kerngen.runtime.ops.kernels import KernelOps, layers_spec
from kerngen.runtime.weights.synthetic import synthetic_drafter, synthetic_model
from kerngen.templates import find_kernel
from kerngen.templates.decode_layers.op import decode_layers
from kerngen.templates.decode_layers.spec import Problem, layer_tensors
from kerngen.workload.steps import Step, sequence
from kerngen.workload.workload import MODELS as MODEL_NAMES
from kerngen.workload.workload import RELEASED, find_model

KERNEL = find_kernel("decode_layers")
LAYER_TENSORS = layer_tensors(0)
H200 = Target.of(find_arch("sm90"))
TINY = Path(__file__).parents[2] / "examples" / "tiny" / "gemma-4-tiny-w4a16"
PROMPT = torch.tensor([2, 7, 11, 3, 5, 40, 21, 9, 30, 17])


def model_of(
    letters: str, *, k_eq_v: bool = False, ple_size: int = 0, double: bool = False, num_experts: int = 0
) -> ModelConfig:
    """A small int4 model with these layers; its window is 6 keys."""
    layers: list[LayerConfig] = []
    last: dict[str, int] = {}
    for index, letter in enumerate(letters):
        sliding = letter in "sS"
        if letter.islower():
            last[letter] = index
        layers.append(
            LayerConfig(
                index, sliding, 256 if sliding else 512, 2 if sliding else 1, 6 if sliding else 0,
                192 if double and letter.isupper() else 96, k_eq_v and not sliding, last[letter.lower()],
            )
        )  # fmt: skip
    released = read_model_config(RELEASED / "gemma-4-e2b")
    return replace(
        released, vocab_size=64, hidden_size=64, num_q_heads=4, layers=tuple(layers), ple_size=ple_size,
        ple_vocab_size=64, rope={kind: rope for kind, rope in released.rope.items() if kind[0] in letters},
        num_experts=num_experts, top_k_experts=3 if num_experts else 0, moe_intermediate_size=32,
    )  # fmt: skip


MODELS = {
    "sliding": model_of("ss"),
    "full": model_of("ff", k_eq_v=True),
    "both": model_of("ssfsf"),
    "k_eq_v": model_of("sssfs", k_eq_v=True),
    "shared": model_of("sfsSFSF"),
    "ple": model_of("sf", ple_size=32),
    "all": model_of("ssfsSSF", ple_size=32, double=True),
    "experts": model_of("ssfsf", k_eq_v=True, num_experts=16),
}


class Watched(Reference):
    """The reference executor, and the kernels that it was asked for."""

    def __init__(self, target: Target | None) -> None:
        super().__init__(target=target)
        self.asked: list[str] = []

    def run(self, call: Any, where: str) -> Any:
        self.asked.append(call.kernel)
        return super().run(call, where)


def decoded(config: ModelConfig, ops: Ops, tapped: tuple[int, ...] = ()) -> tuple[Tensor, list[Tensor]]:
    """What three steps behind a prompt give [3, H], beside it the outputs of the tapped layers, and the caches that
    they leave.
    """
    model = Gemma4(config, synthetic_model(config, ops, 0), ops)
    cache = KVCache.whole(config, ops, batch=1, max_len=32, page_size=16)
    model.forward(Batch.prefill(PROMPT, 0, cache), cache, outputs="none")
    if isinstance(ops, KernelOps) and isinstance(ops.executor, Watched):
        ops.executor.asked.clear()
    rows = []
    for step in range(3):
        lengths, taps = torch.tensor([len(PROMPT) + step]), Taps(tapped) if tapped else None
        batch = Batch.decode(torch.tensor([[4 + step]]), lengths, cache, 32, model.ops)
        row = model.forward(batch, cache, taps=taps)
        rows.append(row if taps is None else torch.cat((row, taps.rows), dim=-1))
    owned = [cache.pages(layer) for layer in config.layers if layer.owns_kv]
    return torch.cat(rows), [tensor for pages in owned for tensor in (pages.k_cache, pages.v_cache)]


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_it_means_what_the_model_does_step_by_step(config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp32, which no kernel computes in, against eager torch."""
    monkeypatch.setattr(layers_spec, "why_unsupported", lambda problem, target: None)
    executor = Watched(H200)
    got, want = (
        decoded(config, ops)
        for ops in (KernelOps(executor, torch.float32), TorchOps(torch.device("cpu"), torch.float32))
    )
    assert executor.asked.count("decode_layers") == 3
    assert not {"attn_decode", "add_norm", "ple_block", "dense_gemv", "moe_router", "moe_w4a16"} & set(executor.asked)
    torch.testing.assert_close(got[0], want[0], atol=2e-5, rtol=1e-4)
    for mine, theirs in zip(got[1], want[1], strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(("name", "tapped"), [("k_eq_v", (0,)), ("experts", (1, 3, 4)), ("all", (0, 6))])
def test_what_a_drafter_takes_in_of_layers_comes_with_them(
    name: str, tapped: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And changes nothing else."""
    monkeypatch.setattr(layers_spec, "why_unsupported", lambda problem, target: None)
    executor = Watched(H200)
    got, want, plain = (
        decoded(MODELS[name], ops, taps)
        for ops, taps in (
            (KernelOps(executor, torch.float32), tapped), (TorchOps(torch.device("cpu"), torch.float32), tapped),
            (KernelOps(Watched(H200), torch.float32), ()),
        )
    )  # fmt: skip
    assert executor.asked.count("decode_layers") == 3
    hidden = MODELS[name].hidden_size
    assert got[0].shape == (3, (1 + len(tapped)) * hidden)
    torch.testing.assert_close(got[0], want[0], atol=2e-5, rtol=1e-4)
    assert torch.equal(got[0][:, :hidden], plain[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("config", [MODELS["all"], MODELS["k_eq_v"], MODELS["experts"], find_model(str(TINY)).target])
def test_it_rounds_where_the_kernels_of_single_layers_do(config: ModelConfig, dtype: torch.dtype) -> None:
    together, apart = Watched(H200), Watched(None)
    got, want = (decoded(config, KernelOps(executor, dtype)) for executor in (together, apart))
    assert "decode_layers" in together.asked
    assert "decode_layers" not in apart.asked
    assert torch.equal(got[0], want[0])
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(got[1], want[1], strict=True))


# Models, and the formats of their caches: dtype, and whether K and V of layers whose K is V are shared.
KEPT = [("all", "int8", False), *(("k_eq_v", *kept) for kept in (("int8", False), ("plain", True), ("int8", True))),
        ("full", "int8", True), ("experts", "int8", True)]  # fmt: skip


def kept_model(name: str, kv_format: str, is_shared: bool) -> ModelConfig:
    return replace(MODELS[name], kv_format=kv_format, kv_is_shared=is_shared)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kept", KEPT, ids=str)
def test_it_reads_and_writes_caches_as_the_kernels_of_single_layers_do(
    kept: tuple[str, str, bool], dtype: torch.dtype
) -> None:
    together, apart = Watched(H200), Watched(None)
    got, want = (decoded(kept_model(*kept), KernelOps(executor, dtype)) for executor in (together, apart))
    assert together.asked.count("decode_layers") == 3
    assert "decode_layers" not in apart.asked
    assert torch.equal(got[0], want[0])
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(got[1], want[1], strict=True))


# ---- a drafter's layers


def drafter_for(target: ModelConfig, letters: str) -> DrafterConfig:
    """A small int4 one with these layers, all capitals, of other sizes than its target."""
    layers = [
        replace(donor, index=index, intermediate_size=160, kv_source=-1)
        for index, donor in enumerate(target.donor("sliding" if letter == "S" else "full") for letter in letters)
    ]
    text = replace(target, hidden_size=96, layers=tuple(layers), ple_size=0, ple_vocab_size=0)
    return DrafterConfig(text, target.hidden_size, 0, 0)


def drafted(config: ModelConfig, letters: str, ops: Ops, length: int) -> Tensor:
    """What three drafts behind `length` tokens give, the head's inputs and the hidden states [3, H + T]."""
    model = Gemma4(config, synthetic_model(config, ops, 0), ops)
    drafting = drafter_for(config, letters)
    drafter = MtpDrafter(drafting, synthetic_drafter(drafting, ops, 1), model)
    cache = KVCache.whole(config, ops, batch=1, max_len=64, page_size=16)
    prompt = torch.arange(length) * 7 % config.vocab_size
    hidden = model.forward(Batch.prefill(prompt, 0, cache), cache, outputs="last")
    if isinstance(ops, KernelOps) and isinstance(ops.executor, Watched):
        ops.executor.asked.clear()
    pages = [cache.pages(layer) for layer in config.layers if layer.owns_kv]
    before = [t.clone() for p in pages for t in (p.k_cache, p.v_cache)]
    rows = []
    for step in range(3):
        y = drafter.step(torch.tensor([4 + step]), hidden, torch.tensor([length]), cache, 64)
        hidden = drafter.carried(y)
        rows.append(torch.cat((y, hidden), dim=-1))
    assert all(
        torch.equal(a, b) for a, b in zip(before, (t for p in pages for t in (p.k_cache, p.v_cache)), strict=True)
    )
    return torch.cat(rows)


DRAFTED = [("both", "SSSF", 10), ("k_eq_v", "SSSF", 17), ("sliding", "S", 8), ("full", "FF", 16), ("all", "FSS", 33)]
DRAFTED += [("both", "SF", length) for length in (1, 5, 6, 7, 8, 15, 16)]  # ends of the window of 6, and of pages


@pytest.mark.parametrize(("name", "letters", "length"), DRAFTED)
def test_a_draft_means_what_it_does_step_by_step(
    name: str, letters: str, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fp32, which no kernel computes in, against eager torch."""
    monkeypatch.setattr(layers_spec, "why_unsupported", lambda problem, target: None)
    executor = Watched(H200)
    got, want = (
        drafted(MODELS[name], letters, ops, length)
        for ops in (KernelOps(executor, torch.float32), TorchOps(torch.device("cpu"), torch.float32))
    )
    assert executor.asked.count("decode_layers") == 3
    assert not {"attn_decode", "add_norm"} & set(executor.asked)
    torch.testing.assert_close(got, want, atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("name", "letters", "length"), DRAFTED)
def test_a_draft_rounds_where_the_kernels_of_single_layers_do(
    name: str, letters: str, length: int, dtype: torch.dtype
) -> None:
    together, apart = Watched(H200), Watched(None)
    got, want = (drafted(MODELS[name], letters, KernelOps(x, dtype), length) for x in (together, apart))
    assert together.asked.count("decode_layers") == 3
    assert "decode_layers" not in apart.asked
    assert torch.equal(got, want)


@pytest.mark.parametrize("kept", [KEPT[1], *KEPT[2:4], KEPT[-1]], ids=str)
@pytest.mark.parametrize(("letters", "length"), [("SSSF", 17), ("SF", 33)])
def test_a_draft_reads_the_targets_cache_in_its_format(letters: str, length: int, kept: tuple[str, str, bool]) -> None:
    together, apart = Watched(H200), Watched(None)
    got, want = (drafted(kept_model(*kept), letters, KernelOps(x, torch.bfloat16), length) for x in (together, apart))
    assert together.asked.count("decode_layers") == 3
    assert "decode_layers" not in apart.asked
    assert torch.equal(got, want)


def drafts_asked_of(
    name: str, weights: str = "int4", *, rows: int = 1, context: int = 512, arch: str = "sm90"
) -> set[str]:
    """The kernels that a released model's draft asks for."""
    model = find_model(name, None, Keeping(weights))
    return {launched.kernel for launched in sequence(model, Step.draft(rows, context), find_arch(arch))}


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_an_int4_drafter_goes_through_all_layers_at_once(name: str) -> None:
    asked = drafts_asked_of(name)
    assert "decode_layers" in asked
    assert not {"attn_decode", "add_norm", "rmsnorm"} & asked
    for changed in ({"weights": "stored"}, {"rows": 2}, {"arch": "sm80"}):
        assert "decode_layers" not in drafts_asked_of(name, **changed), changed


@pytest.mark.parametrize(("name", "context", "at_once"), [
    ("gemma-4-31b", 32768, True), ("gemma-4-31b", 262144, False), ("gemma-4-12b", 131072, True),
    ("gemma-4-e4b", 4096, True), ("gemma-4-e4b", 131072, False),
])  # fmt: skip
def test_drafts_in_long_contexts_go_layer_by_layer(name: str, context: int, at_once: bool) -> None:
    """The E4B's drafter has weights for 40 blocks, which are slow to read many keys."""
    asked = drafts_asked_of(name, context=context)
    assert ("decode_layers" in asked) == at_once
    assert ("attn_decode" in asked) == (not at_once)


# ---- who has a share of what


def _begin(count: int, block: int, blocks: int) -> int:
    """shares.cuh.jinja's begin_of."""
    dealt = min(count, blocks)
    return count * min(block, dealt) // dealt


def _owner(unit: int, count: int, blocks: int) -> int:
    """shares.cuh.jinja's owner_of."""
    return ((unit + 1) * min(count, blocks) - 1) // count


@pytest.mark.parametrize("strips", [1, 3, 16, 48, 80, 168])
@pytest.mark.parametrize("parts", [1, 2, 3, 5, 11, 33])
@pytest.mark.parametrize("blocks", [1, 7, 48, 132, 148])
def test_every_unit_has_one_owner_and_parts_of_a_strip_their_slots(strips: int, parts: int, blocks: int) -> None:
    units = strips * parts
    runs = [(_begin(units, b, blocks), _begin(units, b + 1, blocks)) for b in range(blocks)]
    assert runs[0][0] == 0
    assert runs[-1][1] == units
    assert all(a[1] == b[0] for a, b in pairwise(runs))
    owners = {u: b for b, (first, end) in enumerate(runs) for u in range(first, end)}
    assert all(_owner(u, units, blocks) == b for u, b in owners.items())
    most = 0
    for strip in range(strips):
        first = owners[strip * parts]
        slots = sorted({owners[strip * parts + part] - first for part in range(parts)})
        assert slots == list(range(len(slots))), "no slot is left empty: whoever sums them would wait for ever"
        most = max(most, len(slots))
    assert most <= layers_spec.max_peers(strips, parts, blocks)


def test_all_blocks_have_a_share_of_what_all_wait_for() -> None:
    """Whoever posts a share of `down` has read all that was posted before: that is why the rest may be cleared."""
    cases = [c for c in (*KERNEL.cases.CASES, *KERNEL.bench.BENCH_CASES)
             if KERNEL.why_unsupported(c.problem, H200) is None]  # fmt: skip
    assert len(cases) > 50
    for case in cases:
        p, config = case.problem, KERNEL.default_config(case.problem, H200)
        (launch,) = KERNEL.launches(p, config, H200)
        for letter in p.layers:
            units_of = [2 * p.inner_of(letter) // 32, p.hidden // 32 * config.down_split_k]
            units_of += [2 * p.top_k * p.expert_inner // 32] if p.num_experts else []
            for units in units_of:
                runs = [_begin(units, b, launch.grid[0]) for b in range(launch.grid[0] + 1)]
                assert all(a < b for a, b in pairwise(runs)), case
        assert launch.cooperative


# ---- the op


def _given(**changes: Any) -> dict[str, Any]:
    """The op's arguments for a small model of every letter, with per-layer inputs."""
    problem = next(c.problem for c in KERNEL.cases.CASES if c.problem.layers == "sfSF" and c.problem.ple_width)
    case = KERNEL.cases.case_for(problem)
    op, given = KERNEL.op_call(case, KERNEL.cases.inputs(case, "cpu"))
    assert op is decode_layers
    return given | changes


def _but(tensors: Sequence[Tensor], index: int, tensor: Tensor) -> list[Tensor]:
    """`tensors` with another one at `index`."""
    return [tensor if i == index else t for i, t in enumerate(tensors)]


GIVEN = _given()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"residual": torch.zeros(2, 64, dtype=torch.bfloat16)}, "one token, not 2"),
        ({"layers": "sfS"}, "4 tensors of input_norm; 3 go with layers='sfS'"),
        ({"layers": "sfsF"}, "2 tensors of k_norm; 3 go with layers='sfsF'"),
        ({"layers": "SFSF"}, "2 tensors of k_norm; 0 go with layers='SFSF'"),
        ({"layers": "SFSF", "k_norms": []}, "slots of layers='SFSF' is None: no layer writes to a cache"),
        ({"slots": None}, "slots of layers='sfSF' is a row of the caches"),
        ({"full_slots": None}, "full_slots of layers='sfSF' is a row of the caches"),
        ({"layers": ""}, "there are no layers"),
        ({"layers": "sfXF"}, "letters other than s, f, S and F"),
        ({"layers": "sfSf"}, "2 tensors of k_norm; 3 go with"),
        ({"ple": None}, "4 tensors of ple_gate; 0 go with"),
        ({"ple": GIVEN["ple"][:, :3]}, "ple has 3 layers, not 4"),
        ({"inv_freq": torch.ones(64)}, "inv_freq has 64 entries for heads of 256"),
        ({"q_norms": _but(GIVEN["q_norms"], 3, GIVEN["q_norms"][0])}, r"layer 3 \(F\): q_norm is \[256\]; .* \[512\]"),
        ({"qkv_packed": _but(GIVEN["qkv_packed"], 2, GIVEN["qkv_packed"][0])}, r"layer 2 \(S\): qkv_packed is \[32, "),
        ({"down_scales": _but(GIVEN["down_scales"], 0, GIVEN["down_scales"][0][:, ::2])}, r"\(s\): down_scales"),
        ({"v_caches": _but(GIVEN["v_caches"], 1, GIVEN["v_caches"][0])}, r"layer 1 \(f\): v_cache is"),
        ({"num_q_heads": 3}, "qkv_packed is"),
        ({"num_rotated_pairs": -1}, r"num_rotated_pairs=-1 is not in 0\.\.128"),
        ({"num_full_rotated_pairs": 257}, r"num_full_rotated_pairs=257 is not in 0\.\.256"),
    ],
)  # fmt: skip
def test_what_does_not_fit_together_is_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ProblemError, match=why):
        decode_layers.of_flat(GIVEN | changes)


@pytest.mark.parametrize(
    ("name", "tensor", "why"),
    [
        ("input_norms", torch.ones(32, dtype=torch.bfloat16), r"input_norms\[2\] is torch.bfloat16 \[32\]; .* D\[H\]"),
        ("q_norms", torch.ones(256), r"q_norms\[2\] is torch.float32 \[256\]; it takes each D\[_\] with D = torch.bf"),
        ("out_packed", torch.ones(2, 16, 32, 8).int(), r"out_packed\[2\] is .* it takes each int32\[_, _, 32, 4\]"),
        ("down_scales", torch.ones(2, 3).bfloat16(), r"down_scales\[2\] is .* it takes each D\[_, _, 32\]"),
    ],
)
def test_each_of_a_list_is_checked_where_others_call_it(name: str, tensor: Tensor, why: str) -> None:
    with pytest.raises(ProblemError, match=f"decode_layers: {why}"):
        kerngen.ops.decode_layers(**GIVEN | {name: _but(GIVEN[name], 2, tensor)})


def test_layers_that_own_nothing_get_what_they_attend_to() -> None:
    call = decode_layers.of_flat(GIVEN)
    k, given = call.arguments["k_caches"], call.arguments["layers"]
    assert k[2] is k[0] is GIVEN["k_caches"][0]
    assert k[3] is k[1] is GIVEN["k_caches"][1]
    norms = given[LAYER_TENSORS.index("k_norm") :: len(LAYER_TENSORS)]
    assert [t is None for t in norms] == [False, False, True, True]
    without = {"ple": None, "ple_gates": [], "ple_projections": [], "post_ple_norms": []}
    given = decode_layers.of_flat(GIVEN | without).arguments["layers"]
    assert given[LAYER_TENSORS.index("ple_gate") :: len(LAYER_TENSORS)] == (None,) * 4


def test_layers_of_which_none_owns_anything_get_what_is_given_for_their_kind() -> None:
    case = next(c for c in KERNEL.cases.CASES if c.problem.layers == "SFSF")
    op, given = KERNEL.op_call(case, KERNEL.cases.inputs(case, "cpu"))
    call = op.of_flat(given)
    assert call.problem == case.problem
    assert call.problem.inner_of("S") == case.problem.inner
    k = call.arguments["k_caches"]
    assert k[2] is k[0] is given["k_caches"][0]
    assert k[3] is k[1] is given["k_caches"][1]
    assert call.arguments["slots"] is call.arguments["full_slots"] is None
    norms = call.arguments["layers"][LAYER_TENSORS.index("k_norm") :: len(LAYER_TENSORS)]
    assert norms == (None,) * 4
    with pytest.raises(ProblemError, match=r"3 .*k_cache.* 2 .*SFSF"):
        op.of_flat(given | {"k_caches": [*given["k_caches"], given["k_caches"][0]]})
    with pytest.raises(ProblemError, match=r"first 'F'.*K and V"):
        Problem("sFS")


def _shared(**changes: Any) -> dict[str, Any]:
    """The op's arguments for a small model with a shared cache of codes."""
    wanted = ("sf", "shared_int8")
    case = next(c for c in KERNEL.cases.CASES if (c.problem.layers, c.problem.kv_format) == wanted)
    return KERNEL.op_call(case, KERNEL.cases.inputs(case, "cpu"))[1] | changes


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"kv_format": "int7"}, "kv_format='int7' is not one of: plain, int8, shared, shared_int8"),
        ({"kv_format": "plain"}, "a head of 264 elements is not one of"),
        ({"kv_format": "int8"}, "a head of 640 elements is not one of"),
        ({"kv_format": "shared"}, "a head of 264 elements is not one of"),
        ({"num_full_rotated_pairs": 32}, "heads of which 64 pairs turn, not 32"),
    ],
)
def test_a_cache_of_another_format_is_refused(changes: dict[str, Any], why: str) -> None:
    assert decode_layers.of_flat(_shared()).problem.kv_format == "shared_int8"
    with pytest.raises(ProblemError, match=why):
        decode_layers.of_flat(_shared(**changes))


def test_a_shared_cache_is_one_pool() -> None:
    given = _shared()
    with pytest.raises(ProblemError, match=r"layer 1 \(f\): k_cache and v_cache are two tensors"):
        decode_layers.of_flat(given | {"v_caches": [*given["v_caches"][:1], given["v_caches"][1].clone()]})


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"kv_format": "int7"}, "kv_format='int7' is not one of"),
        ({"kv_format": "int3"}, "decode_layers reads no rotated codes"),
        ({"kv_format": "shared_int4"}, "decode_layers reads no rotated codes"),
        ({"kv_format": "fp8"}, "decode_layers reads no codes in e4m3"),
        ({"kv_format": "shared", "k_eq_v": False}, "kv_format=shared is for heads whose K is V"),
        ({"kv_format": "shared_int8", "layers": "sfF"}, "an F of layers='sfF' reads another's K and V"),
        ({"kv_format": "shared", "layers": "ss"}, "is full layers', and layers='ss' has none"),
        ({"kv_format": "shared", "full_head_dim": 256}, "heads of 512 are shared"),
    ],
)
def test_formats_that_cannot_be_are_refused(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(ProblemError, match=why):
        Problem(**fields)


def test_a_step_is_bounded_by_the_keys_that_it_may_see() -> None:
    assert decode_layers.of_flat(GIVEN | {"max_kv_len": 33}).problem.kv_len == 33
    most = GIVEN["full_block_table"].shape[1] * GIVEN["k_caches"][0].shape[2]
    assert decode_layers.of_flat(GIVEN | {"max_kv_len": 0}).problem.kv_len == most


# ---- what goes around it


@pytest.mark.parametrize("arch", ["sm70", "sm80", "sm89", "sm120"])
def test_where_it_does_not_serve_it_says_what_does(arch: str) -> None:
    why = KERNEL.why_unsupported(Problem(dtype="fp16", residual_dtype="fp32"), Target.of(find_arch(arch)))
    assert "other kernels serve it" in why


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"stage_tiles": 40}, "stage_tiles=40 is no multiple of num_warps=11"),
        ({"max_inflight_stages": 4, "num_stages": 3}, "max_inflight_stages=4 is more than num_stages=3"),
        ({"num_warps": 8, "stage_tiles": 8}, "a slot of 4,608 B holds no keys"),
        ({"num_warps": 12, "stage_tiles": 24}, "a slot of 13,824 B holds no keys, or no dense row: 16,512 B"),
        ({"down_split_k": 1000}, "down_split_k=1000 is more than the 672 groups of a row"),
        ({"out_split_k": 1, "down_split_k": 33, "max_peers": 1}, "2 blocks share an n-tile; max_peers=1"),
        ({"max_peers": 5}, r"80 words of partial sums a thread \(2 vectors of hidden=5376, max_peers=5\); at most 40"),
        ({"num_stages": 8}, r"needs 29\d,\d\d\d B of shared memory; sm90 allows 232,448 B a block"),
    ],
)
def test_refusals_have_numbers(changes: dict[str, Any], why: str) -> None:
    problem = Problem()
    config = replace(KERNEL.default_config(problem, H200), **changes)
    assert re.search(why, KERNEL.why_invalid(problem, config, H200) or "")


@pytest.mark.parametrize("hidden", [2112, 2144, 2176])
def test_shared_memory_is_counted_for_rows_of_any_size(hidden: int) -> None:
    """The source says so itself where spec.py counts too few bytes: then it does not compile."""
    problem = Problem("s", hidden, 8, 2, num_full_kv_heads=2, inner=2048)
    assert KERNEL.why_unsupported(problem, H200) is None
    compile_cubin(render(KERNEL, problem, KERNEL.default_config(problem, H200), H200), H200.arch)


def test_more_heads_than_blocks_are_refused() -> None:
    few = Target(H200.arch, replace(H200.device, num_sms=15))
    assert "16 units; 15 blocks take one each" in (KERNEL.why_unsupported(Problem(), few) or "")


def asked_of(
    config: ModelConfig, target: Target | None, *, rows: int = 1, changed: Any = None, max_kv_len: int = 32
) -> set[str]:
    """The kernels that a step asks for. changed: of the model's weights, what takes their place."""
    asked: set[str] = set()
    ops = KernelOps(Record(lambda kernel, *_: asked.add(kernel), lambda _: None, target), torch.bfloat16)
    weights = synthetic_model(config, ops)
    model = Gemma4(config, weights if changed is None else changed(weights), ops)
    cache = KVCache.whole(config, ops, batch=rows, max_len=32)
    ids = torch.empty(rows, 1, dtype=torch.int64, device="meta")
    asked.clear()
    model.forward(Batch.decode(ids, ids[:, 0], cache, max_kv_len, model.ops), cache)
    return asked


@pytest.mark.parametrize(
    ("rows", "arch", "serves"),
    [(1, "sm90", True), (1, "sm100", True), (2, "sm90", False), (1, "sm80", False), (1, "sm120", False),
     (1, None, False)],
)  # fmt: skip
def test_one_token_of_one_sequence_goes_through_all_layers_at_once(rows: int, arch: str | None, serves: bool) -> None:
    target = None if arch is None else Target.of(find_arch(arch))
    asked = asked_of(MODELS["all"], target, rows=rows)
    assert ("decode_layers" in asked) == serves
    assert ("attn_decode" in asked) == (not serves)


def _w4(like: Linear, group_size: int) -> Linear:
    strips, _, rows = like.scales.shape
    scales = like.scales.new_empty(strips, like.in_features // group_size, rows)
    return int4_weights(like.packed, scales, like.out_features, like.in_features, group_size)


@pytest.mark.parametrize("what", ["dense", "coarse"])
@pytest.mark.parametrize("name", ["qkv", "out", "gate_up", "down"])
def test_other_matrices_go_layer_by_layer(name: str, what: str) -> None:
    def changed(weights: Any) -> Any:
        last = weights.layers[-1]
        old: Linear = getattr(last, name)
        dense = dense_weights(torch.empty(old.out_features, old.in_features, dtype=torch.bfloat16, device="meta"))
        new = dense if what == "dense" else _w4(old, 64)
        return replace(weights, layers=(*weights.layers[:-1], replace(last, **{name: new})))

    config = replace(MODELS["all"], hidden_size=128)
    config = replace(config, layers=tuple(replace(x, intermediate_size=128) for x in config.layers))
    assert "decode_layers" in asked_of(config, H200)
    assert "decode_layers" not in asked_of(config, H200, changed=changed)


def test_sizes_that_it_does_not_take_go_layer_by_layer() -> None:
    config = MODELS["both"]
    rope = config.rope | {"sliding": replace(config.rope["sliding"], num_rotated=64)}
    layers = tuple(replace(x, head_dim=128 if x.is_sliding else 512) for x in config.layers)
    small = replace(config, layers=layers, rope=rope)
    assert {"attn_decode", "w4a16_gemm"} <= asked_of(small, H200)
    first, second, *others = config.layers
    windows = replace(config, layers=(first, replace(second, window=7), *others))
    assert "decode_layers" not in asked_of(windows, H200)


@pytest.mark.parametrize("dtype", ["auto", "int8"])
@pytest.mark.parametrize("layout", ["apart", "shared"])
@pytest.mark.parametrize("name", ["gemma-4-31b", "gemma-4-26b-a4b", "gemma-4-12b", "gemma-4-e2b"])
def test_caches_in_all_formats_go_through_all_layers_at_once(name: str, layout: str, dtype: str) -> None:
    if name == "gemma-4-e2b" and layout == "shared":
        pytest.skip("none of its layers has a K that is V")
    config = read_model_config(RELEASED / name).keeping(Keeping(kv_cache_dtype=dtype, kv_cache_layout=layout))
    for max_kv_len in (4096, 32768):
        asked = asked_of(config, H200, max_kv_len=max_kv_len)
        assert "decode_layers" in asked
        assert "attn_decode" not in asked


def test_a_layer_may_share_the_last_of_its_kind_alone() -> None:
    config = model_of("sssS")
    assert "decode_layers" in asked_of(config, H200)
    other = replace(config, layers=(*config.layers[:3], replace(config.layers[3], kv_source=1)))
    assert "decode_layers" not in asked_of(other, H200)


def test_experts_go_layer_by_layer_where_they_are_not_int4_or_not_everywhere() -> None:
    config = replace(MODELS["experts"], hidden_size=128, moe_intermediate_size=64)
    config = replace(config, layers=tuple(replace(x, intermediate_size=128) for x in config.layers))

    def last(weights: Any, moe: Any) -> Any:
        return replace(weights, layers=(*weights.layers[:-1], replace(weights.layers[-1], moe=moe)))

    def dense(weights: Any) -> Any:
        shapes = ((16, 128, 128), (16, 128, 64))
        made = [dense_weights(torch.empty(s, dtype=torch.bfloat16, device="meta")) for s in shapes]
        return last(weights, replace(weights.layers[-1].moe, gate_up=made[0], down=made[1]))

    assert "decode_layers" in asked_of(config, H200)
    for changed in (dense, lambda weights: last(weights, None)):
        assert "decode_layers" not in asked_of(config, H200, changed=changed)


def test_contexts_too_long_for_it_go_layer_by_layer() -> None:
    """attn_decode reads keys faster, which counts where a layer has many bytes of them."""
    config = read_model_config(RELEASED / "gemma-4-31b")
    for max_kv_len in (131072, 262144):
        asked = asked_of(config, H200, max_kv_len=max_kv_len)
        assert ("decode_layers" in asked) == (max_kv_len == 131072)
        assert ("attn_decode" in asked) == (max_kv_len == 262144)


@pytest.mark.parametrize("dtype", ["int4", "int3"])
def test_rotated_caches_go_layer_by_layer(dtype: str) -> None:
    kept = Keeping(kv_cache_dtype=dtype, kv_cache_layout="shared")
    config = read_model_config(RELEASED / "gemma-4-31b").keeping(kept)
    asked = asked_of(config, H200, max_kv_len=131072)
    assert "attn_decode" in asked
    assert "decode_layers" not in asked


@pytest.mark.parametrize("name", ["gemma-4-12b", "gemma-4-e4b", "gemma-4-e2b"])
def test_few_kv_heads_go_through_it_at_all_lengths(name: str) -> None:
    config = read_model_config(RELEASED / name)
    assert "decode_layers" in asked_of(config, H200, max_kv_len=config.max_positions)


def test_all_layers_of_a_model_ask_for_nothing_else() -> None:
    for name in ("gemma-4-31b", "gemma-4-26b-a4b", "gemma-4-12b", "gemma-4-e4b", "gemma-4-e2b"):
        asked = asked_of(read_model_config(RELEASED / name), H200)
        assert asked - {"dense_gemv", "w4a16_gemm", "ple_inputs"} == {"decode_inputs", "embed", "decode_layers"}, name


# ---- who may launch it without a cooperative launch


def test_the_first_executor_of_forwards_is_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only its grids need no cooperative launch: two half-resident ones would wait for each other for ever."""
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    launcher: Any = SimpleNamespace(index=77, target=H200)
    other: Any = SimpleNamespace(index=78, target=H200)
    first = Launch(launcher, in_forwards=True)
    assert first.alone
    assert not Launch(launcher, in_forwards=True).alone
    assert not Launch(launcher).alone, "calls of others run on streams of theirs"
    assert Launch(other, in_forwards=True).alone, "another GPU"
    del first
    gc.collect()
    assert Launch(launcher, in_forwards=True).alone

    (tmp_path / "control").touch()
    assert shares_sms()
    assert not Launch(launcher, in_forwards=True).alone, "other processes' grids may be half-resident too"


def test_who_is_not_alone_launches_cooperatively() -> None:
    pytest.importorskip("cuda.bindings")
    from kerngen.runtime.launcher import _attributes

    (launch,) = KERNEL.launches(Problem(), KERNEL.default_config(Problem(), H200), H200)
    assert [len(_attributes(launch, True, alone)) for alone in (False, True)] == [2, 1]
