"""compressed-tensors pack-quantized int4: what is stored, and what it means.

Source: vllm-project/compressed-tensors, compressors/pack_quantized/.

For a linear [out, in]: weight_packed int32 [out, in / 8] with element j of a row in word j / 8, bits 4 * (j % 8);
weight_scale [out, in / group_size]; weight_shape int64 [2]. A nibble n stands for n - 8.
"""

from __future__ import annotations

import re

from kerngen.errors import CheckpointError
from kerngen.runtime.config import QuantConfig
from kerngen.runtime.weights.safetensors import Checkpoint

FLOATS = ("BF16", "F16", "F32")


def is_ignored(quant: QuantConfig, module: str) -> bool:
    """Whether the ignore list names `module` ("model.layers.0.mlp.up_proj"), by name or by "re:" expression."""
    for pattern in quant.ignore:
        if pattern.startswith("re:"):
            try:
                if re.match(pattern[3:], module):
                    return True
            except re.error as e:
                raise CheckpointError(f"quantization_config: ignore holds {pattern!r}: {e}") from e
        elif pattern == module:
            return True
    return False


def is_packed(checkpoint: Checkpoint, quant: QuantConfig | None, module: str) -> bool:
    """Whether `module` is stored packed. Raises CheckpointError where the config contradicts that."""
    if f"{module}.weight_packed" not in checkpoint:
        return False
    if quant is None:
        raise CheckpointError(f"{checkpoint.folder}: {module} is packed, but config.json has no quantization_config")
    if is_ignored(quant, module):
        raise CheckpointError(f"{checkpoint.folder}: {module} is packed, but quantization_config ignores it")
    return True


def check_packed(checkpoint: Checkpoint, quant: QuantConfig, module: str, shape: tuple[int, int]) -> set[str]:
    """Verify a packed linear [out, in] by its headers. Returns the tensors that belong to it."""
    rows, cols = shape
    if cols % quant.group_size:
        raise CheckpointError(
            f"{checkpoint.folder}: {module} has {cols} inputs, not a multiple of group_size {quant.group_size}"
        )
    for extra in ("weight_zero_point", "weight_g_idx"):
        if f"{module}.{extra}" in checkpoint:
            raise CheckpointError(f"{checkpoint.folder}: {module}.{extra} belongs to a scheme that is not implemented")
    checkpoint.require(f"{module}.weight_packed", (rows, cols // 8), ("I32",))
    checkpoint.require(f"{module}.weight_scale", (rows, cols // quant.group_size), FLOATS)
    checkpoint.require(f"{module}.weight_shape", (2,), ("I64", "I32"))
    stored = tuple(checkpoint.tensor(f"{module}.weight_shape").tolist())
    if stored != shape:
        raise CheckpointError(f"{checkpoint.folder}: {module}.weight_shape says {stored}; config.json implies {shape}")
    return {f"{module}.{part}" for part in ("weight_packed", "weight_scale", "weight_shape")}
