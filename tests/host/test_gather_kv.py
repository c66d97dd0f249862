"""Prompts over a compressed cache: what is gathered in 16 bits, by the kernel's own source, and who decides."""

from __future__ import annotations

import ctypes
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import kernel_on_cpu
import pytest
import torch
from torch import Tensor

from kerngen.arch import Target, find_arch
from kerngen.compiler.render import render
from kerngen.errors import ProblemError
from kerngen.runtime.engine import Engine
from kerngen.runtime.executors.reference import Reference
from kerngen.runtime.ops import kernels
from kerngen.runtime.ops.kernels import KernelOps, heads_at_once
from kerngen.runtime.session import load
from kerngen.templates import Case, find_kernel
from kerngen.templates.call import Call
from kerngen.templates.common.attention.kv_formats_torch import randomize
from kerngen.templates.common.attention.tile_lists import num_entries, num_lists
from kerngen.templates.gather_kv.op import gather_kv, keys_seen
from kerngen.templates.kernel import Kernel
from kerngen.templates.values import INT8, KV_FORMATS, PLAIN, SHARED_INT8, AttnBatch, KVFormat, KVView, Mask
from kerngen.timing.measure import compare

KERNEL: Kernel = find_kernel("gather_kv")
SM90 = Target.of(find_arch("sm90"))
CPU = torch.device("cpu")
BF16 = [c for c in KERNEL.cases.CASES if c.problem.dtype == "bf16" and c.problem.num_keys < 600]


@pytest.mark.skipif(kernel_on_cpu.COMPILER is None, reason="neither g++ nor clang++ is on the PATH")
@pytest.mark.parametrize("case", [c for c in BF16 if "window" in c.name or "of-3" in c.name], ids=str)
def test_the_kernel_gathers_what_the_reference_does(case: Case, tmp_path: Path) -> None:
    config = KERNEL.config_type(128, 2)
    inputs = KERNEL.cases.inputs(case, CPU)
    expected = KERNEL.reference.expected(case.problem, inputs)
    source = str(render(KERNEL, case.problem, config, SM90))
    library = kernel_on_cpu.on_cpu(source, KERNEL.name, tmp_path)
    (launch,), (args,) = KERNEL.launches(case.problem, config, SM90), KERNEL.body(config, SM90.arch).args.values()
    given = [ctypes.c_void_p(inputs[a.name].data_ptr()) if a.kind == "ptr" else inputs[a.name] for a in args]
    library.set_grid(launch.grid[0], launch.grid[1], 1)
    library.run(math.prod(launch.grid), launch.block[0], 0, *given)
    result = compare(KERNEL, case, inputs, expected)
    assert result.ok, result.message
    for name in ("k_out", "v_out"):  # what nobody sees is not written
        assert torch.equal(inputs[name].isnan(), expected[name].isnan())


def cache(form: KVFormat, heads: int = 2, pages: int = 40, dim: int = 512) -> KVView:
    torch.manual_seed(len(form.name))
    made = form.allocate((pages, heads, 64, dim), torch.bfloat16, CPU)
    randomize(made)
    return made


def batch_of(q_lens: list[int], kv_lens: list[int], mask: Mask, most: int = 0) -> AttnBatch:
    pages = -(-max(kv_lens) // 64)
    table = 1 + torch.randperm(39, generator=torch.Generator().manual_seed(1))[: len(kv_lens) * pages].int()
    starts = torch.tensor([0, *torch.tensor(q_lens).cumsum(0).tolist()], dtype=torch.int32)
    return AttnBatch(table.view(len(kv_lens), pages), torch.tensor(kv_lens, dtype=torch.int32), mask,
                     most or max(kv_lens), cu_seqlens_q=starts, max_seqlen_q=max(q_lens))  # fmt: skip


class Told(Reference):
    """The reference executor, and what it ran."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = list[tuple[str, Any]]()

    def run(self, call: Call[Any], where: str) -> Any:
        self.asked.append((call.kernel, call.problem))
        return super().run(call, where)


def attended(q: Tensor, kv: KVView, batch: AttnBatch) -> tuple[Tensor, list[tuple[str, Any]]]:
    executor = Told()
    return KernelOps(executor, q.dtype).attn_prefill(q, kv, batch), executor.asked


def lists_of(q_lens: list[int], most: int, heads: int) -> Mask:
    """Some tiles of each block of queries, others for each head."""
    n = num_lists(sum(q_lens), len(q_lens))
    lists = torch.zeros(n, heads, num_entries(most), dtype=torch.int32)
    lists[:, 0, :2], lists[:, 1:, :2] = torch.tensor([0, 2]), torch.tensor([1, 2])
    return Mask(counts=torch.full((n, heads), 2, dtype=torch.int32), lists=lists)


@pytest.mark.parametrize("name", ["int8", "shared", "shared_int8"])
@pytest.mark.parametrize("mask", ["causal", "window", "ends", "lists"])
@pytest.mark.parametrize("at_once", [2, 1])
def test_attention_is_the_same_by_gathered_keys(
    name: str, mask: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all heads together and of one after the other: what attn_prefill converts itself, to the bit."""
    q_lens, kv_lens = [70, 1, 200], [300, 90, 320]
    masks = {
        "causal": Mask(),
        "window": Mask(window=100),
        "ends": Mask(window=100, ends=torch.cat([torch.arange(kv - n, kv).clamp(min=kv - n + 20) for n, kv in zip(
            q_lens, kv_lens, strict=True)]).int()),
        "lists": lists_of(q_lens, 320, 2),
    }  # fmt: skip
    kv, batch = cache(KV_FORMATS[name]), batch_of(q_lens, kv_lens, masks[mask])
    q = torch.randn(sum(q_lens), 4, 512).to(torch.bfloat16)
    monkeypatch.setattr(kernels, "GATHERED_BYTES", (1 << 40) if at_once == 2 else 0)
    monkeypatch.setattr(kernels, "GATHERED_BYTES_OF_ONE", 1 << 40)
    found, asked = attended(q, kv, batch)
    assert [k for k, _ in asked] == ["gather_kv", "attn_prefill"] * (2 // at_once)
    assert {p.kv_format for k, p in asked if k == "attn_prefill"} == {"plain"}
    monkeypatch.setattr(kernels, "GATHERED_BYTES", 0)
    monkeypatch.setattr(kernels, "GATHERED_BYTES_OF_ONE", 0)
    wanted, direct = attended(q, kv, batch)
    assert [(k, p.kv_format) for k, p in direct] == [("attn_prefill", name)]
    assert torch.equal(found, wanted)


def test_few_queries_behind_many_keys_leave_the_cache_as_it_is() -> None:
    """Of the 31B: memory goes with the tokens of a chunk, whatever the context."""
    full = KVView(*(torch.empty(1, 4, 64, INT8.row_entries(512), dtype=torch.int8) for _ in range(2)), INT8)

    def heads(queries: int, keys: int, sequences: int = 1) -> int:
        table = torch.empty(sequences, -(-keys // 64), dtype=torch.int32, device="meta")
        batch = AttnBatch(table, table[:, 0], max_kv_len=keys, cu_seqlens_q=table, max_seqlen_q=queries)
        return heads_at_once(queries, full, batch)

    assert [heads(2048, keys) for keys in (2048, 16384, 32768, 65536, 131072, 262144)] == [4, 4, 2, 1, 1, 1]
    assert [heads(8192, keys) for keys in (8192, 65536)] == [4, 4]
    assert [heads(512, keys) for keys in (4096, 16384, 65536, 131072)] == [4, 1, 1, 0]
    assert heads(64, 131072) == heads(0, 64) == heads(512, 16384, 8) == 0
    plain = KVView(*(torch.empty(1, 4, 64, 512) for _ in range(2)), PLAIN)
    table = torch.zeros(1, 4, dtype=torch.int32)
    assert heads_at_once(256, plain, AttnBatch(table, table[:, 0], cu_seqlens_q=table, max_seqlen_q=256)) == 0


def test_a_window_bounds_what_is_gathered() -> None:
    batch = batch_of([512], [2000], Mask(window=1024), most=1 << 17)
    assert keys_seen(batch, 64) == 1600  # 1,535 keys, and so many pages wherever they begin
    assert keys_seen(replace(batch, mask=Mask()), 64) == 1 << 17
    call = gather_kv(cache(SHARED_INT8), batch, torch.bfloat16, 1, 1)
    k, _, table = call.result
    assert k.shape == (25, 1, 64, 512)
    assert table.shape == batch.block_table.shape


@pytest.mark.parametrize(("fields", "says"), [
    ({"kv_format": "plain"}, "a plain cache is read where it lies"),
    ({"heads": 0}, r"heads=0 is not in 1\.\.65535"),
    ({"num_keys": 0}, "num_keys=0 is not positive"),
    ({"head_dim": 64}, "gather_kv has 128, 256, 512"),
])  # fmt: skip
def test_what_it_does_not_take_is_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ProblemError, match=says):
        KERNEL.problem_type(**fields)


def test_heads_beyond_the_cache_are_refused() -> None:
    with pytest.raises(ProblemError, match="first_head=1 heads=2: the cache has 2"):
        gather_kv(cache(INT8), batch_of([5], [5], Mask()), torch.bfloat16, 1, 2)


@pytest.mark.parametrize(("dtype", "is_captured"), [("int8", True), ("int4", False)])
def test_forwards_that_gather_keys_of_any_context_are_not_captured(
    dtype: str, is_captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = Path(__file__).resolve().parents[2] / "examples" / "tiny" / "gemma-4-tiny-w4a16"
    session = load(tiny, kv_cache_dtype=dtype, draft=False, device="cpu", backend="torch")
    monkeypatch.setattr(session.ops, "supports_graphs", True, raising=False)
    assert bool(Engine(session.model, None, max_len=100, max_batch=1).runner.short_sizes) == is_captured
