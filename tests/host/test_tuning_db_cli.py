"""`kerngen db`: what it prints, and how it fails."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console
from test_tuning_db import H200, add_build, key_of, measured, predicted

from kerngen.arch import Target, find_arch
from kerngen.cli.db import db
from kerngen.cli.tables import Table, share_bar
from kerngen.compiler.compile import compile_cubin
from kerngen.compiler.render import render
from kerngen.errors import TuningMiss, UsageError
from kerngen.templates import find_kernel
from kerngen.templates.kernel import fields_of, parse_fields, static_fields
from kerngen.tuning_db import Measurement, Store, problem_key
from kerngen.tuning_db.dist.verify import LEVELS, verify
from kerngen.tuning_db.read.values import StepKey
from kerngen.tuning_db.store.ranking import Rankings

SM90 = find_arch("sm90")


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A database of a kernel that is not installed here: two tuned points, refusals and all."""
    path = tmp_path / "tuning.db"
    with Store.open(path) as store:
        builds = [add_build(store, n) for n in range(4)]
        store.add_measurements([measured(builds[n], n, 10.0 + 5 * n, p10_us=9.5, p90_us=11.0) for n in range(3)])
        store.add_measurement(
            measured(builds[3], 3, None, outcome="wrong_result", reason="[3, 4] is off by 0.5", error_abs=float("inf"))
        )
        for need in (300_000, 400_000):
            reason = f"needs {need:,} B of shared memory"
            store.add_measurement(measured(None, 9, None, outcome="invalid", reason=reason))
        store.add_measurement(predicted(builds[2], 2, 7.0, problem=key_of(128)))
        store.recompute_winners("toy", key_of().static_key, Target.of(H200))
    monkeypatch.setenv("KERNGEN_DB", str(path))
    monkeypatch.setattr("kerngen.tuning_db.read.places.PREBUILT", tmp_path / "none")
    return path


def run(*arguments: str) -> str:
    result = CliRunner().invoke(db, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def ids() -> list[str]:
    return [w["id"] for w in json.loads(run("ls", "--json"))]


def test_ls(path: Path) -> None:
    text = run("ls", "--verbose")
    assert "toy on sm90 (H200) in user: dtype=bf16 head_dim=128 batch=8" in text
    assert "block_n=0" in text
    assert "measured" in text
    assert "predicted" in text
    rows = json.loads(run("ls", "--json"))
    assert [(r["provenance"], r["latency_us"], r["config"]) for r in rows] == [
        ("measured", 10.0, {"block_n": 0}),
        ("predicted", 7.0, {"block_n": 2}),
    ]
    assert json.loads(run("ls", "--json", "--db", str(path))) == rows


def test_ls_counts_in_80_columns_and_lists_where_it_is_asked_to(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("kerngen.cli.tables.line_width", lambda **_: 80)  # as on a terminal
    lines = run("ls").splitlines()
    assert f"user: {path} (2 winners)".replace(" ", "") in "".join("".join(lines).split()), "a long path may be broken"
    (row,) = [line.split() for line in lines if line.startswith("toy ")]
    assert row == ["toy", "sm90", "H200", "1", "1", "2"], "one measured, one predicted, neither the default"
    assert "block_n" not in "".join(lines)
    whole = set(run("ls", "-v").split())
    assert {"block_n=0;", "block_n=2;"} & whole or {"block_n=0", "block_n=2"} <= whole
    assert {i[:12] for i in ids()} <= whole
    for args in (("ls", "-v"), ("show", ids()[0]), ("explain", ids()[0]), ("stats",)):
        shown = run(*args).splitlines()
        assert [line for line in shown if len(line) > 80 and str(path) not in line] == []


def test_a_table_breaks_no_word() -> None:
    """It is columns where every word has room, and paragraphs where one has none."""
    table = Table("", "name", "what it does", ">us")
    table.add_row("attn_decode", "head norms, RoPE and the cache write", "12.5")
    table.add_row("embed", "", "3.0")
    words = {"attn_decode", "head", "norms,", "RoPE", "and", "the", "cache", "write", "12.5", "embed", "3.0"}
    for columns in range(14, 70):
        console = Console(width=columns, file=io.StringIO())
        console.print(table)
        text = console.file.getvalue()  # type: ignore[attr-defined]
        assert all(len(line) <= columns for line in text.splitlines())
        assert words <= set(text.replace(";", "").split())
    assert text.splitlines()[1] == "attn_decode  head norms, RoPE and the cache write  12.5"


def test_a_bar_is_of_what_the_terminal_can_show(monkeypatch: pytest.MonkeyPatch) -> None:
    for encoding, bars in (("utf-8", ("", "▌", "████▌", "████████")), ("ascii", ("", "", "####", "########"))):
        monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), encoding=encoding))
        assert tuple(share_bar(share) for share in (0.0, 0.0625, 0.5625, 2.0)) == bars


def test_ls_filters(path: Path) -> None:
    for filtering in (("--arch", "sm70,sm80"), ("--device", "H100"), ("--kernel", "rmsnorm")):
        assert json.loads(run("ls", "--json", *filtering)) == []
    assert len(json.loads(run("ls", "--json", "--arch", "sm90", "--device", "H200", "--kernel", "toy"))) == 2


def test_ls_of_nothing_says_how_to_fill_it(tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNGEN_DB", str(tmp_path / "absent.db"))
    result = CliRunner().invoke(db, ["ls"], catch_exceptions=False)
    assert result.exit_code == 0
    assert result.stdout == ""
    assert "no winners in" in result.stderr
    assert "absent.db (not there yet)" in result.stderr
    assert "fill it: kerngen tune --arch ARCH --model NAME\n" in result.stderr
    for args, says, fix in (
        (("--arch", "sm70"), "no winners on sm70 in", "--arch sm70 --model NAME\n"),
        (("--kernel", "embed", "--arch", "sm75"), "no winners of embed on sm75 in", "sm75 --model NAME --kernel embed"),
        (("--device", "H300"), "no winners for device H300 in", "--arch ARCH --model NAME\n"),
    ):
        said = CliRunner().invoke(db, ["ls", *args], catch_exceptions=False).stderr
        assert says in said
        assert fix in said
    assert not (tmp_path / "absent.db").exists(), "reading made a database"


def test_show(path: Path) -> None:
    first = ids()[0]
    text = run("show", first[:8])
    for part in ("10.00 us, measured on H200", "NVRTC 12.9 for sm_90a", "fastest of 3 measured", "9.50-11.00"):
        assert part in text
    shown = json.loads(run("show", first, "--json"))
    assert shown["build"]["entries"]["toy"]["registers"] == 40
    assert [m["p50_us"] for m in shown["measurements"]] == [10.0]


def test_explain(path: Path) -> None:
    text = run("explain", ids()[0])
    assert "[3, 4] is off by 0.5" in text
    told = json.loads(run("explain", ids()[0], "--json"))
    assert [(n["us"], n["is_winner"]) for n in told["near"]] == [(10.0, True), (15.0, False), (20.0, False)]
    assert [(r["outcome"], r["times"]) for r in told["refused"]] == [("invalid", 2), ("wrong_result", 1)]
    assert "and 2 slower" in run("explain", ids()[0], "--top", "1")


def test_explain_has_the_time_alone_and_in_the_step(path: Path) -> None:
    with Store.open(path) as store:
        step = store.add_step(StepKey("gemma", "sm90", "decode", 1, 1, 512, 0, 12, "sequence"))
        builds = {b.config["block_n"]: b.id for b in store.builds(key_of().static_key).values()}
        how: dict[str, Any] = {"stage": "step", "step_id": step, "base_id": "base", "base_step_us": 5000.0}
        store.add_measurements([measured(builds[n], n, 10.0 + 5 * n, step_us=5000.0 - 50 * n, **how) for n in range(2)])
        store.recompute_winners("toy", key_of().static_key, Target.of(H200))
    subject = next(w["id"] for w in json.loads(run("ls", "--json")) if w["latency_us"] == 15.0)
    text = run("explain", subject)
    assert "us alone" in text
    assert "the steps" in text
    assert "-1.00%" in text
    assert "not tried" in text
    told = json.loads(run("explain", subject, "--json"))
    assert [(n["us"], n["step"], n["lost_in_step"]) for n in told["near"]] == [
        (15.0, 0.99, False), (10.0, 1.0, True), (20.0, None, True)
    ]  # fmt: skip
    assert {r["step_us"] for r in told["in_step"]} == {5000.0, 4950.0}


def test_a_winner_of_the_step_without_a_final_is_what_its_observations_give(path: Path) -> None:
    with Store.open(path) as store:
        step = store.add_step(StepKey("gemma", "sm90", "decode", 1, 1, 512, 0, 12, "sequence"))
        builds = {b.config["block_n"]: b.id for b in store.builds(key_of().static_key).values()}
        how: dict[str, Any] = {"stage": "step", "step_id": step, "base_id": "base", "base_step_us": 5000.0}
        store.add_measurements([
            measured(builds[0], 0, 10.0, stage="final"),
            *(measured(builds[n], n, 10.0 + 5 * n, step_us=5000.0 - 50 * n, **how) for n in range(2)),
        ])  # fmt: skip
        winners = store.recompute_winners("toy", key_of().static_key, Target.of(H200))
        winner = next(w for w in winners if w.build_id == builds[1])
        with Store.open(path, read_only=True) as same:
            assert Rankings(same, "toy", key_of().static_key).of(winner).candidate(builds[1]) is not None
    assert [(v.level, v.faults) for v in verify(str(path), LEVELS[:2])] == [("structure", []), ("digests", [])]


def test_explain_counts_the_revoked(path: Path) -> None:
    first = ids()[0]
    with Store.open(path) as store:
        store.revoke(store.measurements(outcome="ok")[1].id, "clock was low")
    refused = json.loads(run("explain", first, "--json"))["refused"]
    assert {"outcome": "revoked", "times": 1, "example": "clock was low"} in refused


def tune_rmsnorm(path: Path, fields: str) -> None:
    """One predicted winner of a kernel that is installed, compiled here."""
    kernel = find_kernel("rmsnorm")
    problem: Any = parse_fields(kernel.problem_type, fields)
    config = kernel.default_config(problem, Target.of(SM90))
    source = render(kernel, problem, config, Target.of(SM90))
    key, chosen = problem_key(kernel, problem), fields_of(config)
    with Store.open(path) as store:
        build = store.add_build(compile_cubin(source, SM90), kernel.name, source, chosen, static_fields(problem))
        store.add_measurement(
            Measurement(key, "sm90", H200, chosen, build, "ok", "predicted", model="roofline-1", p50_us=3.5)
        )
        store.recompute_winners(kernel, key.static_key, Target.of(H200))


def test_a_kernel_and_its_problem(path: Path) -> None:
    tune_rmsnorm(path, "")
    told = json.loads(run("explain", "rmsnorm", "--arch", "sm90", "--json"))
    assert told["latency_us"] == 3.5
    assert told["why"]["is_default"]
    assert "answered    user: predicted for H200" in run("show", "rmsnorm")
    with pytest.raises(TuningMiss, match="rmsnorm"):
        run("show", "rmsnorm", "--arch", "sm70")


def test_naming_enough_to_mean_one_winner(path: Path) -> None:
    """num_tokens defaults to 1, where neither was tuned."""
    tune_rmsnorm(path, "hidden=1024,num_tokens=16")
    tune_rmsnorm(path, "hidden=2048,num_tokens=16")
    assert json.loads(run("show", "rmsnorm", "--problem", "hidden=2048", "--json"))["problem"]["hidden"] == 2048
    with pytest.raises(UsageError, match=r"2 .*rmsnorm.*sm90") as caught:
        run("show", "rmsnorm", "--problem", "dtype=bf16")
    assert "name more of hidden" in str(caught.value)
