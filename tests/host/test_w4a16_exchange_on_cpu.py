"""w4a16_norm's norm of several ranks, on the host's threads: what has arrived goes on to the peers, and the sum is
normed. The product before it, which takes tensor cores, is what the test puts into the workspace.
"""

from __future__ import annotations

import ctypes
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import kernel_on_cpu
import pytest
import torch
from torch import Tensor

from kerngen.arch import Target, find_arch
from kerngen.compiler.render import Chunk, assemble, render
from kerngen.templates import find_kernel
from kerngen.templates.common.rows.spec import row_threads
from kerngen.templates.exchange_norm.reference import expected_of
from kerngen.templates.exchange_norm.spec import Problem as Exchange
from kerngen.templates.exchange_norm.spec import exchange_bytes
from kerngen.templates.w4a16_norm.spec import Problem

pytestmark = pytest.mark.skipif(kernel_on_cpu.COMPILER is None, reason="neither g++ nor clang++ is on the PATH")

KERNEL = find_kernel("w4a16_norm")
TARGET = Target.of(find_arch("sm90"))
N, MAX_ROWS, LAUNCHES = 288, 8, 6
HEADERS = ("common/rows/norm.cuh", "common/pipeline/rank_rows.cuh")
SHAPE = f"struct Shape {{ static constexpr int N = {N}, BLOCK_M = 4; }};"


def without_product(source: str) -> str:
    """The norm's text alone, behind the headers that it takes and a Shape that says what it reads of that."""
    norm = source[
        source.index("constexpr int RANKS") : source.index('extern "C" __global__ void __launch_bounds__(Str')
    ]
    text = "\n".join([*(f'#include "{name}"' for name in HEADERS), SHAPE, norm])
    return str(assemble([Chunk(text, "", 1)], TARGET.arch, KERNEL.shared))


class Ranks:
    """Each launch has rows of y and a residual, the norms are those of all."""

    def __init__(self, ranks: int, vecs: int, folder: Path) -> None:
        self.problem = Problem(N, 256, residual_dtype="fp32", has_scalar=True, ranks=ranks)
        configs = (c for c in KERNEL.candidates(self.problem, TARGET) if not c.cta_pipeline)
        config = KERNEL.config_type(**{**_fields(next(configs)), "vecs_per_thread": vecs})
        source = without_product(str(render(KERNEL, self.problem, config, TARGET)))
        source = source.replace("POLLS_A_LOOK = 1024", "POLLS_A_LOOK = 16")
        self.library = kernel_on_cpu.on_cpu(source, "norm_of_posts", folder, threads=True)
        self.threads = row_threads(N, vecs)
        self.abort = torch.zeros(1, dtype=torch.int32)
        self.memory = torch.zeros(ranks, exchange_bytes(ranks, MAX_ROWS, N), dtype=torch.uint8)
        self.addresses = torch.tensor([*(m.data_ptr() for m in self.memory), self.abort.data_ptr()])
        self.norms = [torch.randn(N).abs().add(0.5).bfloat16() for _ in range(2)]
        self.scalar = torch.tensor([0.7]).bfloat16()

    def launch(self, rank: int, y: Tensor, residual: Tensor, pause_us: int) -> dict[str, Tensor]:
        out, residual_out = torch.full_like(y, float("nan")), torch.full_like(residual, float("nan"))
        posts = y.clone().view(torch.int16)
        posts[posts == 0] = -0x8000  # as it is posted
        pointers = (residual_out, out, residual, self.norms[0], self.scalar, self.norms[1], posts)
        self.library.run(len(y), self.threads, pause_us, *(ctypes.c_void_p(t.data_ptr()) for t in pointers),
                         ctypes.c_float(1e-6), ctypes.c_void_p(self.addresses.data_ptr()), ctypes.c_int(rank),
                         ctypes.c_int(MAX_ROWS))  # fmt: skip
        assert not posts.any(), "y is zeroed again"
        return {"residual_out": residual_out, "out": out}


def _fields(config: Any) -> dict[str, Any]:
    return {name: getattr(config, name) for name in type(config).__dataclass_fields__}


@pytest.mark.parametrize(("ranks", "vecs"), [(2, 1), (3, 2), (5, 1)])
def test_what_has_arrived_is_summed_over_ranks_and_normed(ranks: int, vecs: int, tmp_path: Path) -> None:
    """Launches of other numbers of tokens behind each other, with ranks that are late: the same bits on all."""
    torch.manual_seed(ranks)
    draw, on = random.Random(ranks), Ranks(ranks, vecs, tmp_path)
    tokens = [draw.randint(1, 4) for _ in range(LAUNCHES)]
    ys = [torch.randn(ranks, t, N).mul(torch.rand(ranks, t, N) > 0.1).bfloat16() for t in tokens]
    residuals = [torch.randn(t, N) for t in tokens]
    timer = threading.Timer(120.0, lambda: on.abort.fill_(1))  # where words are lost none would end
    timer.start()

    def run(rank: int) -> list[dict[str, Tensor]]:
        pauses = [draw.choice((0, 0, 60_000)) for _ in tokens]
        return [on.launch(rank, y[rank], r, p) for y, r, p in zip(ys, residuals, pauses, strict=True)]

    with ThreadPoolExecutor(ranks) as pool:
        made = list(pool.map(run, range(ranks)))
    timer.cancel()
    for i, (y, residual) in enumerate(zip(ys, residuals, strict=True)):
        asked = Exchange(ranks, N, "bf16", "fp32", has_scalar=True, num_tokens=len(residual))
        given = {"residual": residual, "post_weight": on.norms[0], "layer_scalar": on.scalar,
                 "next_weight": on.norms[1], "eps": 1e-6}  # fmt: skip
        for name, want in expected_of(asked, [given | {"h": h} for h in y]).items():
            for rank in range(ranks):
                torch.testing.assert_close(made[rank][i][name].float(), want, rtol=2**-6, atol=2**-6)
                assert torch.equal(made[rank][i][name], made[0][i][name]), "bits differ from rank to rank"
    words = 4 * ranks * MAX_ROWS * N
    assert not on.memory[:, :words].any(), "a word that is not zero would be taken for the next launch's"


def test_a_rank_whose_peer_is_gone_leaves_once_it_is_told(tmp_path: Path) -> None:
    on = Ranks(2, 1, tmp_path)
    on.abort.fill_(1)
    made = on.launch(0, torch.randn(2, N).bfloat16(), torch.randn(2, N), 0)
    assert made["out"].isnan().all()
