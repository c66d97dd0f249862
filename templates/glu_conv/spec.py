"""glu_conv: GLU, a causal depthwise convolution over tokens, norm and SiLU: the middle of a conformer's convolution."""

from __future__ import annotations

from dataclasses import dataclass

from kerngen.arch import Target
from kerngen.templates.common.rows.spec import (
    ELEMENT_BYTES,
    VEC,
    fewest_vecs,
    require,
    require_dtypes,
    require_tokens,
    require_vectors,
    row_threads,
    why_block_too_large,
)
from kerngen.templates.kernel import Arg, Body, Cost, Launch, TokenProblem, Traffic, args

MAX_TAPS = 8


@dataclass(frozen=True, slots=True)
class Problem(TokenProblem):
    """x [num_tokens, 2 * width] as value | gate, of whole sounds of seq_len tokens each:

        glu = value * sigmoid(gate), of clamp(x; 0)
        conv[t] = sum over k of taps[k] * glu[t - (num_taps - 1) + k], what is before the sound's start being zero
        out = clamp(silu(norm(clamp(conv; 1); norm_weight)); 2)

    taps [num_taps, width], norm_weight [width], out [num_tokens, width], all dtype. The numbers are rows of bounds
    [3, 2] fp32, the lowest and the highest, which dtype holds exactly, or infinite.
    """

    width: int = 1024
    num_taps: int = 5
    dtype: str = "bf16"
    num_tokens: int = 1

    def __post_init__(self) -> None:
        require_dtypes(self.dtype)
        require_vectors(width=self.width)
        require(0 < self.num_taps <= MAX_TAPS, f"num_taps={self.num_taps} is not in 1..{MAX_TAPS}")
        require_tokens(self.num_tokens)


@dataclass(frozen=True, slots=True)
class Config:
    vecs_per_thread: int = 1  # vectors of eight channels; decides the threads of a block
    tokens_per_block: int = 4  # which share what they convolve


SPACE = {"vecs_per_thread": (1, 2, 4), "tokens_per_block": (1, 2, 4, 8)}
ARGS = {
    "glu_conv": (
        *args("ptr", "out", "x", "taps", "norm_weight"),
        Arg("bounds", "ptr", align=8),
        Arg("eps", "f32"),
        *args("i32", "num_tokens", "seq_len"),
    )
}
BODIES = (Body("kernel.cu.jinja", ARGS, SPACE),)
OUTPUTS = ("out",)


def why_invalid(problem: Problem, config: Config, target: Target) -> str | None:
    vecs, tokens = config.vecs_per_thread, config.tokens_per_block
    threads = row_threads(problem.width, vecs)
    twin = next((v for v in SPACE["vecs_per_thread"] if v < vecs and row_threads(problem.width, v) == threads), None)
    if twin is not None:
        return f"vecs_per_thread={vecs} takes {threads} threads a row of {problem.width}, as {twin} does"
    if why := why_block_too_large(threads, f"a row of {problem.width} by {vecs} vectors a thread"):
        return why
    # What is convolved of one vector, the rows of all, the taps and the norm's weight; and the arithmetic.
    data = 4 * (tokens + problem.num_taps - 1 + vecs * (tokens + problem.num_taps + 1)) + tokens
    available = min(target.arch.max_regs_per_thread, target.arch.regs_per_sm // threads // 8 * 8)
    if data + 56 > available:
        held = f"{data} registers a thread for {tokens} tokens and 56 for the arithmetic"
        return f"{held}; {threads} threads a block leave {available}"
    return None


def default_config(problem: Problem, target: Target) -> Config:
    config = Config(fewest_vecs(problem.width, SPACE["vecs_per_thread"], 256))
    return config if why_invalid(problem, config, target) is None else Config(config.vecs_per_thread, 1)


def smem_bytes(problem: Problem, config: Config, target: Target) -> int:
    return 4 * config.tokens_per_block * row_threads(problem.width, config.vecs_per_thread) // 32


def launches(problem: Problem, config: Config, target: Target) -> tuple[Launch, ...]:
    blocks = -(-problem.num_tokens // config.tokens_per_block)
    threads = row_threads(problem.width, config.vecs_per_thread)
    return (Launch("glu_conv", (blocks, 1, 1), (threads, 1, 1), 0, pdl=target.arch.has_pdl),)


def cost(problem: Problem) -> Cost:
    elements, size = problem.num_tokens * problem.width, ELEMENT_BYTES[problem.dtype]
    weights = (problem.num_taps + 1) * problem.width
    return Cost(size * (3 * elements + weights), (2 * problem.num_taps + 12) * elements)


def traffic(problem: Problem, config: Config, target: Target) -> Traffic:
    """Blocks read the tokens before theirs again, through L2. cuda_ops: about 20 instructions for a GLU, 20 for a norm
    and a SiLU, one and an unpacking for each tap; an element.
    """
    (launch,) = launches(problem, config, target)
    read = config.tokens_per_block + problem.num_taps - 1
    lanes = VEC * launch.grid[0] * launch.block[0] * config.vecs_per_thread
    ops = lanes * (20 * read + (20 + 2 * problem.num_taps) * config.tokens_per_block)
    row = problem.width * ELEMENT_BYTES[problem.dtype]
    again = launch.grid[0] * row * (2 * read + config.tokens_per_block)
    return Traffic(cost(problem).bytes, 0, l2_bytes=again, cuda_ops=ops, bytes_in_flight=2 * read * row)
