"""mel_conv: log-mel frames to half as many of half the mels: a 3 x 3 convolution, layer norm and ReLU."""

from __future__ import annotations

from dataclasses import dataclass

from kerngen.arch import Target
from kerngen.templates.common.rows.spec import ELEMENT_BYTES, VEC, require, require_dtypes, require_tokens
from kerngen.templates.kernel import Arg, Body, Cost, Launch, TokenProblem, Traffic, args

CHANNELS = (8, 16, 32, 64, 128, 256)  # whose vectors a power of two of a warp's lanes holds
MAX_MELS = 512
NUM_TAPS = 9


@dataclass(frozen=True, slots=True)
class Problem(TokenProblem):
    """frames [sounds * num_frames, mels] fp32, rounded to dtype, are convolved with stride 2 both ways, with zeros
    around each sound: channels of (num_frames + 1) // 2 rows and (mels + 1) // 2 columns, rounded. out [num_tokens,
    columns, channels] dtype is relu(layer_norm(those; norm_weight)) over channels, num_tokens being the rows of all
    sounds.

    taps [9, channels] dtype, of rows of the kernel one after another, norm_weight [channels] dtype. lengths [sounds]
    fp32: frames from there on are zero, and row t of out is where 2 t is no less.
    """

    mels: int = 128
    channels: int = 128
    dtype: str = "bf16"
    num_tokens: int = 1

    def __post_init__(self) -> None:
        require_dtypes(self.dtype)
        require(0 < self.mels <= MAX_MELS, f"mels={self.mels} is not in 1..{MAX_MELS}")
        require(self.channels in CHANNELS, f"channels={self.channels} is not one of: {', '.join(map(str, CHANNELS))}")
        require_tokens(self.num_tokens)

    @property
    def columns(self) -> int:
        return (self.mels + 1) // 2


@dataclass(frozen=True, slots=True)
class Config:
    num_warps: int = 4
    rows_per_block: int = 2  # which share the taps in registers


SPACE = {"num_warps": (2, 4, 8), "rows_per_block": (1, 2, 4)}
ARGS = {
    "mel_conv": (
        *args("ptr", "out", "frames", "taps", "norm_weight"),
        Arg("lengths", "ptr", align=4),
        Arg("eps", "f32"),
        *args("i32", "num_tokens", "num_frames"),
    )
}
BODIES = (Body("kernel.cu.jinja", ARGS, SPACE),)
OUTPUTS = ("out",)


def why_invalid(problem: Problem, config: Config, target: Target) -> str | None:
    return None  # every point of SPACE fits every arch: 24 KiB of shared memory and 256 threads at most


def default_config(problem: Problem, target: Target) -> Config:
    return Config()


def smem_bytes(problem: Problem, config: Config, target: Target) -> int:
    return 4 * config.rows_per_block * 3 * (problem.mels + 2)


def launches(problem: Problem, config: Config, target: Target) -> tuple[Launch, ...]:
    blocks = -(-problem.num_tokens // config.rows_per_block)
    return (Launch("mel_conv", (blocks, 1, 1), (32 * config.num_warps, 1, 1), 0, pdl=target.arch.has_pdl),)


def cost(problem: Problem) -> Cost:
    p, size = problem, ELEMENT_BYTES[problem.dtype]
    elements = p.num_tokens * p.columns * p.channels
    weights = (NUM_TAPS + 1) * p.channels
    return Cost(size * (elements + weights) + 8 * p.num_tokens * p.mels, (2 * NUM_TAPS + 8) * elements)


def traffic(problem: Problem, config: Config, target: Target) -> Traffic:
    """cuda_ops: nine products and about twelve instructions an element, and 60 a thread and column for sums."""
    p = problem
    lanes = p.num_tokens * p.columns * p.channels // VEC
    ops = lanes * (VEC * (NUM_TAPS + 12) + 60)
    in_flight = 4 * 3 * config.rows_per_block * p.mels
    return Traffic(cost(p).bytes, 0, smem_bytes=lanes * NUM_TAPS * 4, cuda_ops=ops, bytes_in_flight=in_flight)
