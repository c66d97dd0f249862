"""Loads what embeds images and sound from a checkpoint. The text model's loader (loader.py) skips these tensors.

Names: as transformers saves them. An encoder's are below vision_tower or audio_tower, those of a model without encoders
below vision_embedder, and the projectors below embed_vision and embed_audio.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from pathlib import Path

import torch
from torch import Tensor

from kerngen.errors import CheckpointError
from kerngen.runtime.media.config import BOTH, AudioConfig, MediaConfig, Part, VisionConfig
from kerngen.runtime.media.towers.conformer import Conformer, KernelConformer, TorchConformer
from kerngen.runtime.media.towers.dispatch import Tower, Towers
from kerngen.runtime.media.towers.linear import TowerSource
from kerngen.runtime.media.towers.rows import KernelRows, Rows, TorchRows
from kerngen.runtime.media.towers.vision import vision_tower
from kerngen.runtime.ops import Ops
from kerngen.runtime.ops.kernels import KernelOps
from kerngen.runtime.weights.opened import open_tensors
from kerngen.runtime.weights.quantized import FLOATS
from kerngen.runtime.weights.safetensors import Checkpoint
from kerngen.runtime.weights.tensors import Advance, TensorSource
from kerngen.templates.attn_relative.spec import HEAD_DIMS, MAX_WINDOW
from kerngen.templates.common.rows.spec import VEC
from kerngen.templates.glu_conv.spec import MAX_TAPS
from kerngen.templates.mel_conv.spec import CHANNELS, MAX_MELS
from kerngen.templates.qkv_norm_rope_2d.spec import MAX_HEAD_DIM

PREFIXES = ("model.", "")
# What would change the result, were it read: more layers than config.json has, bounds, a standard.
COUNTS = re.compile(r"(?:\.layers\.\d+\..*|\.std_(?:bias|scale))(?<!inv_freq)$")


def load_towers(
    folder: Path, config: MediaConfig, ops: Ops, *, which: Collection[Part] = BOTH, advance: Advance | None = None
) -> Towers:
    """What embeds images and sound, on `ops.device` in `ops.dtype`: of `which` what the model has.

    Raises CheckpointError before allocating anything where a tensor is missing, has another shape, or is left over; and
    where one holds NaN, or infinity in what is not a bound. advance: as of load_model.
    """
    asked = config.only(which)
    if asked is None:
        return Towers()
    source = TowerTensors(open_tensors(folder), asked, ops, advance)
    with torch.inference_mode():
        build_towers(source, asked, ops)
        source.check_left()
        source.begin()
        towers = build_towers(source, asked, ops)
    source.finish()
    return towers


def build_towers(source: TowerSource, config: MediaConfig, ops: Ops) -> Towers:
    """Everything that the parts of `config` need, asked of `source` tensor by tensor. ops: of the model."""
    vision: Tower | None = None
    audio: Tower | None = None
    if config.vision is not None:
        vision = vision_tower(source, config.vision, config.hidden_size, rows_of(config.vision, ops))
    if config.audio is not None:
        from kerngen.runtime.media.towers.audio import audio_tower  # which few models need

        audio = audio_tower(source, config.audio, config.hidden_size, conformer_of(config.audio, ops))
    return Towers(vision, audio)


def rows_of(config: VisionConfig, ops: Ops) -> Rows:
    """What computes norms, heads and gates of a vision transformer: kernels where `ops` asks them and they take its
    sizes, else torch.
    """
    encoder = config.encoder
    sizes = () if encoder is None else (config.hidden_size, encoder.intermediate_size, encoder.head_dim)
    fits = encoder is None or encoder.head_dim <= MAX_HEAD_DIM
    if isinstance(ops, KernelOps) and fits and all(size % VEC == 0 for size in sizes):
        return KernelRows(ops.run)
    return TorchRows()


def conformer_of(config: AudioConfig, ops: Ops) -> Conformer:
    """As rows_of, of a conformer."""
    encoder = config.encoder
    if not isinstance(ops, KernelOps) or encoder is None:
        return TorchConformer()
    fits = (
        encoder.hidden_size % VEC == 0
        and encoder.hidden_size // encoder.num_heads in HEAD_DIMS
        and encoder.num_keys <= MAX_WINDOW
        and encoder.conv_kernel <= MAX_TAPS
        and encoder.channels[0] in CHANNELS
        and config.num_features <= MAX_MELS
    )
    return KernelConformer(ops.run) if fits else TorchConformer()


class TowerTensors(TensorSource):
    """The tensors of a folder's encoders, by their names below `model.`: a TowerSource."""

    def __init__(self, checkpoint: Checkpoint, config: MediaConfig, ops: Ops, advance: Advance | None) -> None:
        """Raises CheckpointError where the folder has no tensor at all of a part."""
        super().__init__(checkpoint, ops, advance)
        self._folders = []
        if config.vision is not None:
            self._folders.append("vision_tower." if config.vision.encoder else "vision_embedder.")
        if config.audio is not None:
            self._folders.append("audio_tower." if config.audio.encoder else "embed_audio.")
        names = checkpoint.names
        self._prefix = next((p for p in PREFIXES for n in names for f in self._folders if n.startswith(p + f)), "")
        for folder in self._folders:
            if not any(name.startswith(self._prefix + folder) for name in names):
                raise CheckpointError(
                    f"{checkpoint.folder} holds no {PREFIXES[0]}{folder}*, which its {checkpoint.said_by} implies",
                    hint="get the whole model, or use it for text alone",
                )

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return super().tensor(self._prefix + name, *shape, dtype=dtype)

    def bound(self, name: str) -> float:
        """A number of no dimension. It may be infinite: then it bounds nothing. Raises CheckpointError for NaN."""
        name = self._prefix + name
        self.checkpoint.require(name, (), FLOATS)
        self.used.add(name)
        value = float(self.checkpoint.tensor(name))
        if math.isnan(value):
            raise CheckpointError(f"{self.checkpoint.path(name)}: {name} is NaN")
        return value

    def check_left(self) -> None:
        """Raise CheckpointError if a tensor that would change the result was not asked for."""
        below = tuple(self._prefix + folder for folder in self._folders)
        for name in sorted(self.checkpoint.names - self.used):
            if name.startswith(below) and COUNTS.search(name):
                shape = list(self.checkpoint.shape(name))
                folder, said = self.checkpoint.folder, self.checkpoint.said_by
                raise CheckpointError(f"{folder} holds {name} {shape}, which its {said} does not account for")
