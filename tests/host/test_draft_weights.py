"""A drafter in int4: what its matrices become, that no token changes, and what it takes and asks of the kernels."""

from __future__ import annotations

import json
import shutil
import weakref
from functools import cache
from pathlib import Path
from typing import Any

import click
import pytest
import tiny_gemma
import torch
from checkpoints import edit_config, quantize
from command import ROOT, Kerngen
from torch import Tensor

from kerngen.arch import find_arch
from kerngen.cli.db.transfer import cells_of
from kerngen.cli.keeping_options import keeping_options
from kerngen.errors import CheckpointError, UsageError
from kerngen.runtime.config import (
    KEEPING_OPTIONS,
    DrafterConfig,
    Keeping,
    ModelConfig,
    read_drafter_config,
    read_model_config,
)
from kerngen.runtime.drafting import MtpDrafter
from kerngen.runtime.engine import Engine
from kerngen.runtime.executors.reference import Reference
from kerngen.runtime.footprint import footprint
from kerngen.runtime.model import Gemma4
from kerngen.runtime.ops import Ops
from kerngen.runtime.ops.eager import TorchOps
from kerngen.runtime.ops.kernels import KernelOps
from kerngen.runtime.session import load
from kerngen.runtime.weights import source
from kerngen.runtime.weights.int4 import to_int4
from kerngen.runtime.weights.layout import DrafterWeights
from kerngen.runtime.weights.loader import load_drafter, load_model
from kerngen.runtime.weights.repacked import leaves
from kerngen.runtime.weights.synthetic import synthetic_drafter
from kerngen.templates import find_kernel
from kerngen.templates.common.w4.pack import dequantize, separate, unpack
from kerngen.tuning_db import problem_key
from kerngen.workload.steps import Launched, Step, sequence
from kerngen.workload.workload import MODELS, find_model, workload

TINY = ROOT / "examples" / "tiny"
TARGET, ASSISTANT = TINY / "gemma-4-tiny-w4a16", TINY / "gemma-4-tiny-assistant"
CPU = torch.device("cpu")
GROUP = 32


def kernel_ops(dtype: torch.dtype = torch.float32) -> Ops:
    return KernelOps(Reference(), dtype)


def configs(weights: str, assistant: Path = ASSISTANT) -> tuple[ModelConfig, DrafterConfig]:
    config = read_model_config(TARGET)
    return config, read_drafter_config(assistant, config).keeping(Keeping(weights))


def loaded(weights: str, ops: Ops, assistant: Path = ASSISTANT) -> tuple[Gemma4, MtpDrafter]:
    config, drafter = configs(weights, assistant)
    model = Gemma4(config, load_model(TARGET, config, ops), ops)
    return model, MtpDrafter(drafter, load_drafter(assistant, drafter, ops), model)


def matrices(weights: DrafterWeights) -> dict[str, Any]:
    found: dict[str, Any] = {"pre": weights.pre, "post": weights.post}
    for i, layer in enumerate(weights.layers):
        found |= {f"{i}.{name}": getattr(layer, name) for name in ("qkv", "out", "gate_up", "down")}
    return found


# -- loading


def test_every_matrix_of_the_layers_becomes_int4_and_nothing_else() -> None:
    ops = kernel_ops(torch.bfloat16)
    stored = load_drafter(ASSISTANT, configs("stored")[1], ops)
    made = load_drafter(ASSISTANT, configs("int4")[1], ops)
    for (name, dense), packed in zip(matrices(stored).items(), matrices(made).values(), strict=True):
        assert (dense.format.name, packed.format.name) == ("dense", "int4"), name
        assert packed.gated == name.endswith("gate_up")
        words, scales = unpack(packed.packed, packed.scales)
        if packed.gated:
            words, scales = separate(words), separate(scales)
        for ours, want in zip((words, scales), to_int4(dense.weight, GROUP), strict=True):
            assert torch.equal(ours, want), name
    left = {path: t for path, t in leaves(made) if path.split(".")[-1] not in ("packed", "scales")}
    assert {path.rsplit(".", 1)[-1] for path in left} >= {"input_norm", "q_norm", "scalar", "norm", "weight"}
    before = dict(leaves(stored))
    for path, tensor in left.items():
        assert torch.equal(tensor, before[path]), path
    assert torch.equal(made.head.weight, stored.head.weight)


def test_torch_computes_with_the_same_values() -> None:
    packed = matrices(load_drafter(ASSISTANT, configs("int4")[1], kernel_ops()))
    dense = matrices(load_drafter(ASSISTANT, configs("int4")[1], TorchOps(CPU, torch.float32)))
    for name, linear in packed.items():
        words, scales = unpack(linear.packed, linear.scales)
        made = dequantize(words, scales)
        assert torch.equal(separate(made) if linear.gated else made, dense[name].weight), name


def test_what_kernels_do_not_take_stays_as_it_is(tmp_path: Path) -> None:
    """A hidden size of 24 is no group of 32; pre_projection has 64 inputs, but its 24 rows are no strip of 32."""
    tiny_gemma.make_target(tmp_path / "target", "dense")
    tiny_gemma.make_assistant(tmp_path / "assistant", "dense", num_centroids=12)
    config = read_model_config(tmp_path / "target")
    drafter = read_drafter_config(tmp_path / "assistant", config)
    stored, made = (
        load_drafter(tmp_path / "assistant", drafter.keeping(Keeping(w)), kernel_ops()) for w in ("stored", "int4")
    )
    for (path, want), (again, got) in zip(leaves(stored), leaves(made), strict=True):
        assert path == again
        assert torch.equal(want, got), path


def test_no_matrix_is_kept_as_it_was_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each goes before the next one comes: beside the table there is never more than one."""
    alive: list[weakref.ref[Tensor]] = []
    real_allocate, real_make = source.CheckpointSource._allocate, source.to_int4
    seen: list[int] = []

    def allocate(self: source.CheckpointSource, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        made = real_allocate(self, shape, dtype)
        if len(shape) == 2 and dtype.is_floating_point and not self.is_dry:
            alive.append(weakref.ref(made))
        return made

    def make(dense: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
        if not dense.is_meta:
            seen.append(sum(ref() is not None for ref in alive))
        return real_make(dense, group_size)

    monkeypatch.setattr(source.CheckpointSource, "_allocate", allocate)
    monkeypatch.setattr(source, "to_int4", make)
    load_drafter(ASSISTANT, configs("int4")[1], kernel_ops())
    assert len(seen) == 18
    assert max(seen) <= 2


def test_a_drafter_that_is_stored_in_int4_stays_what_it_is(tmp_path: Path) -> None:
    shutil.copytree(ASSISTANT, tmp_path / "assistant")
    quantize(tmp_path / "assistant", 64)
    (_, one), (_, other) = configs("stored", tmp_path / "assistant"), configs("int4", tmp_path / "assistant")
    assert one == other
    assert one.weights == "int4"


def test_a_packed_tensor_needs_a_config_that_says_so(tmp_path: Path) -> None:
    """What the option does to the config is not taken for what the checkpoint says of itself."""
    shutil.copytree(ASSISTANT, tmp_path / "assistant")
    quantize(tmp_path / "assistant", 32)
    edit_config(tmp_path / "assistant", lambda c: c.pop("quantization_config"))
    with pytest.raises(CheckpointError, match=r"packed.*config\.json.*quantization_config"):
        load_drafter(tmp_path / "assistant", configs("int4", tmp_path / "assistant")[1], kernel_ops())


# -- what comes out


@cache
def _prompt() -> list[int]:
    session = load(TARGET, draft=False, device="cpu")
    return session.encode("What is a warp?")


def _tokens(weights: str, ops: Ops, assistant: Path = ASSISTANT, **options: Any) -> tuple[list[int], float]:
    model, drafter = loaded(weights, ops, assistant)
    made = Engine(model, drafter, max_len=128, num_draft_tokens=3).generate(_prompt(), max_new_tokens=48, **options)
    return made.tokens, made.stats.acceptance_length


@cache
def _plain() -> list[int]:
    config, ops = read_model_config(TARGET), TorchOps(CPU, torch.float32)
    model = Gemma4(config, load_model(TARGET, config, ops), ops)
    return list(Engine(model, max_len=128).generate(_prompt(), max_new_tokens=48).tokens)


@pytest.mark.parametrize("make_ops", [lambda: TorchOps(CPU, torch.float32), kernel_ops], ids=["torch", "reference"])
def test_a_drafter_in_int4_changes_no_greedy_token(make_ops: Any) -> None:
    """And is nearly as good: it was trained in 16 bits."""
    plain = _plain()
    stored, as_stored = _tokens("stored", make_ops())
    made, as_int4 = _tokens("int4", make_ops())
    assert stored == made == plain
    assert len(plain) > 24
    assert as_int4 > 1.5
    assert as_int4 > 0.75 * as_stored


# -- what it takes, and asks


def test_the_31bs_drafter_takes_what_int4_takes() -> None:
    """402 MB of layers and projections become 4 bits and a sixteenth of 16 bits; the head stays."""
    model = find_model("gemma-4-31b")
    assert model.drafter is not None
    stored, made = (
        footprint(model.target, model.drafter.keeping(Keeping(w)), torch.bfloat16, 64).drafter_bytes
        for w in ("stored", "int4")
    )
    head = model.drafter.text.vocab_size * model.drafter.text.hidden_size * 2
    assert (stored - head) / 1e6 == pytest.approx(402, abs=1)
    assert (made - head) / (stored - head) == pytest.approx(4.5 / 16, abs=1e-3)


def _multiplied(launched: Launched) -> list[tuple[int, int]]:
    """Rows and columns of its matrices: one, or those of all layers."""
    p = launched.problem
    return [(p.n, p.k)] if launched.kernel == "w4a16_gemm" else [m for letter in p.layers for m in p.matrices(letter)]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("arch", ["sm70", "sm90"])
def test_its_steps_ask_for_int4_products(name: str, arch: str) -> None:
    """In place of the dense ones, but for the head; the target's steps stay what they are."""
    a, step = find_arch(arch), Step.draft(1, 512)
    stored, made = (find_model(name, None, Keeping(w)) for w in ("stored", "int4"))
    assert made.target == stored.target
    launched = sequence(made, step, a)
    dense = [p for p in sequence(stored, step, a) if p.kernel == "dense_gemv" and p.problem.n < 100_000]
    int4 = [p for p in launched if p.kernel in ("w4a16_gemm", "decode_layers")]
    assert {p.problem.group_size for p in int4} == {GROUP}
    shapes = sorted(shape for p in int4 for shape in _multiplied(p))
    assert shapes == sorted((p.problem.n, p.problem.k) for p in dense)
    assert len(shapes) == 18
    assert not {p.kernel for p in launched} & {"gelu_gate"}, "gate and up are multiplied in the product"
    before, after = ({(i.kernel, i.problem) for i in workload(m, a).items} for m in (stored, made))
    new = after - before
    behind = {"w4a16_norm"} if arch == "sm90" else set()  # the norms of two and four sequences' drafts
    assert {kernel for kernel, _ in new} == {"w4a16_gemm"} | behind | {p.kernel for p in int4}
    assert {p.num_tokens for kernel, p in new if kernel == "w4a16_gemm"} == {1, 2, 4, 8, 16, 32}
    assert all(
        u.phase == "draft" for i in workload(made, a).items if (i.kernel, i.problem) in new for u in i.uses
    )  # fmt: skip
    assert {problem_key(find_kernel(kernel), p).cell for kernel, p in before | after} <= cells_of(name, a), "exported"


def test_generated_weights_are_of_the_same_shapes() -> None:
    drafter, ops = configs("int4")[1], kernel_ops(torch.bfloat16)
    loaded_, made = load_drafter(ASSISTANT, drafter, ops), synthetic_drafter(drafter, ops)
    for (path, a), (again, b) in zip(leaves(loaded_), leaves(made), strict=True):
        assert (path, a.shape, a.dtype) == (again, b.shape, b.dtype)


# -- the option


def test_load_takes_it(tmp_path: Path) -> None:
    session = load(TARGET, draft=ASSISTANT, draft_weights="int4", device="cpu", num_draft_tokens=2)
    assert session.draft_weights == "int4"
    assert "drafting 2 tokens in int4" in repr(session)
    assert load(TARGET, draft=ASSISTANT, device="cpu").draft_weights == "stored"
    assert load(TARGET, draft=False, device="cpu").draft_weights is None
    with pytest.raises(UsageError, match="'int8'"):
        load(TARGET, draft=ASSISTANT, draft_weights="int8", device="cpu")
    shutil.copytree(TARGET, tmp_path / "alone")
    for draft in (True, False):
        with pytest.raises(UsageError, match="need a drafter"):
            load(tmp_path / "alone", draft=draft, draft_weights="int4", device="cpu")


def test_kept_weights_are_the_targets_whatever_the_drafter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One file serves both, and holds nothing of either drafter."""
    shutil.copytree(TARGET, tmp_path / "model")
    shutil.copytree(ASSISTANT, tmp_path / "model" / "assistant")
    how: dict[str, Any] = {"device": "cpu", "keep_repacked": True}
    first = load(tmp_path / "model", draft_weights="int4", **how)
    (kept,) = tmp_path.rglob("*.kerngen")
    made = kept.stat().st_mtime_ns
    held = dict(leaves(first.drafter.weights if first.drafter else None))
    stored, again = (load(tmp_path / "model", draft_weights=w, **how) for w in ("stored", "int4"))
    assert [kept] == list(tmp_path.rglob("*.kerngen"))
    assert kept.stat().st_mtime_ns == made
    assert stored.drafter is not None
    assert again.drafter is not None
    as_stored = load_drafter(ASSISTANT, configs("stored")[1], TorchOps(CPU, torch.float32))
    for (path, ours), (_, want) in zip(leaves(stored.drafter.weights), leaves(as_stored), strict=True):
        assert torch.equal(ours, want), path
    for path, tensor in leaves(again.drafter.weights):
        assert torch.equal(tensor, held[path]), path
    assert not torch.equal(held["pre.weight"], as_stored.pre.weight)


def test_run_says_how_the_drafter_is_kept(kerngen: Kerngen) -> None:
    common = ("run", str(TARGET), "--prompt", "What is a warp?", "--max-new-tokens", "16", "--device", "cpu")
    drafted = (*common, "--draft", str(ASSISTANT), "--num-draft-tokens", "3")
    code, out, err = kerngen(*drafted, "--draft-weights", "int4")
    assert (code, out) == (0, kerngen(*common, "--no-draft")[1])
    assert f"{ASSISTANT} in int4 drafts 3 a step" in err
    assert "in int4" not in kerngen(*drafted)[2]
    for weights in ("stored", "int4"):
        assert json.loads(kerngen(*drafted, "--draft-weights", weights, "--json")[1])["draft_weights"] == weights
    assert json.loads(kerngen(*common, "--no-draft", "--json")[1])["draft_weights"] is None


def test_the_plan_and_doctor_count_it(kerngen: Kerngen) -> None:
    config, drafter = configs("int4")
    want = footprint(config, drafter, torch.bfloat16, 8192).drafter_bytes
    folder = (str(TARGET), "--draft", str(ASSISTANT), "--draft-weights", "int4", "--json")
    plan = json.loads(kerngen("run", *folder, "--plan")[1])
    assert plan["as released"]["drafter_bytes"] == plan["unquantized"]["drafter_bytes"] == want
    out = kerngen.ok("doctor", "--arch", "sm80", "--model", *folder)
    about = json.loads(out)["model"]
    assert about["memory"]["as released"]["drafter"] == want
    assert about["commands"]
    for command in about["commands"]:
        assert f"--draft {ASSISTANT} --draft-weights int4" in command, "it would prepare for another drafter"


def test_its_products_are_among_what_is_prepared(kerngen: Kerngen) -> None:
    """By tune and compile, which take the workload that doctor counts."""
    asked = "--model", str(TARGET), "--draft", str(ASSISTANT), "--draft-weights", "int4", "--device", "A100", "--json"
    counted = json.loads(kerngen.ok("doctor", *asked))["model"]["kernels"]["w4a16_gemm"]
    stored, made = (
        {i.problem for i in workload(model, find_arch("sm80")).items if i.kernel == "w4a16_gemm"}
        for model in (find_model(str(TARGET), str(ASSISTANT), Keeping(w)) for w in ("stored", "int4"))
    )
    assert sum(counted.values()) == len(made)
    assert stored < made


@pytest.mark.parametrize(("args", "message"), [
    (("run", TARGET, "--prompt", "x", "--no-draft"), "--draft-weights int4 and --no-draft contradict"),
    (("run", TARGET, "--plan"), "no drafter goes with"),
    (("bench", "model", "gemma-4-e2b"), "--draft-weights int4 goes with --draft"),
    (("bench", "step", TARGET), "no drafter goes with"),
    (("bench", "profile", TARGET, "--phase", "draft"), "no drafter goes with"),
    (("tune", "--arch", "sm80", "--model", TARGET), "no drafter goes with"),
    (("compile", "--arch", "sm80", "--cases"), f"--draft, {', '.join(KEEPING_OPTIONS)} go with --model"),
    (("compile", "--arch", "sm80", "--model", TARGET), "no drafter goes with"),
    (("doctor",), f"{', '.join(KEEPING_OPTIONS)} go with a --model"),
    (("db", "verify", "none.kgdb"), f"{', '.join(KEEPING_OPTIONS)}, --kernel go with a --model"),
    (("soak", TARGET, "--drafting", "off"), "--drafting off contradicts"),
])  # fmt: skip
def test_where_there_is_no_drafter_it_is_refused(kerngen: Kerngen, args: tuple[Any, ...], message: str) -> None:
    code, out, err = kerngen(*map(str, args), "--draft-weights", "int4")
    assert (code, out) == (2, "")
    assert message in err


def test_the_options_are_named_as_the_command_line_has_them() -> None:
    command = click.command()(keeping_options(lambda kept: kept))
    assert tuple(option.opts[0] for option in command.params) == KEEPING_OPTIONS


def test_soak_runs_it(kerngen: Kerngen) -> None:
    common = ("--draft", str(ASSISTANT), "--draft-weights", "int4", "--backend", "torch", "--device", "cpu", "--json")
    out = kerngen.ok("soak", str(TARGET), "--minutes", "0.02", "--check-minutes", "0", "--max-prompt", "8",
                             "--max-new-tokens", "4", "--max-batch", "2", *common)  # fmt: skip
    assert any(phase["drafted"] for phase in json.loads(out)["phases"])


def test_steps_are_timed_with_it() -> None:
    from kerngen.timing.model_bench import time_model

    config, drafter = configs("int4")
    report = time_model(
        "tiny", config, drafter, [8], tokens=2, num_draft_tokens=2, prefill_chunk=8, backend="torch", device="cpu",
        db_url=None, bundle=None, seed=0,
    )  # fmt: skip
    assert report["draft_weights"] == "int4"
    (row,) = report["rows"]
    assert min(row["step_ms"], row["draft_ms"], row["verify_ms"]) > 0


@pytest.mark.parametrize(("chance", "length"), [(1.0, 3), (0.0, 1)])
def test_acceptance_may_be_assumed(chance: float, length: int) -> None:
    """Whatever tokens generated weights say: all drafts of a step are accepted, or none."""
    from kerngen.timing.model_bench import time_model

    config, drafter = configs("stored")
    report = time_model(
        "tiny", config, drafter, [8], tokens=13, num_draft_tokens=2, assumed_acceptance=chance, prefill_chunk=8,
        backend="torch", device="cpu", db_url=None, bundle=None, seed=0,
    )  # fmt: skip
    assert report["rows"][0]["acceptance_length"] == length
