"""Blocks of GGUF files on their way to a GPU: what arrives is what the host decodes."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch

from kerngen.runtime.gguf.blocks import FLOAT_TYPES, decode, q4_0_words
from kerngen.runtime.gguf.ggml_types import GGML_TYPES, READ
from kerngen.runtime.gguf.weights import GgufCheckpoint
from kerngen.runtime.weights import mapped
from kerngen.runtime.weights.staging import Stage

CUDA = torch.device("cuda")
TYPES = {form.name: (number, form) for number, form in GGML_TYPES.items() if form.name in READ}
ROWS = 96


def random_blocks(kind: str, columns: int) -> torch.Tensor:
    _, form = TYPES[kind]
    rng = torch.Generator().manual_seed(0)
    raw = torch.randint(0, 128, (ROWS, columns // form.block, form.block_bytes), dtype=torch.uint8, generator=rng)
    raw[..., 1::2] %= 60  # of what may be an fp16, so that it is finite
    return raw


def write_matrix(folder: Path, kind: str, name: bytes) -> tuple[Path, torch.Tensor]:
    """A file of one matrix [ROWS, 1024], and its blocks."""
    number, raw = TYPES[kind][0], random_blocks(kind, 1024)
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q", len(name)) + name
    head += struct.pack("<IQQIQ", 2, 1024, ROWS, number, 0)
    path = folder / "m.gguf"
    path.write_bytes(head + bytes(-len(head) % 32) + raw.numpy().tobytes())
    return path, raw


@pytest.mark.parametrize("kind", READ)
def test_decoders_give_the_same_on_a_gpu(kind: str) -> None:
    raw = random_blocks(kind, 1024)
    assert torch.equal(decode(kind, raw.to(CUDA)).cpu(), decode(kind, raw))
    if kind == "Q4_0":
        assert torch.equal(q4_0_words(raw.to(CUDA)).cpu(), q4_0_words(raw))


@pytest.mark.parametrize("kind", [kind for kind in READ if kind not in FLOAT_TYPES])
def test_a_matrix_arrives_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """In many pieces, through pinned buffers, decoded there, in the dtype of a run."""
    monkeypatch.setattr(mapped, "PIECE_BYTES", 100_000)
    path, raw = write_matrix(tmp_path, kind, b"output.weight")
    checkpoint, stage = GgufCheckpoint(path), Stage(CUDA)
    out = torch.empty(ROWS, 1024, dtype=torch.bfloat16, device=CUDA)
    for row, piece, decode_there in checkpoint.stored_pieces("lm_head.weight"):
        assert decode_there is not None
        stage.copy(piece, out[row : row + len(piece)], decode=decode_there)
    assert torch.equal(out.cpu(), decode(kind, raw).bfloat16())


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K", "Q6_K"])
def test_codes_scales_and_minima_arrive_of_one_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(mapped, "PIECE_BYTES", 100_000)
    path, _ = write_matrix(tmp_path, kind, b"blk.0.attn_output.weight")
    checkpoint, stage = GgufCheckpoint(path), Stage(CUDA)
    module = "model.layers.0.self_attn.o_proj"
    names = [f"{module}.{part}" for part in ("weight_packed", "weight_scale", "weight_minimum")]
    names = [name for name in names if name in checkpoint]
    wanted = [checkpoint.tensor(name) for name in names]
    outs = [torch.empty_like(tensor, device=CUDA) for tensor in wanted]
    for row, piece, made in checkpoint.stored_together([(name, ()) for name in names]):
        stage.copy_to_all(piece, [(outs[index][row : row + len(piece)], how) for index, how in made])
    assert len(names) == 2 + (kind == "Q4_K")
    for out, want in zip(outs, wanted, strict=True):
        assert torch.equal(out.cpu(), want)
