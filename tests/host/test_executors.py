"""One description of the model, three executors: what the reference executor computes and the record lists.

The kernel path (ops, engine, drafting) runs on the CPU with every call answered by its folder's fp32 reference, and
must give the torch backend's tokens, one by one, for every member of the family. What any run asks of the kernels
must be in the record that its workload is.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_gemma
import torch

from kerngen.arch import find_arch
from kerngen.runtime.batch import Batch
from kerngen.runtime.config import MAX_MTP_DRAFTS, Arm, ModelConfig, read_drafter_config, read_model_config
from kerngen.runtime.drafters import AnyDrafter, drafter_for
from kerngen.runtime.drafting import MtpDrafter
from kerngen.runtime.engine import Engine, Request
from kerngen.runtime.engine.plan import NewRow, PrefillChunk, SamplingMode, StepPlan
from kerngen.runtime.executors.record import Record
from kerngen.runtime.executors.reference import Reference
from kerngen.runtime.model import Gemma4
from kerngen.runtime.ops import Ops
from kerngen.runtime.ops.eager import TorchOps
from kerngen.runtime.ops.kernels import KernelOps
from kerngen.runtime.sampling import Sampling
from kerngen.runtime.weights.loader import load_drafter, load_model
from kerngen.runtime.weights.synthetic import synthetic_drafter, synthetic_model
from kerngen.runtime.world import World
from kerngen.templates import find_kernel
from kerngen.templates.kernel import static_fields
from kerngen.templates.values import AttnBatch, HeadNorms, KVView
from kerngen.tuning_db.read.ids import canonical
from kerngen.workload.workload import MODELS, Model, find_model, workload

# Ways to choose a token: forbidden tokens, and how.
WAYS = tuple((suppressed, sampling) for suppressed in ((), (1,)) for sampling in (Sampling(), Sampling(0.7, 40, 0.9)))
TINY = Path(__file__).parents[2] / "examples" / "tiny"
# What the kernels take: head dims of 128 and more, rows in whole vectors. Windows and lengths stay tiny.
SERVED = {"head_dim": 128, "global_head_dim": 256, "hidden_size": 64, "intermediate_size": 96}
VARIANTS = [(variant, 0) for variant in tiny_gemma.VARIANTS] + [("dense", 12)]
CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=VARIANTS, ids=lambda v: v[0] + ("_centroids" if v[1] else ""))
def folders(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and its assistant, of each kind of model in the family."""
    variant, centroids = request.param
    root = tmp_path_factory.mktemp("family")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SERVED.items():
            patch.setitem(tiny_gemma.BASE, name, value)
        tiny_gemma.make_target(root / "target", variant)
        tiny_gemma.make_assistant(root / "assistant", variant, num_centroids=centroids)
    return root / "target", root / "assistant"


def load(target: Path, assistant: Path, ops: Ops) -> tuple[Gemma4, MtpDrafter]:
    config = read_model_config(target)
    model = Gemma4(config, load_model(target, config, ops), ops)
    drafter_config = read_drafter_config(assistant, config)
    return model, MtpDrafter(drafter_config, load_drafter(assistant, drafter_config, ops), model)


def prompt(config: ModelConfig, length: int) -> list[int]:
    ids = torch.randint(3, config.vocab_size, (length,), generator=torch.Generator().manual_seed(length))
    return [config.bos_id, *ids.tolist()[1:]]


@pytest.mark.parametrize("drafts", [0, MAX_MTP_DRAFTS])  # 2 of a batch in the next test
def test_the_kernel_path_gives_the_oracles_tokens(folders: tuple[Path, Path], drafts: int) -> None:
    """Prompts past the window, chunks of odd sizes, with and without drafting."""
    generated = []
    for ops in (TorchOps(CPU, torch.float32), KernelOps(Reference(), torch.float32)):
        model, drafter = load(*folders, ops)
        engine = Engine(model, drafter, max_len=80, num_draft_tokens=drafts, prefill_chunk=11, page_size=16)
        made = [engine.generate(prompt(model.config, n), max_new_tokens=12).tokens for n in (1, 12, 25)]
        sampled = engine.generate(prompt(model.config, 9), max_new_tokens=12, sampling=Sampling(0.8, 20, 0.9, seed=3))
        generated.append([*made, sampled.tokens])
    assert generated[0] == generated[1]


def test_the_kernel_path_takes_batches(folders: tuple[Path, Path]) -> None:
    """Ragged prefill, rows that stand for nobody and drafts of a batch, against the oracle one by one."""
    model, _ = load(*folders, TorchOps(CPU, torch.float32))
    requests = [Request(prompt(model.config, n), 6) for n in (1, 12, 25)]
    requests.append(Request(prompt(model.config, 9), 6, Sampling(0.8, 20, 0.9, seed=3)))
    alone = Engine(model, max_len=40, page_size=16, prefix_caching=False)
    expected = [alone.generate_many([r])[0].tokens for r in requests]
    model, drafter = load(*folders, KernelOps(Reference(), torch.float32))
    engine = Engine(
        model, drafter, max_len=40, max_batch=5, num_draft_tokens=2, prefill_chunk=13, page_size=16, buckets=(5,)
    )
    assert [g.tokens for g in engine.generate_many(requests)] == expected


def test_the_tiny_checkpoint_too() -> None:
    """W4A16 weights in the kernel's order, a trained drafter whose drafts are accepted."""
    folder = TINY / "gemma-4-tiny-w4a16"
    assistant = TINY / "gemma-4-tiny-assistant"
    generated = []
    for ops in (TorchOps(CPU, torch.float32), KernelOps(Reference(), torch.float32)):
        model, drafter = load(folder, assistant, ops)
        result = Engine(model, drafter, max_len=96).generate(prompt(model.config, 20), max_new_tokens=24)
        generated.append(result.tokens)
    assert generated[0] == generated[1]


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize(
    "ops", [TorchOps(CPU, torch.float32), KernelOps(Reference(), torch.float32)], ids=lambda o: o.name
)
def test_a_layer_that_makes_k_and_v_needs_slots_and_positions_for_them(ops: Ops, ragged: bool) -> None:
    kv = KVView(*(torch.zeros(1, 1, 16, 128) for _ in range(2)))
    at, table = torch.zeros(1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int32)
    heads = HeadNorms(torch.ones(128), torch.ones(64), 64, 1e-6, torch.ones(128), 1)
    run = ops.qkv_norm_rope if ragged else ops.attend_decode
    for lacking, why in (({"positions": at}, "needs the slots"), ({"slot_mapping": at}, "the batch has none")):
        with pytest.raises(TypeError, match=why):
            run(torch.zeros(1, 384), heads, kv, AttnBatch(table, table[0], **lacking))
    alone = replace(heads, k_weight=None)  # of q: nothing is written
    attended = ops.attend_decode(torch.zeros(1, 128), alone, kv, AttnBatch(table, table[0] + 1, positions=at))
    assert attended.shape == (1, 1, 128)
    with pytest.raises(TypeError, match="has q alone"):
        ops.qkv_norm_rope(torch.zeros(1, 384), alone, kv, AttnBatch(table, table[0], positions=at))


class Asked:
    """Collects the static problems that a run asks for."""

    def __init__(self, world: World) -> None:
        self.found: set[tuple[str, str]] = set()
        self.executor = Record(
            lambda kernel, problem, where: self.found.add(_static(kernel, problem)), lambda name: None, world=world
        )


def _static(kernel: str, problem: Any) -> tuple[str, str]:
    return kernel, canonical(static_fields(problem))


def _listed(model: Model, arch: str) -> set[tuple[str, str]]:
    return {_static(i.kernel, i.problem) for i in workload(model, find_arch(arch)).items}


@torch.inference_mode()
def _run_all(model: Gemma4, drafter: AnyDrafter | None) -> None:
    """Everything that a generation may do, with every draft length that the engine permits, on meta tensors."""
    ops = model.ops
    most = 0 if drafter is None else drafter.policy.max_drafts
    for drafts in range(most + 1) if most <= MAX_MTP_DRAFTS else (0, 1, 3, 4, most):
        for suppressed, sampling in WAYS if drafts in (0, 3) else WAYS[:1]:
            target = Gemma4(model.config, model.weights, ops, suppressed_ids=suppressed)
            engine = Engine(target, drafter, max_len=300, max_batch=5, num_draft_tokens=drafts)
            for batch in (1, 2, 5):
                engine.runner.step(batch, Arm(drafts), SamplingMode.for_sampling([sampling]), 512)
    for pieces in ([(1, 0)], [(5, 0)], [(63, 64)], [(77, 200)], [(7, 0), (1, 3), (70, 129)]):
        for is_last in (False, True):
            new_row = NewRow(300, sampling) if is_last else None
            chunks = [PrefillChunk((3,) * n, start, ((1,) * 5,) * 2, new_row) for n, start in pieces]
            engine.runner.run(StepPlan(0, chunks=tuple(chunks), first_mode=SamplingMode.for_sampling([sampling])))
    for tokens, start in ((1, 0), (63, 64)):
        ids = torch.empty(tokens, dtype=torch.int64, device="meta")
        model.forward(Batch.prefill(ids, start, engine.cache.rows(1)), engine.cache.rows(1), outputs="last")


@pytest.mark.parametrize(("name", "arch"), [*((name, "sm90") for name in MODELS), ("gemma-4-31b", "sm70")])
def test_no_run_asks_for_a_static_problem_that_the_workload_lacks(name: str, arch: str) -> None:
    _check_record(find_model(name), arch)


@pytest.mark.parametrize(("name", "world"), [("gemma-4-31b", World(1, 2)), ("gemma-4-26b-a4b", World(3, 4))])
def test_nor_does_a_rank_of_a_divided_model(name: str, world: World) -> None:
    _check_record(find_model(name).divided(world), "sm90")


@pytest.mark.parametrize("arch", ["sm80", "sm90"])
def test_nor_does_a_run_with_a_dflash_drafter(arch: str) -> None:
    _check_record(find_model("gemma-4-26b-a4b", "dflash"), arch)


def test_nor_does_a_run_of_any_member_of_the_family(folders: tuple[Path, Path]) -> None:
    target, assistant = folders
    _check_record(find_model(str(target), str(assistant)), "sm90")


def _check_record(found: Model, arch: str) -> None:
    asked = Asked(found.target.world)
    dtype = torch.bfloat16 if find_arch(arch).has_bf16 else torch.float16
    ops = KernelOps(asked.executor, dtype)
    model = Gemma4(found.target, synthetic_model(found.target, ops), ops)
    drafter = None
    if found.drafter is not None:
        drafter = drafter_for(found.drafter, synthetic_drafter(found.drafter, ops), model)
    _run_all(model, drafter)
    assert asked.found, "nothing was recorded"
    lacking = asked.found - _listed(found, arch)
    assert not lacking, f"the workload lacks {sorted(lacking)}"


def test_the_reference_rounds_as_the_kernels_do(folders: tuple[Path, Path]) -> None:
    """In bf16 the two paths are as near to fp32 as each other, not equal: kernels round once, torch at each step."""
    config = read_model_config(folders[0])
    ids = torch.tensor(prompt(config, 24))
    logits = {}
    for name, ops in {
        "exact": TorchOps(CPU, torch.float32),
        "torch": TorchOps(CPU, torch.bfloat16),
        "kernels": KernelOps(Reference(), torch.bfloat16),
    }.items():
        model, _ = load(*folders, ops)
        cache = Engine(model, max_len=40, page_size=16).cache
        logits[name] = model.logits(model.forward(Batch.prefill(ids, 0, cache), cache))
    far = {n: float((logits[n] - logits["exact"]).norm() / logits["exact"].norm()) for n in ("torch", "kernels")}
    assert far["kernels"] < 2 * far["torch"] + 1e-3, far


def test_the_list_of_what_no_kernel_serves_is_met() -> None:
    """Each name in OUTSIDE is one that some model meets: nothing is listed that runs in a kernel by now."""
    from kerngen.runtime.fallbacks import FALLBACKS

    moe = find_model("gemma-4-26b-a4b")
    unpacked = replace(moe, target=replace(moe.target, quant=None))  # as its bf16 release
    models = [*map(find_model, MODELS), unpacked, moe.divided(World(1, 2))]
    met = {name for model in models for name in workload(model, find_arch("sm90")).missing}
    of_gpus_apart = {"the chosen token's logit"}  # whose ranks share no memory: test_tensor_parallel_forward.py
    assert met == set(FALLBACKS) - of_gpus_apart
    assert find_kernel("moe_router") is not None
