"""Tiny models whose sizes divide among ranks unevenly, with drafters; kernels' reference takes them too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_gemma

# 13 vectors of the MLP and of the vocabulary: 56 and 48 for two; 40, 32, 32; 32, 24, 24, 24.
SIZES = {"head_dim": 128, "global_head_dim": 256, "hidden_size": 64, "intermediate_size": 104, "vocab_size": 104}
ODD: dict[str, dict[str, Any]] = {
    "dense": {},
    "k_eq_v": {},
    "moe": {"moe_intermediate_size": 40},  # 16, 8, 8, 8 for four
}


def make_pair(root: Path, variant: str) -> tuple[Path, Path]:
    """The folders of a target of one kind and of its drafter."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SIZES.items():
            patch.setitem(tiny_gemma.BASE, name, value)
        tiny_gemma.make_target(root / "target", variant, **ODD[variant])
        tiny_gemma.make_assistant(root / "drafter", variant)
    return root / "target", root / "drafter"
