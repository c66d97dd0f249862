"""Tiny models whose sizes divide among ranks unevenly, with drafters; kernels' reference takes them too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_gemma
from tiny_dflash import make_dflash

from kerngen.runtime.config import read_model_config

# 13 vectors of the MLP and of the vocabulary: 56 and 48 for two; 40, 32, 32; 32, 24, 24, 24.
SIZES = {"head_dim": 128, "global_head_dim": 256, "hidden_size": 64, "intermediate_size": 104, "vocab_size": 104}
ODD: dict[str, dict[str, Any]] = {
    "dense": {},
    "k_eq_v": {},
    "moe": {"moe_intermediate_size": 40},  # 16, 8, 8, 8 for four
}


def make_pair(root: Path, variant: str) -> tuple[Path, Path]:
    """The folders of a target of one kind and of its drafter. "dflash": a k_eq_v with a DFlash drafter."""
    drafter = root / "drafter"
    if variant == "dflash":
        layers = len(read_model_config(make_pair(root, "k_eq_v")[0]).layers)
        sizes = {name: SIZES[name] for name in ("hidden_size", "head_dim", "vocab_size")}
        make_dflash(root / "dflash", layers, (0, 1, 3), **sizes)
        return root / "target", root / "dflash"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SIZES.items():
            patch.setitem(tiny_gemma.BASE, name, value)
        tiny_gemma.make_target(root / "target", variant, **ODD[variant])
        tiny_gemma.make_assistant(drafter, variant)
    return root / "target", drafter
