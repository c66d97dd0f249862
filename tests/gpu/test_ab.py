"""`kerngen bench ab` on a GPU: right and wrong sources are told apart, and ablations are timed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from kerngen.cli import run_command
from kerngen.tuning_db import Store


def test_right_and_wrong_sources_are_told_apart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = "r[j] = r[j] * next_scale * w[j];"
    path = tmp_path / "norm.toml"
    path.write_text(
        f"""
[[entry]]
kernel = "add_norm"
problem = "hidden=5376,num_tokens=32"
configs = ["rows_per_block=2"]
[[entry.patch]]
name = "twice as large"
[[entry.patch.replace]]
this = "{wrong}"
by = "{wrong.replace("next_scale", "2.0f * next_scale")}"
[[entry.patch]]
name = "known to be"
wrong = true
[[entry.patch.replace]]
this = "{wrong}"
by = "{wrong.replace("next_scale", "2.0f")}"
"""
    )
    db = str(tmp_path / "tuning.db")
    monkeypatch.setattr(sys, "argv", ["kerngen", "bench", "ab", str(path), "--db", db, "--json"])
    assert run_command() == 1
    out, err = capsys.readouterr()
    assert "1 candidates are wrong or failed" in err
    default, twos, twice, known, again = json.loads(out)["entries"][0]["trials"]
    assert all(t["again"] and t["us"] > 0 for t in (default, twos, known, again))
    assert (twice["outcome"], twice["us"]) == ("wrong_result", None)
    assert (known["outcome"], known["wrong"]) == ("wrong_result", True)
    with Store.open(db) as store:
        rows = [o.measurement for o in store.measurements("add_norm")]
    assert {m.tags["patch"]["name"] for m in rows if "patch" in m.tags} == {"twice as large", "known to be"}
    assert {m.stage for m in rows} == {"trial", "final"}
