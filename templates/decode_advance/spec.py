"""decode_advance: the end of a decode step: drafts are accepted, rows go on, and the host's copy is put together.

One block a sequence, one launch: what else would be a dozen small kernels and a second copy to the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kerngen.arch import Target
from kerngen.templates.common.rows.spec import (
    ELEMENT_BYTES,
    INT32_MAX,
    VEC,
    require,
    require_dtypes,
    require_vectors,
)
from kerngen.templates.kernel import Arg, Body, Cost, Launch, args

MAX_VECS = 16  # that a thread holds, four registers each


@dataclass(frozen=True, slots=True)
class Problem:
    """tokens [batch, q_len], drafts [batch, q_len - 1], token, lengths, limits [batch] int64; states [batch * q_len,
    hidden] dtype -> result [batch, q_len + 2] int64, and in place token, lengths, hidden [batch, hidden] dtype.

    A sequence's count is 1 and its leading drafts that are what was chosen, tokens. Then: token is the last counted
    one, 0 where that is negative; hidden its row of states; lengths grow by the count, up to limits; result is the
    count, tokens, and whether that row of states is finite.
    """

    RUNTIME: ClassVar[tuple[str, ...]] = ("batch",)
    DYNAMIC: ClassVar[str] = "batch"

    hidden: int = 5376
    dtype: str = "bf16"
    batch: int = 1

    def __post_init__(self) -> None:
        require_dtypes(self.dtype)
        require_vectors(hidden=self.hidden)
        require(0 < self.batch <= INT32_MAX, f"batch={self.batch} is not in 1..{INT32_MAX}")


@dataclass(frozen=True, slots=True)
class Config:
    threads: int = 256  # of a block, which takes one sequence


SPACE = {"threads": (64, 128, 256, 512)}
ARGS = {
    "decode_advance": (
        *args("ptr", "result", "token", "lengths", align=8),
        Arg("hidden", "ptr"),
        *args("ptr", "tokens", "drafts", align=8),
        Arg("states", "ptr"),
        Arg("limits", "ptr", align=8),
        Arg("q_len", "i32"),
    )
}
BODIES = (Body("kernel.cu.jinja", ARGS, SPACE),)
OUTPUTS = ("result", "token", "lengths", "hidden")


def why_invalid(problem: Problem, config: Config, target: Target) -> str | None:
    if (held := -(-problem.hidden // (VEC * config.threads))) > MAX_VECS:
        return f"threads={config.threads} hold {held} vectors of a row of {problem.hidden} each; at most {MAX_VECS}"
    return None


def default_config(problem: Problem, target: Target) -> Config:
    """A vector a thread, as far as that goes: all of a row is then on its way at once."""
    return Config(next((t for t in SPACE["threads"] if VEC * t >= problem.hidden), SPACE["threads"][-1]))


def launches(problem: Problem, config: Config, target: Target) -> tuple[Launch, ...]:
    return (Launch("decode_advance", (problem.batch, 1, 1), (config.threads, 1, 1), 0, pdl=target.arch.has_pdl),)


def cost(problem: Problem) -> Cost:
    """Without drafts: a row read and written, and eight integers."""
    return Cost(problem.batch * (2 * problem.hidden * ELEMENT_BYTES[problem.dtype] + 8 * 8), 0)
