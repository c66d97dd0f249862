"""The ranks that a model is divided among, and what of a dimension one of them has. No tensors, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from kerngen.errors import UsageError
from kerngen.templates.exchange_best.spec import POSTED

VECTOR = 8  # 16-bit elements that kernels read together
MOST_ROWS = 128  # that a divided model exchanges in one launch: from there on a sum by NCCL takes no longer
MOST_CHOICES = 1024  # tokens that it chooses in one: those of a step, of which each takes 16 bytes


@dataclass(frozen=True, slots=True)
class World:
    """The ranks that a model is divided among, and which of them this is."""

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise UsageError(f"rank {self.rank} of a world of {self.size}; there are 0 to {self.size - 1}")


ONE_RANK = World()


@dataclass(frozen=True, slots=True)
class Span:
    """`size` of the `whole` elements of a dimension, from `start` on."""

    start: int
    size: int
    whole: int

    @staticmethod
    def of(whole: int) -> Span:
        """All of them."""
        return Span(0, whole, whole)

    @property
    def stop(self) -> int:
        return self.start + self.size

    @property
    def is_whole(self) -> bool:
        return self.size == self.whole

    @property
    def slice(self) -> slice:
        return slice(self.start, self.stop)

    def times(self, count: int) -> Span:
        """Where each element stands for `count`: the rows of heads, say."""
        return Span(self.start * count, self.size * count, self.whole * count)

    def over(self, count: int) -> Span:
        """Where `count` elements are one, as int4 codes in words are; start and size are multiples of it."""
        return Span(self.start // count, self.size // count, self.whole // count)

    def after(self, before: int, whole: int) -> Span:
        """These elements where `before` others precede them, of `whole` in all."""
        return Span(before + self.start, self.size, whole)


def cut(whole: int, unit: int, world: World) -> Span:
    """The rank's part of `whole` elements, which go to ranks in units: where these do not divide evenly, the first
    ranks have one more. Raises UsageError where `unit` does not divide `whole`, or where a rank would have nothing.
    """
    units, rest = divmod(whole, unit)
    if rest:
        raise UsageError(f"{whole} are no multiple of {unit}")
    if units < world.size:
        raise UsageError(f"{whole} are {units} times {unit}, fewer than {world.size} ranks")
    each, more = divmod(units, world.size)
    return Span((world.rank * each + min(world.rank, more)) * unit, (each + (world.rank < more)) * unit, whole)


def head_rows(vocab_size: int, world: World) -> Span:
    """The rank's rows of an output head, in whole vectors of logits."""
    return cut(vocab_size, gcd(vocab_size, VECTOR), world)


@dataclass(frozen=True, slots=True)
class Share:
    """What a rank has of a divided model, beside what its layers say (LayerConfig.kv_span, inner_span).

    q_heads: of every layer. expert_width: of each expert's intermediate size. vocab: rows of the output head; the
    embedding table is whole on every rank.
    """

    world: World
    q_heads: Span
    expert_width: Span
    vocab: Span


def most_rows(width: int) -> int:
    """Rows of `width` that a divided model's memory has room for."""
    return MOST_CHOICES if width == POSTED else MOST_ROWS
