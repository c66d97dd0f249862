"""The tensors of a model, in whatever form they are there: a folder of safetensors, or a GGUF file."""

from __future__ import annotations

from pathlib import Path

from kerngen.runtime.config_fields import is_gguf
from kerngen.runtime.weights.safetensors import Checkpoint


def open_tensors(place: Path) -> Checkpoint:
    """Those of the model at `place`, by the names that transformers gives them. Raises CheckpointError."""
    if is_gguf(place):
        from kerngen.runtime.gguf.weights import GgufCheckpoint  # which few models need

        return GgufCheckpoint(place)
    return Checkpoint(place)
