"""softcap_argmax: capped = cap * tanh(logits / cap), and the index of its greatest value, over a whole vocabulary.

A row is split over many blocks. Each leaves its best in the workspace with an atomic maximum, and the last one to
finish writes the id and clears the workspace, so that one launch serves and any later launch finds zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

from kerngen.arch import Target
from kerngen.templates.common.rows.spec import (
    ELEMENT_BYTES,
    INT32_MAX,
    VEC,
    require,
    require_dtypes,
    require_tokens,
    require_vectors,
    why_no_dtype,
)
from kerngen.templates.kernel import Arg, Body, Cost, Launch, TokenProblem, Traffic, args


@dataclass(frozen=True, slots=True)
class Problem(TokenProblem):
    """logits [num_tokens, vocab_size] logits_dtype -> ids [num_tokens] int64, and capped (write_capped) fp32.

    The lowest index wins a tie; NaN counts as the greatest, as in torch.argmax. has_cap: without it the values are the
    logits. round_steps: quotient, tanh and product are rounded to logits_dtype each, as the model's own arithmetic on
    logits of that dtype does, and ids are the arg-max of that, with the ties that rounding makes. Else capped is in
    fp32, and ids are the arg-max of the logits: the cap is strictly increasing.
    """

    vocab_size: int = 262144
    dtype: str = "bf16"
    logits_dtype: str = "bf16"
    has_cap: bool = True
    round_steps: bool = True
    write_capped: bool = False
    num_tokens: int = 1

    def __post_init__(self) -> None:
        require_dtypes(self.dtype, logits_dtype=self.logits_dtype)
        require_vectors(vocab_size=self.vocab_size)
        require_tokens(self.num_tokens)
        require(self.vocab_size <= INT32_MAX, f"vocab_size={self.vocab_size} does not fit in 31 bits")


@dataclass(frozen=True, slots=True)
class Config:
    threads: int = 256
    vecs_per_thread: int = 1  # vectors of eight logits that a thread reads; decides the splits of a row


SPACE = {"threads": (128, 256, 512), "vecs_per_thread": (1, 2, 4, 8)}
ARGS = {
    "softcap_argmax": (
        Arg("ids", "ptr", align=8),
        *args("ptr", "capped", "logits", "workspace"),
        Arg("cap", "f32"),
        Arg("num_tokens", "i32"),
    )
}
BODIES = (Body("kernel.cu.jinja", ARGS, SPACE),)
OUTPUTS = ("ids", "capped")


def why_unsupported(problem: Problem, target: Target) -> str | None:
    if problem.logits_dtype == "fp32":
        return None  # read as they are
    return why_no_dtype(target.arch, problem.logits_dtype)


def num_splits(problem: Problem, config: Config) -> int:
    """Blocks that share a row."""
    return -(-problem.vocab_size // (VEC * config.threads * config.vecs_per_thread))


def why_invalid(problem: Problem, config: Config, target: Target) -> str | None:
    if (blocks := problem.num_tokens * num_splits(problem, config)) > INT32_MAX:
        return f"{blocks:,} blocks ({num_splits(problem, config)} a row); at most {INT32_MAX:,}"
    return None


def default_config(problem: Problem, target: Target) -> Config:
    """Blocks for every SM first, then longer runs a thread, unless it also writes: then the stores keep it busy."""
    if problem.num_tokens <= 2:
        return Config(128, 1)
    return Config(256, 1 if problem.write_capped else 2 if problem.num_tokens <= 8 else 4)


def smem_bytes(problem: Problem, config: Config, target: Target) -> int:
    return 8 * config.threads // 32


def launches(problem: Problem, config: Config, target: Target) -> tuple[Launch, ...]:
    blocks = problem.num_tokens * num_splits(problem, config)
    return (Launch("softcap_argmax", (blocks, 1, 1), (config.threads, 1, 1), 0, pdl=target.arch.has_pdl),)


def workspace_bytes(problem: Problem, config: Config, target: Target) -> int:
    """A 64-bit best and a 32-bit count for each token; all zero before and after every launch."""
    return 12 * problem.num_tokens


def cost(problem: Problem) -> Cost:
    elements = problem.num_tokens * problem.vocab_size
    moved = ELEMENT_BYTES[problem.logits_dtype] + 4 * problem.write_capped
    return Cost(elements * moved + 8 * problem.num_tokens, elements * (12 if problem.has_cap else 1))


def traffic(problem: Problem, config: Config, target: Target) -> Traffic:
    """cuda_ops: about 8 instructions an element for the arg-max and 30 for the cap."""
    in_flight = config.threads * config.vecs_per_thread * VEC * ELEMENT_BYTES[problem.logits_dtype]
    capped = problem.has_cap and (problem.write_capped or (problem.round_steps and problem.logits_dtype != "fp32"))
    ops = (38 if capped else 8) * problem.num_tokens * problem.vocab_size
    return Traffic(cost(problem).bytes, 0, cuda_ops=ops, bytes_in_flight=in_flight)
