"""`python -m kerngen.tuning.variants` on a GPU: what is right is timed, what is wrong is said."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kerngen.cli import run_command
from kerngen.tuning import variants


@pytest.mark.whole_gpu
def test_right_and_wrong_texts_are_told_apart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = "r[j] = r[j] * next_scale * w[j];"
    path = tmp_path / "variants.toml"
    path.write_text(
        f"""
[[variant]]
name = "twos"
config = "rows_per_block=2"
[[variant]]
name = "twice as large"
[[variant.replace]]
this = "{wrong}"
by = "{wrong.replace("next_scale", "2.0f * next_scale")}"
[[variant]]
name = "known to be"
right = false
[[variant.replace]]
this = "{wrong}"
by = "{wrong.replace("next_scale", "2.0f")}"
"""
    )
    monkeypatch.setattr(sys, "argv", ["variants", "add_norm", str(path), "--problem", "hidden=5376,num_tokens=32"])
    assert run_command(variants.main, "variants") == 1
    out, err = capsys.readouterr()
    assert out.count(" us ") == 4
    assert "no time: twice as large: wrong: add_norm" in out
    assert "known to be  (wrong by intent)" in out
    assert "1 variants are wrong or failed" in err
