"""Repacked weights, kept in a file beside the checkpoint, so that a second start only copies them to the device.

The file is safetensors by format, but not by its ending: others read all safetensors of a folder. It says what it was
made of: the checkpoint's files (size, time, digest of the header), config.json, the dtype, and the backend's order,
which is found by repacking small matrices, so that no one has to remember to count versions. Where any of that differs,
or a tensor's sums do, the checkpoint is read instead, and a warning says why.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any, BinaryIO, TypeVar

import torch
from torch import Tensor

import kerngen
from kerngen.errors import CheckpointError
from kerngen.runtime.config import ModelConfig
from kerngen.runtime.ops import Experts, Linear, Ops, WeightView, dense_weights, grouped_weights, rows_of_table
from kerngen.runtime.weights.mapped import DTYPES, PIECE_BYTES
from kerngen.runtime.weights.packed import codes_layout, scale_dtype
from kerngen.runtime.weights.safetensors import Checkpoint, SafetensorsFile
from kerngen.runtime.weights.source import CheckpointSource, Parts
from kerngen.runtime.weights.staging import Stage
from kerngen.runtime.weights.tensors import Advance
from kerngen.runtime.world import Span
from kerngen.system.files import publish_with
from kerngen.templates.common.w4.tiling import Packing

LAYOUT = 2  # of the file and of what `seal` adds up
FP16_RANGE = 1  # of what fp16_range.py makes of an MLP: a file of another one, or of none, is not read
_BLOCK = 4096  # int64 words that are summed before their order counts
_SPELLING = {dtype: name for name, dtype in DTYPES.items()}

T = TypeVar("T")


class Planned:
    """The checkpoint's answers, repacked, as shapes alone: what a kept file must hold."""

    def __init__(self, dry: CheckpointSource) -> None:
        self.dry = dry
        self.config, self.ops, self.is_dry = dry.config, dry.ops, True

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return self.dry.tensor(name, *shape, dtype=dtype)

    def scalar(self, name: str) -> Tensor:
        return self.dry.scalar(name)

    def rows(self, name: str, rows: Span, width: int) -> Tensor:
        return self.dry.rows(name, rows, width)

    def linear(self, parts: Parts, in_features: Span) -> Linear:
        return self.ops.prepare(self.dry.linear(parts, in_features))

    def mlp(self, gate_up: Parts, down: Parts, norm: Tensor) -> tuple[Linear, Linear]:
        first, second = self.dry.mlp(gate_up, down, norm)
        return self.ops.prepare(first), self.ops.prepare(second)

    def unpacked(self, module: str, out_features: int, in_features: int) -> Linear:
        return self.dry.unpacked(module, out_features, in_features)

    def table(self, module: str, rows: int, width: int) -> Linear:
        return self.dry.table(module, rows, width)

    def head(self, embed: Linear, rows: Span) -> Linear:
        tied = rows_of_table(embed, rows)
        own = self.dry.own_head(tied, rows)
        return tied if own is None else self.ops.prepare(own)

    def experts(self, name: str, norm: Tensor) -> tuple[Experts, Experts]:
        return self.ops.prepare_experts(*self.dry.experts(name, norm))


class RepackedCache:
    """The file of one checkpoint, backend and dtype."""

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig, ops: Ops) -> None:
        dtype = str(ops.dtype).removeprefix("torch.")
        order = _order(config, ops)
        files = [[f.path.name, f.stat.st_size, f.stat.st_mtime_ns, f.digest] for f in checkpoint.files]
        key = {"kerngen": kerngen.__version__, "layout": LAYOUT, "order": order, "dtype": dtype,
               "config": checkpoint.config_digest, "files": sorted(files)}  # fmt: skip
        if ops.dtype == torch.float16:
            key["fp16_range"] = FP16_RANGE
        self.ops = ops
        self.key = json.dumps(key, sort_keys=True)
        self.path = checkpoint.beside(f"repacked-{dtype}-{order[:12]}.kerngen")

    def load(self, planned: T, advance: Advance | None = None) -> T | None:
        """The weights that are `planned` (without storage) from the file, or None where it does not hold them."""
        if not self.path.exists():
            return None
        try:
            return self._load(planned, advance)
        except (CheckpointError, ValueError, KeyError, TypeError, AttributeError) as e:  # metadata of any form
            reason = e.message if isinstance(e, CheckpointError) else f"{self.path}: {type(e).__name__}: {e}"
            warnings.warn(f"{reason}; the checkpoint is read instead, and --keep-repacked makes it anew", stacklevel=3)
            return None

    def _load(self, planned: T, advance: Advance | None) -> T:
        file = SafetensorsFile(self.path)
        if (file.metadata or {}).get("key") != self.key:
            raise CheckpointError(f"{self.path} was made from other files, or by another kerngen")
        seals: dict[str, list[int]] = json.loads(file.metadata["seals"])
        aliases: dict[str, str] = json.loads(file.metadata["aliases"])
        total = sum(entry.num_bytes for entry in file.entries.values())
        loaded: dict[str, Tensor] = {}
        sealed: dict[str, Tensor] = {}
        done, stage = 0, Stage(self.ops.device)
        for path, want in leaves(planned):
            name = aliases.get(path, path)
            if name not in loaded:
                entry = file.entries[name]
                if (entry.shape, entry.dtype) != (tuple(want.shape), _SPELLING[want.dtype]):
                    raise CheckpointError(f"{self.path}: {name} is not what config.json implies")
                out = torch.empty(entry.shape, dtype=want.dtype, device=self.ops.device)
                for row, piece in file.pieces(name):
                    stage.copy(piece, out[row : row + len(piece)] if out.dim() else out)
                    done += piece.numel() * piece.element_size()
                    if advance is not None:
                        advance(done, total)
                loaded[name], sealed[name] = out, seal(out)
            if loaded[name].shape != want.shape or loaded[name].dtype != want.dtype:
                raise CheckpointError(f"{self.path}: {path} is not what config.json implies")
        found = torch.stack(list(sealed.values())).tolist()  # one wait for the device
        if torn := [name for name, sums in zip(sealed, found, strict=True) if seals[name] != sums]:
            raise CheckpointError(f"{self.path}: {torn[0]} is not what was written")
        return rebuild(planned, lambda path: loaded[aliases.get(path, path)])

    def save(self, weights: Any) -> None:
        """Write `weights` to the file, whole or not at all. Where that fails a warning says why."""
        stored: dict[str, Tensor] = {}
        aliases: dict[str, str] = {}
        by_place: dict[tuple[int, tuple[int, ...]], str] = {}
        for path, tensor in leaves(weights):
            first = by_place.setdefault((tensor.data_ptr(), tuple(tensor.shape)), path)
            if first != path and tensor.numel():
                aliases[path] = first
            else:
                stored[path] = tensor.contiguous()
        seals = dict(zip(stored, torch.stack([seal(t) for t in stored.values()]).tolist(), strict=True))
        header: dict[str, Any] = {
            "__metadata__": {"key": self.key, "seals": json.dumps(seals), "aliases": json.dumps(aliases)}
        }
        end = 0
        for path, tensor in stored.items():
            begin, end = end, end + tensor.numel() * tensor.element_size()
            header[path] = {"dtype": _SPELLING[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)

        def write(f: BinaryIO) -> None:
            f.write(len(text).to_bytes(8, "little") + text)
            for tensor in stored.values():
                flat = tensor.reshape(-1).view(torch.uint8)
                for piece in flat.split(PIECE_BYTES):
                    f.write(memoryview(piece.cpu().numpy()))

        try:
            if (free := shutil.disk_usage(self.path.parent).free) < end:
                raise OSError(None, f"{end / 1e9:.1f} GB are needed, {free / 1e9:.1f} GB are free")
            publish_with(write, self.path)
        except OSError as e:
            warnings.warn(f"the repacked weights are not kept in {self.path}: {e.strerror or e}", stacklevel=3)


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of weights (layout.py) with their places: "layers.3.qkv.packed"."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, WeightView):
        for name, tensor in zip(value.format.tensors, value.tensors, strict=True):
            yield f"{path}.{name}".lstrip("."), tensor
    elif isinstance(value, tuple):
        for index, part in enumerate(value):
            yield from leaves(part, f"{path}.{index}")
    elif is_dataclass(value):
        for field in fields(value):
            yield from leaves(getattr(value, field.name), f"{path}.{field.name}".lstrip("."))


def rebuild(value: T, take: Callable[[str], Tensor], path: str = "") -> T:
    """`value` with each tensor replaced by what `take` gives for its place."""
    made: Any = value
    if isinstance(value, Tensor):
        made = take(path)
    elif isinstance(value, WeightView):
        made = replace(value, tensors=tuple(take(f"{path}.{name}".lstrip(".")) for name in value.format.tensors))
    elif isinstance(value, tuple):
        made = tuple(rebuild(part, take, f"{path}.{index}") for index, part in enumerate(value))
    elif is_dataclass(value) and not isinstance(value, type):
        parts = {f.name: getattr(value, f.name) for f in fields(value)}
        made = replace(value, **{n: rebuild(part, take, f"{path}.{n}".lstrip(".")) for n, part in parts.items()})
    result: T = made
    return result


def seal(tensor: Tensor) -> Tensor:
    """Two sums of a tensor's bits, int64 [2] on its device: of all words, and of blocks of words by their place.

    Against files that were torn or overwritten, not against whoever means to forge one.
    """
    flat = tensor.reshape(-1).view(torch.uint8)
    if flat.storage_offset() % 8:  # a part of something, which cannot be looked at as whole words
        flat = flat.clone()
    whole = len(flat) // 8 * 8
    total = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    step = 8 * _BLOCK * 2048  # bytes at a time: bounds the scratch
    for begin in range(0, whole, step):
        words = flat[begin : min(begin + step, whole)].view(torch.int64)
        even = len(words) // _BLOCK * _BLOCK
        blocks = torch.cat((words[:even].view(-1, _BLOCK).sum(1), words[even:].sum().view(1)))
        places = torch.arange(1, len(blocks) + 1, device=tensor.device) + begin // (8 * _BLOCK)
        total += torch.stack((blocks.sum(), (blocks * places).sum()))
    return total + flat[whole:].sum()


def _order(config: ModelConfig, ops: Ops) -> str:
    """A digest of what the backend makes of small matrices: it changes with the order in which it wants them."""
    size, experts = 128, 2
    digest = hashlib.sha256(ops.name.encode())
    ramp = torch.arange(experts * 2 * size * size, device=ops.device)

    def dense(*shape: int) -> Tensor:
        return (ramp[: torch.Size(shape).numel()].view(shape) % 251 - 125).to(ops.dtype)

    def packed(packing: Packing, *shape: int) -> WeightView:
        dtype, each = codes_layout(packing)
        words = ramp[: torch.Size(shape).numel() // each].view(*shape[:-1], shape[-1] // each)
        scales = dense(*shape[:-1], shape[-1] // packing.group_size).to(scale_dtype(ops.dtype, packing))
        codes = (words * 40503 % (1 << 31)).to(torch.int32).to(DTYPES[dtype])
        return grouped_weights(codes, scales, scales if packing.has_minima else None)

    made: list[Any] = [ops.prepare(dense_weights(dense(2 * size, size)))]
    if config.num_experts:
        gate_up, down = dense_weights(dense(experts, 2 * size, size)), dense_weights(dense(experts, size, size))
        made.append(ops.prepare_experts(gate_up, down))
    for packing in config.quant.all_packings if config.quant else ():
        made += (ops.prepare(replace(packed(packing, 2 * size, size), gated=gated)) for gated in (False, True))
        if config.num_experts:
            both = packed(packing, experts, 2 * size, size), packed(packing, experts, size, size)
            made.append(ops.prepare_experts(*both))
    for path, tensor in leaves(tuple(made)):
        digest.update(f"{path} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()
