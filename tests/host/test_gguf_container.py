"""GGUF's container: what a hostile, torn or odd file may hold is an error in words, and never more than that."""

from __future__ import annotations

import gc
import json
import random
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gguf_files import Gguf, string, value_bytes

from kerngen.errors import CheckpointError, KerngenError
from kerngen.runtime.config import read_model_config
from kerngen.runtime.gguf import container
from kerngen.runtime.gguf.container import GgufFile, GgufModel
from kerngen.runtime.gguf.tokenizer import template_of, tokenizer_json
from kerngen.runtime.gguf.weights import GgufCheckpoint

COUNT, TRACED = 10_000, (500, 1500)  # files; those whose memory is watched, which takes four times as long


def small() -> Gguf:
    """A model of one layer, of some types, with a tokenizer: 4 kB."""
    rng = torch.Generator().manual_seed(0)

    def raw(num_bytes: int) -> bytes:
        return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=rng).numpy().tobytes()

    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "a", "b", "ab", "▁", "<0x0A>", "\n", "<turn|>"]
    keys = {
        "general.architecture": "gemma4", "general.alignment": 32, "gemma4.block_count": 1,
        "gemma4.context_length": 64, "gemma4.embedding_length": 32, "gemma4.feed_forward_length": [32],
        "gemma4.attention.head_count": 1, "gemma4.attention.head_count_kv": [1], "gemma4.attention.key_length": 32,
        "gemma4.attention.sliding_window_pattern": [False], "gemma4.attention.layer_norm_rms_epsilon": 1e-6,
        "gemma4.rope.freq_base": 1e6, "tokenizer.ggml.model": "gemma4", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3, 2, 1, 1, 1, 1, 6, 1, 4], "tokenizer.ggml.merges": ["a b"],
        "tokenizer.chat_template": "{{ messages }}",
    }  # fmt: skip
    made = Gguf(list(keys.items()))
    ones = struct.pack("<32f", *[1.0] * 32)
    made.tensors = [
        ("rope_freqs.weight", "F32", (16,), struct.pack("<16f", *[1.0] * 4, *[1e30] * 12)),
        ("token_embd.weight", "Q8_0", (11, 32), raw(11 * 34)),
        ("blk.0.attn_q.weight", "Q4_0", (32, 32), raw(32 * 18)),
        ("blk.0.attn_k.weight", "Q4_0", (32, 32), raw(32 * 18)),
        ("blk.0.ffn_down.weight", "F16", (2, 32), raw(128)),
        ("output_norm.weight", "F32", (32,), ones),
    ]
    return made


def read_all(path: Path) -> None:
    """All that anything asks of a file: its keys, its tokenizer, and every tensor."""
    model = GgufModel(path)
    for key in model.head.values:
        if not model.head.is_array(key):
            model.head.get(key)
    for read in (tokenizer_json, template_of):
        read(model)
    read_model_config(path)
    checkpoint = GgufCheckpoint(path)
    for name in checkpoint.names:
        for _, piece in checkpoint.pieces(name):
            piece.sum()


def mutations(base: bytes) -> list[Callable[[random.Random], bytes]]:
    def flip(rng: random.Random) -> bytes:
        data = bytearray(base)
        for _ in range(rng.choice((1, 1, 1, 2, 8))):
            at = rng.randrange(len(data))
            data[at] ^= 1 << rng.randrange(8)
        return bytes(data)

    def cut(rng: random.Random) -> bytes:
        return base[: rng.randrange(len(base))]

    def number(rng: random.Random) -> bytes:
        """A count, a length, a type or an offset, if it is one, becomes another."""
        size, data = rng.choice((4, 8)), bytearray(base)
        at = rng.randrange(4, 1700)
        value = rng.choice((0, 1, 7, 255, 1 << 16, 1 << 31, (1 << 32) - 1, 1 << 40, (1 << 63) - 1, (1 << 64) - 1))
        data[at : at + size] = (value & ((1 << 8 * size) - 1)).to_bytes(size, "little")
        return bytes(data)

    def shift(rng: random.Random) -> bytes:
        at, size = rng.randrange(len(base)), rng.randrange(1, 64)
        return base[:at] + (rng.randbytes(size) if rng.random() < 0.5 else b"") + base[at + rng.randrange(64) :]

    return [flip, cut, number, shift]


def test_mutated_files_are_read_or_refused(tmp_path: Path) -> None:
    base = small().to_bytes()
    path = tmp_path / "base.gguf"
    path.write_bytes(base)
    read_all(path)
    rng, ways = random.Random(1), mutations(base)
    refused, peaks, unnamed = 0, [], []
    for index in range(COUNT):
        # A name of its own: what was read of another file is not to be found again.
        path = tmp_path / f"{index}.gguf"
        path.write_bytes(ways[index % len(ways)](rng))
        if index == TRACED[0]:
            gc.collect()
            tracemalloc.start()
            before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        try:
            read_all(path)
        except KerngenError as e:
            refused += 1
            if str(path) not in e.message:
                unnamed.append(e.message)
        finally:
            path.unlink()
        if tracemalloc.is_tracing():
            now, peak = tracemalloc.get_traced_memory()
            peaks.append(peak - now)
        if index == TRACED[1]:
            gc.collect()
            after = tracemalloc.get_traced_memory()[0]
            tracemalloc.stop()
    assert COUNT // 2 < refused < COUNT
    assert not unnamed
    assert max(peaks) < 1 << 20, "for a file of 4 kB as much was made"
    assert after - before < 1 << 20, "something of each file is kept"


def header(num_tensors: int, num_keys: int, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_keys) + rest


def array(kind: int, count: int, rest: bytes = b"") -> bytes:
    return header(0, 1, string("x") + struct.pack("<IIQ", 9, kind, count) + rest)


NESTED = b"".join(struct.pack("<IQ", 9, 1) for _ in range(100_000))
HOSTILE: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "is truncated"),
    "another format": (b"\x08\0\0\0\0\0\0\0" + b"{}      " * 4, "is no GGUF file"),
    "a pointer of Git LFS": (b"version https://git-lfs.github.com/spec/v1\noid", "is a Git LFS pointer"),
    "version 1": (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "it is GGUF version 1; 2 and 3 are read"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "2^60 keys": (header(0, 1 << 60), "claims 1,152,921,504,606,846,976 keys"),
    "2^60 tensors": (header(1 << 60, 0), "claims 1,152,921,504,606,846,976 tensors"),
    "keys that are not there": (header(0, 1000), "a key would end behind"),
    "a key of 2^63 bytes": (header(0, 1, struct.pack("<Q", 1 << 63)), "would end behind"),
    "a key of nothing": (header(0, 1, struct.pack("<QII", 0, 4, 0)), "is no name of a key"),
    "a key with an escape": (header(0, 1, string("\x1b[2J") + struct.pack("<II", 4, 0)), "is no name of a key"),
    "an unknown type": (header(0, 1, string("x") + struct.pack("<IQ", 77, 0)), "x has the unknown type 77"),
    "2^62 strings": (array(8, 1 << 62), "x claims 4,611,686,018,427,387,904 elements"),
    "2^62 numbers": (array(4, 1 << 62), "would end behind"),
    "2^23 strings of nothing": (array(8, (1 << 23) + 1, b"\0" * 64), "are read in all"),
    "arrays in arrays": (array(9, 1, NESTED), "arrays in arrays, more than 4 deep"),
    "a string that is short": (array(8, 1, struct.pack("<Q", 1 << 50)), "a text of x would end behind"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_headers(tmp_path: Path, case: str) -> None:
    data, words = HOSTILE[case]
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"x\.gguf") as error:
        GgufFile(path)
    assert words in error.value.message


def one(name: str = "t", kind: str = "F32", shape: tuple[int, ...] = (4, 32), offset: int = 0, dims: int = 0) -> bytes:
    from gguf_files import NUMBERS

    number = NUMBERS[kind] if kind in NUMBERS else int(kind)
    head = string(name) + struct.pack(f"<I{len(shape)}Q", dims or len(shape), *shape[::-1])
    return head + struct.pack("<IQ", number, offset)


TENSORS: dict[str, tuple[list[bytes], str]] = {
    "too large": ([one(shape=(1 << 40, 32))], "is truncated: t ends at byte"),
    "a product above 64 bits": ([one(shape=(1 << 47, 1 << 47))], "t has the impossible shape"),
    "a dimension of 0": ([one(shape=(0, 32))], "t has the impossible shape [0, 32]"),
    "9 dimensions": ([one(dims=9)], "t has 9 dimensions"),
    "no whole blocks": ([one(kind="Q4_0", shape=(4, 33))], "t has rows of 33, which are no whole blocks of 32"),
    "an unknown type": ([one(kind="99")], "t has the unknown type 99"),
    "an odd place": ([one(offset=8)], "t starts at byte 8 of the data, no multiple of 32"),
    "behind the end": ([one(offset=1 << 62)], "is truncated: t ends at byte"),
    "an overlap": ([one("a"), one("b", offset=256)], "b overlaps its neighbour"),
    "one name twice": ([one(), one(offset=512)], "the tensor t is there twice"),
    "a name that nobody can print": ([one("\n")], "is no name of a tensor"),
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_are_held_against_the_file(tmp_path: Path, case: str) -> None:
    infos, words = TENSORS[case]
    path = tmp_path / "x.gguf"
    path.write_bytes(header(len(infos), 0, b"".join(infos)) + bytes(2048))
    with pytest.raises(CheckpointError) as error:
        GgufFile(path)
    assert words in error.value.message


@pytest.mark.parametrize("alignment", [0, 1, 3, 12, 1 << 21])
def test_alignments_that_cannot_be(tmp_path: Path, alignment: int) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(header(0, 1, string("general.alignment") + value_bytes(alignment)))
    with pytest.raises(CheckpointError, match="must be a power of two"):
        GgufFile(path)


def test_of_a_key_that_is_there_twice_the_last_is_taken(tmp_path: Path) -> None:
    made = Gguf([("a", 1), ("a", 2), ("f", 1e-6), ("b", [True, False]), ("s", ["x", "ÿ"]), ("t", "")])
    file = GgufFile(made.write(tmp_path / "x.gguf"))
    assert (file.integer("a"), file.flags("b"), file.texts("s"), file.text("t")) == (2, [True, False], ["x", "ÿ"], "")
    assert file.number("f") == 1e-6, "as config.json has it, and not the float32"


@pytest.mark.parametrize(("ask", "words"), [
    (lambda f: f.integer("missing"), "the key missing is missing"),
    (lambda f: f.integer("list"), "list is an array"),
    (lambda f: f.integer("text"), "text is 'x'; it must be a whole number"),
    (lambda f: f.integer("one", low=2), "one is 1; it must be a whole number from 2"),
    (lambda f: f.number("text"), "text is 'x'; it must be a positive number"),
    (lambda f: f.number("nan"), "nan is nan; it must be a positive number"),
    (lambda f: f.texts("list"), "list is no array of texts"),
    (lambda f: f.flags("list"), "list is no array of truths"),
    (lambda f: f.text("one"), "one is 1; it must be a text"),
    (lambda f: f.floats("t"), "no small tensor t"),
])  # fmt: skip
def test_keys_of_another_type(tmp_path: Path, ask: Callable[[GgufFile], object], words: str) -> None:
    made = Gguf([("list", [1]), ("text", "x"), ("one", 1), ("nan", float("nan"))])
    file = GgufFile(made.write(tmp_path / "x.gguf"))
    with pytest.raises(CheckpointError) as error:
        ask(file)
    assert words in error.value.message


def test_version_2_is_read(tmp_path: Path) -> None:
    made = small()
    made.version = 2
    read_all(made.write(tmp_path / "x.gguf"))


# ---- split files ---------------------------------------------------------------------------------------------------


def test_any_part_stands_for_all(tmp_path: Path) -> None:
    whole = GgufCheckpoint(small().write(tmp_path / "whole.gguf"))
    paths = small().write_split(tmp_path / "m", 3)
    for path in paths:
        parts = GgufCheckpoint(path)
        assert parts.names == whole.names
        assert [file.path for file in parts.files] == [p for p in paths if p.name]
        for name in whole.names:
            assert torch.equal(parts.tensor(name), whole.tensor(name)) or whole.tensor(name).isnan().any()
    assert json.loads(tokenizer_json(GgufModel(paths[2])))["model"]["merges"] == ["a b"]


def _rename(paths: list[Path]) -> None:
    paths[1].rename(paths[0].with_name("x"))
    paths[2].rename(paths[1])
    paths[0].with_name("x").rename(paths[2])


def _other(paths: list[Path]) -> None:
    other = small()
    other.tensors = other.tensors[:2]
    other.write_split(paths[0].with_name("n"), 3)[1].rename(paths[1])


SPLITS: dict[str, tuple[Callable[[list[Path]], object], str]] = {
    "a part is missing": (lambda p: p[1].unlink(), "m-00002-of-00003.gguf is missing"),
    "parts have other names": (_rename, "split.no is 2; its name says 1"),
    "a part of another model": (_other, "the tensor token_embd.weight is in"),
    "a part of nothing": (lambda p: small().write(p[0]), "split.count is 1; its name says 3"),
}


@pytest.mark.parametrize("case", SPLITS)
def test_parts_that_do_not_belong_together(tmp_path: Path, case: str) -> None:
    paths = small().write_split(tmp_path / "m", 3)
    change, words = SPLITS[case]
    change(paths)
    with pytest.raises(CheckpointError) as error:
        GgufModel(paths[0])
    assert words in error.value.message or "split.tensors.count" in error.value.message


def test_a_part_alone_says_so(tmp_path: Path) -> None:
    path = small().write_split(tmp_path / "m", 2)[0].rename(tmp_path / "m.gguf")
    with pytest.raises(CheckpointError, match=r"split\.count is 2; its name says 1"):
        GgufModel(path)


def test_a_header_is_walked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = small().write(tmp_path / "x.gguf")
    first = container.open_gguf(path)
    assert container.open_gguf(path) is first
    small().write(path).touch()
    monkeypatch.setattr(container, "VERSIONS", ())
    with pytest.raises(CheckpointError):
        container.open_gguf(path)
