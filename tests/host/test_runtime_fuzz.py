"""Folders in which something was changed at random: each runs, or is refused in one line. Nothing else comes of it.

A longer run: KERNGEN_TEST_FUZZ=40000 python -m pytest tests/host/test_runtime_fuzz.py
"""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import struct
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import WIDE, quantize, shard
from tiny_gemma import make_target
from tokens import write_tokenizer

from kerngen.errors import KerngenError
from kerngen.runtime.session import load

NUM_CHANGED = int(os.environ.get("KERNGEN_TEST_FUZZ", "150"))
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 3, 64, 1 << 31, 1 << 64, 10**400, 0.5, 1e-300, float("nan"), float("-inf"), "", "x",
    "\ud800", "../../../etc/passwd", "full_attention", "model.norm.weight", [], {}, [[]], [None], {"": {}}, [0],
)  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Dense, of experts, with per-layer inputs, in int4, in shards."""
    made = [tmp_path_factory.mktemp("fuzz") / name for name in ("k_eq_v", "moe", "shared_ple", "int4", "shards")]
    for folder in made:
        if folder.name == "int4":
            make_target(folder, "k_eq_v", **WIDE)
            quantize(folder, 32)
        else:
            make_target(folder, "k_eq_v" if folder.name == "shards" else folder.name)
        if folder.name == "shards":
            shard(folder)
        write_tokenizer(folder)
        sampled = {"do_sample": True, "top_k": 5, "top_p": 0.9, "eos_token_id": [1, 5], "suppress_tokens": [3]}
        (folder / "generation_config.json").write_text(json.dumps(sampled))
    return made


def test_whatever_a_folder_holds_it_runs_or_is_refused(folders: list[Path], tmp_path: Path) -> None:
    chosen, came = random.Random(11), {"ran": 0, "refused": 0}
    for turn in range(NUM_CHANGED):
        folder = tmp_path / "changed"
        shutil.copytree(chosen.choice(folders), folder)
        file = chosen.choice(sorted(folder.iterdir()))
        file.write_bytes(_changed(file, chosen))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                load(folder, device="cpu", draft=False).generate("hi", max_new_tokens=2)
            came["ran"] += 1
        except KerngenError as e:
            assert len(e.message) < 800 and "\n" not in e.message, f"turn {turn}: {e.message}"  # noqa: PT017, PT018
            came["refused"] += 1
        shutil.rmtree(folder)
    assert min(came.values()) > 0, came


def _changed(file: Path, chosen: random.Random) -> bytes:
    """What `file` holds, with a value of its JSON exchanged or left out, or bytes flipped, left out or put in."""
    data = file.read_bytes()
    if chosen.random() < 0.3:
        return _bytes_changed(data, chosen)
    if file.suffix == ".json":
        return _json_changed(data, chosen)
    if file.suffix == ".safetensors":
        size = 8 + struct.unpack("<Q", data[:8])[0]
        header = _json_changed(data[8:size], chosen)
        return struct.pack("<Q", len(header)) + header + data[size:]
    return _bytes_changed(data, chosen)


def _json_changed(data: bytes, chosen: random.Random) -> bytes:
    value = {"": copy.deepcopy(json.loads(data))}
    for _ in range(chosen.choice((1, 2))):
        inside, key = chosen.choice(list(_places(value)))
        if inside is not value and chosen.random() < 0.2:
            del inside[key]
        else:
            inside[key] = copy.deepcopy(chosen.choice(VALUES))
    return json.dumps(value[""]).encode()


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of all that lies in it; of a list its first few."""
    keys = list(value) if isinstance(value, dict) else range(min(len(value), 6)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from _places(value[key])


def _bytes_changed(data: bytes, chosen: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(chosen.choice((1, 4, 20))):
        at = chosen.randrange(len(changed) or 1)
        match chosen.choice(("flip", "flip", "drop", "put", "cut")):
            case "flip" if changed:
                changed[at] ^= 1 << chosen.randrange(8)
            case "drop":
                del changed[at : at + chosen.randrange(1, 30)]
            case "put":
                changed[at:at] = chosen.randbytes(chosen.randrange(1, 9))
            case "cut" if chosen.random() < 0.2:
                del changed[at:]
    return bytes(changed)
