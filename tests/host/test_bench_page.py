"""`kerngen bench ... --report`: the page of a run is whole and asks for nothing, and another run is held against it."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from bench_runs import MATMUL, READ, RUNS, kernel_run, model_run, profile_run, step_run
from command import Kerngen
from pages import SVG, Node, marks_of, read_page, rows_of, svgs, value_at

from kerngen.errors import UsageError
from kerngen.report.bench.page import prepared, write_page
from kerngen.report.bench.runs import read_run
from kerngen.report.document import MADE_BY
from kerngen.workload.steps import Step


def drawn(path: Path, run: dict[str, Any], last: dict[str, Any] | None = None) -> Node:
    write_page(path, run, last)
    return read_page(path.read_text())


def bars_of(plot: Any) -> list[tuple[float, float]]:
    """(start, end) of each bar, in the axis' unit."""
    found = [(float(r.get("x")), float(r.get("width"))) for r in plot.iter(f"{SVG}rect")]
    axis = plot.attrib["data-x"]
    return [(value_at(axis, x), value_at(axis, x + width)) for x, width in found]


def figure(page: Node, id: str) -> Node:
    (found,) = [f for f in page.all("figure") if f.attributes["id"] == id]
    return found


@pytest.mark.parametrize("bench", RUNS)
def test_a_page_is_whole_and_carries_its_run(bench: str, tmp_path: Path) -> None:
    path, run = tmp_path / "run.html", RUNS[bench](1.0)
    page = drawn(path, run, RUNS[bench](1.05))
    text = path.read_text()
    assert MADE_BY in text
    policy = page.one("head").all("meta")[1].attributes["content"]
    assert policy.startswith("default-src 'none'; ")
    for node in page.all(""):
        assert not {"src", "srcset", "style", "onload", "onerror"} & node.attributes.keys()
        assert node.attributes.get("href", "#").startswith("#")
    assert all(s.all("figure") for s in page.all("section")), "no section is empty"
    for f in page.all("figure"):
        assert rows_of(f), "there is a table behind it"
    for plot in svgs(text):
        assert [t.text for t in plot.iter() if t.get("class") == "axis"]
    ids = [n.attributes["id"] for n in page.all("") if "id" in n.attributes]
    assert len(ids) == len(set(ids))
    assert read_run(path, bench) == run
    printed = tmp_path / "run.json"
    printed.write_text(json.dumps(run))
    assert read_run(printed, bench) == run
    alone = drawn(path, run)
    assert "--against FILE" in alone.one("main").text


def test_a_step_is_one_bar_of_kernels_over_its_floor(tmp_path: Path) -> None:
    run = profile_run()
    page = drawn(tmp_path / "p.html", run, profile_run(1.1))
    (plot, *_) = svgs((tmp_path / "p.html").read_text())
    bars, count = bars_of(plot), len(run["rows"])
    time, floor, last = bars[:count], bars[count : 2 * count], bars[2 * count :]
    for line, total in ((time, run["step_us"]), (floor, sum(r["floor_us"] for r in run["rows"])),
                        (last, 1.1 * run["step_us"])):  # fmt: skip
        assert line[0][0] == pytest.approx(0, abs=0.01)
        assert line[-1][1] == pytest.approx(total / 1e3, rel=0.005)
        assert all(a[1] == pytest.approx(b[0], abs=0.05) for a, b in pairwise(line))
    rows = rows_of(figure(page, "step-0"))
    assert [r["kernel"] for r in rows] == [r["kernel"] for r in run["rows"]]
    assert rows[1]["floor (µs)"] == f"{16.5e6 / READ:.0f}"
    roof = rows_of(figure(page, "roofline-0"))
    assert [r["what"] for r in roof] == ["attn_decode", "w4a16_gemm"], "the others have no FLOPs"
    assert roof[1]["reached (TFLOP/s)"] == f"{1.9e12 / 6127 / 1e6:.4g}"


def test_a_case_is_told_by_the_limit_that_it_is_bound_by(tmp_path: Path) -> None:
    run = kernel_run()
    page = drawn(tmp_path / "k.html", run)
    one, many = rows_of(figure(page, "limits-0"))
    assert one["floor, of it (%)"] == f"{100 * 130e3 / 31 / READ:.1f}"
    assert many["floor, of it (%)"] == f"{100 * 1890e3 / 2400 / MATMUL:.1f}"
    assert one["marlin (µs)"] == "47.00"
    assert "machete (µs)" not in one, "it could not be timed"
    assert "Failed: rmsnorm h5376_t8192." in page.one("main").text
    roof = svgs((tmp_path / "k.html").read_text())[-1]
    dots = marks_of(roof)
    assert [x for _, x, _ in dots] == pytest.approx([0.46e3 / 130, 1890e3 / 570], rel=0.02)
    assert [y for *_, y in dots] == pytest.approx([0.46e3 / 31, 1890e3 / 2400], rel=0.02)


def test_what_changed_is_told_from_what_stayed(tmp_path: Path) -> None:
    page = drawn(tmp_path / "m.html", model_run(1.0), model_run(1.03))
    rows = rows_of(figure(page, "against-0"))
    assert [r["times as fast"] for r in rows] == ["1.030"] * 3
    assert {r[""] for r in rows} == {"faster"}
    page = drawn(tmp_path / "m.html", model_run(1.03), model_run(1.0))
    assert {r[""] for r in rows_of(figure(page, "against-0"))} == {"slower"}
    page = drawn(tmp_path / "m.html", model_run(1.001), model_run(1.0))
    assert {r[""] for r in rows_of(figure(page, "against-0"))} == {"within the spread of both runs"}
    page = drawn(tmp_path / "k.html", kernel_run(0.9), kernel_run(1.0) | {"environment": {"gpu": "H100"}})
    assert "on H100. This one is on H200" in page.one("main").text
    assert [r["times as fast"] for r in rows_of(figure(page, "against-1"))] == ["1.000"]


def test_a_run_without_a_floor_is_drawn_without(tmp_path: Path) -> None:
    page = drawn(tmp_path / "m.html", model_run(floor_ms=0.0))
    assert "No limit was measured." in page.one("main").text
    assert {r["floor (ms)"] for r in rows_of(figure(page, "step-0"))} == {""}


def test_a_step_in_which_nothing_ran_is_said_to_be_that(tmp_path: Path) -> None:
    page = drawn(tmp_path / "p.html", profile_run() | {"rows": [], "step_us": 0})
    assert not page.all("figure")
    assert "Nothing ran." in page.one("main").text


def test_names_cannot_end_what_holds_them(tmp_path: Path) -> None:
    evil = "</script><img src=x onerror=alert(1)>"
    run = step_run(names=("untuned", evil))
    page = drawn(tmp_path / "s.html", run)
    assert not page.all("img")
    assert evil in page.one("main").text
    assert read_run(tmp_path / "s.html", "step") == run


BROKEN = profile_run()
BROKEN["rows"][0]["moved_us"] = "fast"


@pytest.mark.parametrize(("content", "says"), [
    ("Dear diary", "neither a run's JSON nor its page"),
    ('{"read_gbps": NaN}', "neither a run's JSON nor its page"),
    ("[" * 100_000, "neither a run's JSON nor its page"),
    ("[1]", "no run of kerngen bench"),
    (json.dumps(model_run()), "is of kerngen bench model, not of kerngen bench profile"),
    (json.dumps(profile_run() | {"model": "gemma-4-12b"}), "of another model: gemma-4-12b, and not gemma-4-31b"),
    (json.dumps(profile_run(step=Step.decode(1, 512))), "of another step: phase decode, batch 1"),
    (json.dumps(BROKEN), "not what kerngen bench profile wrote"),
    (json.dumps({"bench": "profile"}), "not what kerngen bench profile wrote"),
])  # fmt: skip
def test_what_is_no_run_of_the_same_is_refused_first(content: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "last.json").write_text(content)
    alike = {name: profile_run()[name] for name in ("model", "step")}
    with pytest.raises(UsageError, match=says):
        prepared(tmp_path / "new.html", tmp_path / "last.json", "profile", alike)


def test_a_file_of_somebody_elses_is_not_written_over(tmp_path: Path, kerngen: Kerngen) -> None:
    """By no command that draws a page, and before anything is measured or tuned."""
    mine = tmp_path / "thesis.html"
    mine.write_text("<!DOCTYPE html><p>mine</p>")
    for args in (("bench", "profile", "gemma-4-31b"), ("bench", "kernel", "embed"), ("bench", "step", "gemma-4-31b"),
                 ("bench", "model", "gemma-4-31b"), ("tune", "--arch", "sm70", "--model", "gemma-4-31b")):  # fmt: skip
        code, _, err = kerngen(*args, "--report", str(mine))
        assert (code, "is no page of kerngen's" in err) == (2, True), f"{args}: {err}"
    code, _, err = kerngen("db", "report", "-o", str(mine))
    assert (code, "is no page of kerngen's" in err) == (2, True)
    assert mine.read_text() == "<!DOCTYPE html><p>mine</p>"
    code, _, err = kerngen("bench", "kernel", "embed", "--against", str(mine))
    assert (code, "name one with --report FILE" in err) == (2, True)
    empty = tmp_path / "empty.html"
    empty.touch()
    write_page(empty, kernel_run())
    write_page(empty, kernel_run())  # its own page is
    assert MADE_BY in empty.read_text()
