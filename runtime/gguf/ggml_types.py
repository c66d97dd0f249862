"""What a tensor of a GGUF file may be stored as: ggml's types, by their numbers, and how many bytes a block has.

All that ggml has are here, so that a file's sizes can be checked. READ are those that blocks.py decodes.
Source: ggml-org/llama.cpp, ggml/include/ggml.h and gguf-py's constants.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from kerngen.errors import CheckpointError
from kerngen.templates.common.w4.tiling import Packing


@dataclass(frozen=True, slots=True)
class GgmlType:
    """block: elements of a row that are stored together, in block_bytes."""

    name: str
    block: int
    block_bytes: int


GGML_TYPES: dict[int, GgmlType] = {
    number: GgmlType(name, block, block_bytes)
    for number, name, block, block_bytes in (
        (0, "F32", 1, 4), (1, "F16", 1, 2), (30, "BF16", 1, 2), (28, "F64", 1, 8),
        (24, "I8", 1, 1), (25, "I16", 1, 2), (26, "I32", 1, 4), (27, "I64", 1, 8),
        (2, "Q4_0", 32, 18), (3, "Q4_1", 32, 20), (6, "Q5_0", 32, 22), (7, "Q5_1", 32, 24),
        (8, "Q8_0", 32, 34), (9, "Q8_1", 32, 40),
        (10, "Q2_K", 256, 84), (11, "Q3_K", 256, 110), (12, "Q4_K", 256, 144), (13, "Q5_K", 256, 176),
        (14, "Q6_K", 256, 210), (15, "Q8_K", 256, 292),
        (16, "IQ2_XXS", 256, 66), (17, "IQ2_XS", 256, 74), (18, "IQ3_XXS", 256, 98), (19, "IQ1_S", 256, 50),
        (20, "IQ4_NL", 32, 18), (21, "IQ3_S", 256, 110), (22, "IQ2_S", 256, 82), (23, "IQ4_XS", 256, 136),
        (29, "IQ1_M", 256, 56), (34, "TQ1_0", 256, 54), (35, "TQ2_0", 256, 66),
        (39, "MXFP4", 32, 17), (40, "NVFP4", 64, 36), (41, "Q1_0", 128, 18),
    )
}  # fmt: skip

# How matrices of a type are kept: codes of so many bits, with a scale, and with or without a minimum, for a group.
PACKINGS = {
    "Q4_0": Packing(32), "Q4_1": Packing(32, has_minima=True), "Q4_K": Packing(32, has_minima=True),
    "Q5_0": Packing(32, 8), "Q5_1": Packing(32, 8, has_minima=True), "Q5_K": Packing(32, 8, has_minima=True),
    "Q6_K": Packing(16, 8), "Q8_0": Packing(32, 8), "IQ4_NL": Packing(32, 8), "IQ4_XS": Packing(32, 8),
    "MXFP4": Packing(32, 8),
}  # fmt: skip
READ = (
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4",
)  # fmt: skip


def known(kind: str) -> str:
    """`kind`, if it is read. Raises CheckpointError."""
    if kind not in READ:
        raise CheckpointError(
            f"the type {kind} is not read; {', '.join(READ)} are",
            hint="take a file of the same model in Q4_0, Q4_K_M, Q8_0 or BF16",
        )
    return kind
