"""A checkpoint as a folder of safetensors in the order that loading takes: `kerngen convert`.

Packed matrices are what `find_packed` names (weight_packed, weight_scale, weight_minimum), and config.json says by
module how they are packed. What is dense in memory, as per-layer embeddings of a GGUF file, is stored in bf16.
config.json is written last: a folder without it is no model.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch

from kerngen.errors import CheckpointError, UsageError
from kerngen.runtime.config import ModelConfig, read_model_config
from kerngen.runtime.config_fields import is_gguf, read_config
from kerngen.runtime.hub import FILES
from kerngen.runtime.quant import module_key
from kerngen.runtime.text import TextCodec
from kerngen.runtime.weights.mapped import DTYPES
from kerngen.runtime.weights.opened import open_tensors
from kerngen.runtime.weights.safetensors import ITEM_BYTES, Checkpoint
from kerngen.runtime.weights.tensors import Advance
from kerngen.system.files import publish_texts, publish_with
from kerngen.templates.common.w4.tiling import Packing

_BESIDE = tuple(name for name in FILES if name.endswith((".json", ".jinja")) and "model" not in name)


@dataclass(frozen=True, slots=True)
class Conversion:
    """What was written. packed: modules. decoded: tensors that were quantised and are bf16 now, and what they take."""

    num_tensors: int
    num_bytes: int
    packed: int
    decoded: int
    decoded_bytes: int


def convert(place: Path, out: Path, advance: Advance | None = None) -> Conversion:
    """Writes the model at `place`, a folder or a GGUF file, to the folder `out`.

    Raises UsageError where `out` has a model already, CheckpointError for what cannot be loaded or written.
    """
    if (out / "config.json").exists():
        raise UsageError(f"{out} holds a model already", hint="name a folder that is not there yet")
    config = read_model_config(place)
    checkpoint = open_tensors(place, config.quant)
    names = sorted(checkpoint.names)
    decoded = [name for name in names if checkpoint.is_decoded(name)]
    header, total = _header(checkpoint, names)
    try:
        out.mkdir(parents=True, exist_ok=True)
        if (free := shutil.disk_usage(out).free) < total:
            raise OSError(None, f"{total / 1e9:.1f} GB are needed, {free / 1e9:.1f} GB are free")
        publish_with(lambda f: _write(f, checkpoint, names, header, total, advance), out / "model.safetensors")
        publish_texts({out / name: text for name, text in _texts(place, config).items()})
        publish_texts({out / "config.json": json.dumps(_config(place, config, checkpoint), indent=1)})
    except OSError as e:
        raise CheckpointError(f"{out} cannot be written: {e.strerror or e}") from e
    packed = sum(name.endswith(("_packed", ".qweight")) for name in names)
    return Conversion(len(names), total, packed, len(decoded), sum(2 * prod(checkpoint.shape(n)) for n in decoded))


def _header(checkpoint: Checkpoint, names: Iterable[str]) -> tuple[bytes, int]:
    """The file's, and how many bytes follow it."""
    entries: dict[str, Any] = {}
    end = 0
    for name in names:
        dtype, shape = "BF16" if checkpoint.is_decoded(name) else checkpoint.dtype(name), checkpoint.shape(name)
        begin, end = end, end + prod(shape) * ITEM_BYTES[dtype]
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, end


def _write(
    f: BinaryIO, checkpoint: Checkpoint, names: Iterable[str], header: bytes, total: int, advance: Advance | None
) -> None:
    f.write(header)
    done = 0
    for name in names:
        if checkpoint.dtype(name) not in DTYPES:
            raise CheckpointError(f"{checkpoint.path(name)}: {name} is stored as {checkpoint.dtype(name)}, which is "
                                  f"not converted; known: {', '.join(DTYPES)}")  # fmt: skip
        for _, piece in checkpoint.pieces(name):
            made = piece.to(torch.bfloat16) if checkpoint.is_decoded(name) else piece
            data = made.contiguous().reshape(-1).view(torch.uint8)
            f.write(data.numpy().data)
            done += data.numel()
            if advance is not None:
                advance(done, total)


def _texts(place: Path, config: ModelConfig) -> dict[str, str]:
    """Tokenizer, chat template and what is recommended, by file name."""
    if not is_gguf(place):
        return {name: (place / name).read_text() for name in _BESIDE if (place / name).is_file()}
    from kerngen.runtime.gguf.config import generation_json
    from kerngen.runtime.gguf.container import open_gguf
    from kerngen.runtime.gguf.tokenizer import has_template, template_of

    model = open_gguf(place)
    found = {"tokenizer.json": TextCodec(place, config.bos_id).to_json()}
    if has_template(model):
        found["chat_template.jinja"] = template_of(model)
    beside = place.parent / "generation_config.json"
    recommended = beside.read_text() if beside.is_file() else json.dumps(generation_json(place))
    return found | ({"generation_config.json": recommended} if recommended != "{}" else {})


def _config(place: Path, config: ModelConfig, checkpoint: Checkpoint) -> dict[str, Any]:
    """config.json of what was written."""
    values = {key: value for key, value in read_config(place).items() if key != "quantization_config"}
    quant = config.quant
    if quant is None:
        return values
    if quant.scheme is None and quant.packings is None:  # as it lies
        return read_config(place)
    named: Mapping[str, Packing] = quant.packings or {
        module_key(name.removesuffix(".weight_packed")): quant.scheme.packing
        for name in checkpoint.names
        if quant.scheme is not None and name.endswith(".weight_packed")
    }
    forms: dict[Packing, list[str]] = {}
    for module, packing in named.items():
        forms.setdefault(packing, []).append(module)
    packed = [
        {"bits": p.bits, "group_size": p.group_size, "has_minima": p.has_minima, "modules": sorted(modules)}
        for p, modules in forms.items()
    ]
    return values | {"quantization_config": {"quant_method": "kerngen", "packed": packed}}
