"""The tensors of a model, in whatever form they are there: a folder of safetensors, or a GGUF file."""

from __future__ import annotations

from pathlib import Path

from kerngen.runtime.config_fields import is_gguf
from kerngen.runtime.quant import QuantConfig
from kerngen.runtime.weights.safetensors import Checkpoint


def open_tensors(place: Path, quant: QuantConfig | None = None) -> Checkpoint:
    """Those of the model at `place`, by the names that transformers gives them. Raises CheckpointError.

    quant: of the model, whose matrices are converted where they lie in an order of their own; None where only others
    are looked at.
    """
    if is_gguf(place):
        from kerngen.runtime.gguf.weights import GgufCheckpoint  # which few models need

        return GgufCheckpoint(place)
    checkpoint = Checkpoint(place)
    if quant is None or quant.scheme is None:
        return checkpoint
    from kerngen.runtime.weights.converted import ConvertedCheckpoint

    return ConvertedCheckpoint(checkpoint, quant.scheme)
