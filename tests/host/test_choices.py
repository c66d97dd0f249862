"""What defaults are worth, by what an H200 took for their problems' configurations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from kerngen.errors import RecordingError
from tools.choices import Choice, Timed, main, read, score, summaries

H200 = Path(__file__).parents[2] / "data" / "choices" / "h200"
FILES = sorted(H200.glob("*.csv"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_defaults_are_as_fast_as_those_that_were_chosen_by_hand(path: Path) -> None:
    """In the mean of each set at least, and none takes a quarter longer."""
    found = summaries(map(score, read(path)))
    assert found
    for s in found:
        assert s.mean <= 1.01, s
        assert s.worst <= 1.25, s
        assert s.num_timed >= 0.5 * s.num_problems, "the candidates of today are others: time them"


def test_the_score_of_a_choice() -> None:
    timed = next(read(H200 / "dense_gemv.csv"))
    default = timed.kernel.default_config(timed.problem, timed.target)
    base, other = [c for c in timed.us if c != default][:2]
    made = Timed(timed.kernel, timed.target, "model", timed.problem, base, {base: 10.0, default: 9.0, other: 8.0})
    assert score(made).ratio == pytest.approx(0.9)
    assert score(made).best == pytest.approx(0.8)
    untimed = Timed(timed.kernel, timed.target, "model", timed.problem, base, {base: 10.0, other: 8.0})
    assert score(untimed).ratio is None


def test_summaries_are_of_what_was_timed() -> None:
    of_wide = [Choice("k", "wide", "", r, b, s) for r, b, s in ((0.5, 0.5, 1.0), (2.0, 1.0, 0.0), (None, 1.0, 0.5))]
    (found,) = summaries([*of_wide, Choice("k", "random", "", None, 1.0, 0.5)])
    assert (found.num_problems, found.num_timed) == (3, 2)
    assert (found.mean, found.worst, found.spearman) == (pytest.approx(1.0), 2.0, 0.5)


def test_a_file_that_is_none(tmp_path: Path) -> None:
    head, columns, first, *_ = (H200 / "moe_router.csv").read_text().splitlines()
    for wrong in ("", "{}", f"{head}\nset,us\n", f"{head}\n{columns}\n{first.replace(',1,', ',0,')}\n"):
        (tmp_path / "moe_router.csv").write_text(wrong)
        with pytest.raises(RecordingError, match=r"moe_router\.csv"):
            list(read(tmp_path / "moe_router.csv"))


def test_the_command(tmp_path: Path) -> None:
    ran = CliRunner().invoke(main, [str(H200), "--json"])
    assert ran.exit_code == 0, ran.output
    assert {s["kernel"] for s in json.loads(ran.output)["summaries"]} == {path.stem for path in FILES}
    (tmp_path / "moe_router.csv").symlink_to(H200 / "moe_router.csv")
    assert "moe_router" in CliRunner().invoke(main, [str(tmp_path), "--problems"]).output
