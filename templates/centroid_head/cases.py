"""Shapes that tests, bench and tuner share: edges first, then the drafters' own.

A sum in another order flips roundings, and with them which centroids are chosen: no tolerance could tell that from a
mistake. So all floats are small multiples of 1/8, whose products fp32 sums exactly in any order. Scores and logits then
have few values, and ties are everywhere.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kerngen.templates.call import Op
from kerngen.templates.centroid_head.op import centroid_greedy, centroid_logits
from kerngen.templates.centroid_head.spec import Problem
from kerngen.templates.common.rows.torch_rows import Draw, poisoned
from kerngen.templates.kernel import Case, asking


def case_for(problem: Problem, **options: Any) -> Case:
    p = problem
    shape = f"c{p.num_centroids}x{p.cluster_size}_k{p.top_k}_h{p.hidden}_{p.dtype}"
    names = [shape, *(() if p.greedy else ("all",)), *options.values(), f"t{p.num_tokens}"]
    return Case("_".join(names), p, p.num_centroids + p.hidden + p.num_tokens, options)


def _cases(
    num_centroids: int, cluster_size: int, top_k: int, hidden: int, *tokens: int, kinds: tuple[str, ...] = ("normal",)
) -> tuple[Case, ...]:
    return tuple(
        case_for(Problem(num_centroids, cluster_size, top_k, hidden, d, greedy, t), kind=k)
        for d in ("bf16", "fp16")
        for greedy in (True, False)
        for k in kinds
        for t in tokens
    )


CASES = (
    *_cases(1, 1, 1, 8, 1, 3),
    *_cases(12, 8, 4, 24, 1, 5, kinds=("normal", "equal", "outside")),  # rows of three vectors, keys of two
    *_cases(33, 3, 33, 72, 2, kinds=("normal", "ties")),  # every centroid chosen; nine vectors for eight lanes
    *_cases(300, 5, 40, 1024, 1, 4),
    *_cases(2048, 16, 32, 256, 1, 8, 9, 64),
    *_cases(2048, 16, 32, 256, 3, kinds=("ties", "equal", "crowded", "nan", "infinite", "outside")),
    *_cases(8192, 1, 256, 64, 2, kinds=("normal", "equal")),
    case_for(Problem(), kind="normal"),
    case_for(Problem(greedy=False, num_tokens=2), kind="normal"),
)


def inputs(case: Case, device: torch.device | str) -> dict[str, Any]:
    """Every argument but the workspace. token_ids are a permutation of the vocabulary, floats normal, in eighths, and
    by options["kind"]:

    ties: y is zero but for one column; equal: all of y is zero; crowded: the best centroids follow each other, best
    last; nan: a NaN in the first y; infinite: infinities in two centroids and a row; outside: tokens just and far
    outside the vocabulary. ids and logits are poison.
    """
    p: Problem = case.problem
    draw = Draw(case.seed, device)
    vocab = p.num_centroids * p.cluster_size

    def eighths(*shape: int) -> Tensor:
        return draw.normal(*shape, dtype=p.dtype, std=4.0).clamp_(-8, 8).round_().div_(8)

    y = 2 * eighths(p.num_tokens, p.hidden)
    centroids, embed = eighths(p.num_centroids, p.hidden), eighths(vocab, p.hidden)
    token_ids = draw.permutation(vocab).view(p.num_centroids, p.cluster_size)
    match case.options.get("kind", "normal"):
        case "ties":
            y[:, 1:] = 0.0
        case "equal":
            y[:] = 0.0
        case "crowded":
            y[:, 0], y[:, 1:8] = 2.0, 0.5
            centroids[:] = centroids[:, :1].abs() / 8
            first = p.num_centroids // 3
            steps = torch.arange(8 * p.top_k, device=device)
            centroids[first : first + 8 * p.top_k, 0] = (1 + steps // 64).to(centroids.dtype)
        case "nan":
            y[0, 3] = float("nan")
        case "infinite":
            y[:, 5] = 1.0
            centroids[7, 5], centroids[p.num_centroids - 1, 5] = float("inf"), -float("inf")
            embed[token_ids[7, p.cluster_size // 2], 5] = float("inf")
        case "outside":
            every = token_ids.view(-1)[:: p.cluster_size + 1]  # not in each row at the same place
            every[::2], every[1::2] = -1, vocab
    shape = (p.num_tokens,) if p.greedy else (p.num_tokens, p.num_selected)
    return {
        "ids": torch.full(shape, -(2**62), dtype=torch.int64, device=device),
        "logits": None if p.greedy else poisoned(*shape, dtype="fp32", device=device, value=-1e30),
        "y": y,
        "centroids": centroids,
        "token_ids": token_ids,
        "embed": embed,
        "num_tokens": p.num_tokens,
    }


def op_call(case: Case, inputs: dict[str, Any]) -> tuple[Op[..., Any], dict[str, Any]]:
    """The op that asks for this case, and its arguments."""
    return asking(centroid_greedy if case.problem.greedy else centroid_logits, case, inputs)
