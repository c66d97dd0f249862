"""A checkpoint folder, opened: model, drafter, tokenizer and stop tokens, ready to generate."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from kerngen.errors import CheckpointError
from kerngen.runtime.config import (
    ModelConfig,
    read_drafter_config,
    read_eos_ids,
    read_model_config,
    read_suppressed_ids,
)
from kerngen.runtime.drafting import Drafter
from kerngen.runtime.model import Gemma4
from kerngen.runtime.ops import Ops
from kerngen.runtime.text import TextCodec
from kerngen.runtime.weights.loader import load_drafter, load_model

ASSISTANT = "assistant"
QUANT_SUFFIXES = ("", "-w4a16", "-w4a16-ct", "-qat-w4a16", "-qat-w4a16-ct")  # a quantized target shares its drafter


@dataclass(frozen=True, slots=True)
class Session:
    """Everything that a generation needs.

    drafter_folder: where the drafter came from, None without one. load_s: seconds that reading and repacking the
    weights took.
    """

    config: ModelConfig
    codec: TextCodec
    model: Gemma4
    drafter: Drafter | None
    stop_ids: tuple[int, ...]
    suppressed_ids: tuple[int, ...]
    load_s: float
    drafter_folder: Path | None = None


def find_drafter(folder: Path) -> Path | None:
    """The drafter that belongs to the model in `folder`, if there is one.

    Looked for in MODEL/assistant, then beside it as the releases name them: gemma-4-31b-it-assistant serves
    gemma-4-31b-it and gemma-4-31b-it-qat-w4a16-ct.
    """
    place = folder.absolute()
    stems = [place.name.removesuffix(suffix) for suffix in QUANT_SUFFIXES if place.name.endswith(suffix)]
    beside = [place.with_name(f"{stem}-{ASSISTANT}") for stem in stems if stem]
    return next((d for d in (folder / ASSISTANT, *beside) if (d / "config.json").is_file()), None)


def open_checkpoint(folder: Path, ops: Ops, *, draft: Path | None = None) -> Session:
    """Load `folder`, and `draft` if it is given. Configurations and tokenizer are checked before any weights.

    Raises UsageError or CheckpointError.
    """
    began = time.perf_counter()
    config = read_model_config(folder)
    drafter_config = read_drafter_config(draft, config) if draft else None
    codec = TextCodec(folder, config.bos_id)
    if codec.vocab_size > config.vocab_size:
        raise CheckpointError(
            f"{folder}: tokenizer.json has {codec.vocab_size} tokens, config.json says vocab_size {config.vocab_size}"
        )
    model = Gemma4(config, load_model(folder, config, ops), ops)
    drafter = None
    if draft and drafter_config:
        drafter = Drafter(drafter_config, load_drafter(draft, drafter_config, ops), model)
    stops = dict.fromkeys((*read_eos_ids(folder, config), *codec.end_of_turn_ids))
    return Session(
        config=config,
        codec=codec,
        model=model,
        drafter=drafter,
        stop_ids=tuple(stops),
        suppressed_ids=read_suppressed_ids(folder),
        load_s=time.perf_counter() - began,
        drafter_folder=draft,
    )
