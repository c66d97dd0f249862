"""centroid_head: a drafter's head over the tokens of the best centroids, in two launches.

centroid_scores multiplies the centroids with y, rounds as a dense product does and leaves 16-bit keys in that order in
the workspace. Each block of centroid_tokens finds the best centroids itself, then multiplies its share of their tokens'
rows; for the greedy token the blocks leave their best with an atomic maximum, and the last one to finish writes the id.
Nobody waits for a block of the same launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from kerngen.arch import Arch, Target
from kerngen.templates.common.rows.spec import (
    ELEMENT_BYTES,
    INT32_MAX,
    VEC,
    require,
    require_dtypes,
    require_tokens,
    require_vectors,
)
from kerngen.templates.kernel import Arg, Body, Cost, Launch, TokenProblem, Traffic, args

MAX_CENTROIDS = 8192
MAX_TOP_K = 256
MAX_HIDDEN = 1024
MAX_ROW_VECS = 4  # vectors of a row that a lane holds
MAX_KEYS = 32  # centroids' keys that a thread of centroid_tokens holds
SCORE_TOKENS = 8  # that share a read of the centroids in a block of centroid_scores


@dataclass(frozen=True, slots=True)
class Problem(TokenProblem):
    """y [num_tokens, hidden], centroids [num_centroids, hidden], token_ids [num_centroids, cluster_size] int64, embed
    [num_centroids * cluster_size, hidden], floats in dtype -> of each y, among the tokens of the top_k centroids c with
    the greatest y . c, in falling order of that and within a centroid as token_ids has them:

    greedy: ids [num_tokens] int64, the token with the greatest y . embed[id], the first on a tie. Else all of them, ids
    [num_tokens, top_k * cluster_size] int64, and logits, those products, fp32. Both products are rounded to dtype. Of
    equal centroids the lower comes first; NaN counts as the greatest. A token outside embed has the logit NaN, and
    nothing is read for it.
    """

    num_centroids: int = 2048
    cluster_size: int = 128
    top_k: int = 32
    hidden: int = 256
    dtype: str = "bf16"
    greedy: bool = True
    num_tokens: int = 1

    def __post_init__(self) -> None:
        require_dtypes(self.dtype)
        require_vectors(hidden=self.hidden)
        require(self.hidden <= MAX_HIDDEN, f"hidden={self.hidden} is more than {MAX_HIDDEN}")
        count = self.num_centroids
        require(0 < count <= MAX_CENTROIDS, f"num_centroids={count} is not in 1..{MAX_CENTROIDS}")
        limit = min(MAX_TOP_K, count)
        require(0 < self.top_k <= limit, f"top_k={self.top_k} is not in 1..{limit} (num_centroids={count})")
        size, most = self.cluster_size, INT32_MAX // count
        require(0 < size <= most, f"cluster_size={size} is not in 1..{most} (num_centroids={count})")
        require_tokens(self.num_tokens)

    @property
    def num_selected(self) -> int:
        """Tokens of the best centroids: the rows that each y is multiplied with."""
        return self.top_k * self.cluster_size


@dataclass(frozen=True, slots=True)
class Config:
    lanes_per_row: int = 8
    score_warps: int = 4  # of a block of centroid_scores
    num_warps: int = 8  # of a block of centroid_tokens
    rows_per_block: int = 32  # of the selected tokens


SPACE = {
    "lanes_per_row": (8, 16, 32),
    "score_warps": (2, 4, 8),
    "num_warps": (4, 8, 16),
    "rows_per_block": (32, 64, 128, 256, 512, 1024),
}
REGISTERS = 64  # a thread's, about
ARGS = {
    "centroid_scores": (
        *args("ptr", "y", "centroids", "workspace"),
        Arg("num_tokens", "i32"),
    ),
    "centroid_tokens": (
        Arg("ids", "ptr", align=8),
        *args("ptr", "logits", "y"),
        Arg("token_ids", "ptr", align=8),
        *args("ptr", "embed", "workspace"),
    ),
}
BODIES = (Body("kernel.cu.jinja", ARGS, SPACE),)
OUTPUTS = ("ids", "logits")


def why_invalid(problem: Problem, config: Config, target: Target) -> str | None:
    p, c = problem, config
    vecs = p.hidden // VEC
    if (held := ceil(vecs / c.lanes_per_row)) > MAX_ROW_VECS:
        return f"lanes_per_row={c.lanes_per_row} hold {held} vectors of a row each; at most {MAX_ROW_VECS}"
    if c.lanes_per_row > 8 and vecs <= c.lanes_per_row // 2:
        return f"lanes_per_row={c.lanes_per_row} for the {vecs} vectors of a row; {c.lanes_per_row // 2} do"
    if (keys := _keys_per_thread(p, c)) > MAX_KEYS:
        return f"num_warps={c.num_warps} hold {keys} keys a thread; at most {MAX_KEYS}"
    if c.rows_per_block < (at_once := 32 * c.num_warps // c.lanes_per_row):
        return f"rows_per_block={c.rows_per_block}; {c.num_warps} warps take {at_once} rows at once"
    if c.rows_per_block > 32 and c.rows_per_block // 2 >= p.num_selected:
        return f"rows_per_block={c.rows_per_block} for {p.num_selected} rows; {c.rows_per_block // 2} do"
    if (blocks := max(_score_blocks(p, c), _token_blocks(p, c))) > INT32_MAX:
        return f"{blocks:,} blocks; at most {INT32_MAX:,}"
    return None


def candidates(problem: Problem, target: Target) -> Sequence[Config]:
    """The fewest lanes a row, whose loads are the most under way. Each block of few rows finds the best centroids anew;
    of many rows, blocks leave SMs idle.
    """
    lanes = next(n for n in SPACE["lanes_per_row"] if ceil(problem.hidden / VEC / n) <= MAX_ROW_VECS)
    return [Config(lanes, score_warps=w, rows_per_block=r) for r in SPACE["rows_per_block"] for w in (4, 2)]


def expected_registers(problem: Problem, config: Config, target: Target) -> int:
    return REGISTERS


def _keys_per_thread(p: Problem, c: Config) -> int:
    return VEC * ceil(_padded(p) / VEC / (32 * c.num_warps))


def _padded(p: Problem) -> int:
    """The centroids, in whole vectors of keys."""
    return ceil(p.num_centroids / VEC) * VEC


def _parts(p: Problem, c: Config) -> int:
    """Blocks of centroid_tokens that share a y."""
    return ceil(p.num_selected / c.rows_per_block)


def _token_blocks(p: Problem, c: Config) -> int:
    return p.num_tokens * _parts(p, c)


def _score_blocks(p: Problem, c: Config) -> int:
    return ceil(p.num_centroids * c.lanes_per_row / (32 * c.score_warps)) * ceil(p.num_tokens / SCORE_TOKENS)


def constants(problem: Problem, config: Config, arch: Arch) -> dict[str, Any]:
    return {
        "SCORE_TOKENS": SCORE_TOKENS,
        "TOKEN_BYTES": _token_bytes(problem),
        "SELECTION_BYTES": _selection_bytes(problem, config),
    }


def _token_bytes(p: Problem) -> int:
    """Of the workspace, for one y: a 64-bit best and a 32-bit count, which are zero between launches, and the keys."""
    return 16 + 2 * _padded(p)


def _selection_bytes(p: Problem, c: Config) -> int:
    """Shared memory of centroid_tokens: each warp's best, candidates, the groups' greatest, the chosen, a count."""
    groups = c.num_warps * _keys_per_thread(p, c)
    return ceil((8 * c.num_warps + 4 * (_padded(p) + groups + p.top_k + 1)) / 16) * 16


def smem_bytes(problem: Problem, config: Config, target: Target) -> int:
    lanes = config.lanes_per_row
    padded_row = 2 * VEC * lanes * ceil(problem.hidden / VEC / lanes)
    return max(SCORE_TOKENS * padded_row, _selection_bytes(problem, config))


def launches(problem: Problem, config: Config, target: Target) -> tuple[Launch, ...]:
    p, c, pdl = problem, config, target.arch.has_pdl
    return (
        Launch("centroid_scores", (_score_blocks(p, c), 1, 1), (32 * c.score_warps, 1, 1), 0, pdl=pdl),
        Launch("centroid_tokens", (_token_blocks(p, c), 1, 1), (32 * c.num_warps, 1, 1), 0, pdl=pdl),
    )


def workspace_bytes(problem: Problem, config: Config, target: Target) -> int:
    """What _token_bytes says for each y. Where a y's part begins does not depend on how many there are: what must be
    zero is never where another launch left keys.
    """
    return problem.num_tokens * _token_bytes(problem)


def cost(problem: Problem) -> Cost:
    """Each centroid once, each selected row once, or the whole table where the tokens select more than that."""
    p, size = problem, ELEMENT_BYTES[problem.dtype]
    selected = p.num_tokens * p.num_selected
    rows = p.num_centroids + min(selected, p.num_centroids * p.cluster_size)
    out = 8 * p.num_tokens if p.greedy else 12 * selected
    moved = size * p.hidden * (p.num_tokens + rows) + 8 * (rows - p.num_centroids) + out
    return Cost(moved, 2 * p.hidden * (p.num_tokens * p.num_centroids + selected))


def traffic(problem: Problem, config: Config, target: Target) -> list[Traffic]:
    """cuda_ops: about one instruction an element of the centroids' product, 12 of the tokens', whose rows are gathered;
    the choice takes 300 and 24 for each of a thread's keys.
    """
    p, c, size = problem, config, ELEMENT_BYTES[problem.dtype]
    tiles, selected = ceil(p.num_tokens / SCORE_TOKENS), p.num_tokens * p.num_selected
    row = size * p.hidden
    keys = 2 * p.num_tokens * p.num_centroids
    scores = Traffic(
        row * (p.num_centroids + p.num_tokens) + keys,
        0,
        l2_bytes=row * p.num_centroids * tiles,
        cuda_ops=p.hidden * p.num_tokens * p.num_centroids,
        bytes_in_flight=row * 32 * c.score_warps // c.lanes_per_row,
    )
    choosing = _token_blocks(p, c) * 32 * c.num_warps * (300 + 24 * _keys_per_thread(p, c))
    tokens = Traffic(
        cost(p).bytes - row * p.num_centroids,
        0,
        l2_bytes=(row + 8) * selected + 2 * _padded(p) * _token_blocks(p, c),
        cuda_ops=choosing + 12 * p.hidden * selected,
        bytes_in_flight=row * 32 * c.num_warps // c.lanes_per_row,
    )
    return [scores, tokens]
