"""`kerngen db report`: a page that is whole, that asks for nothing, and whose every number is the database's."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command import Kerngen
from pages import SVG, Node, area_of, corners_of, marks_of, read_page, rows_of, svgs, value_at
from sheets import measured_store
from test_tuning_db import H200, add_build, key_of, measured

from kerngen.arch import Target, find_arch
from kerngen.cost.predict import predict
from kerngen.report.data import Facts, Wanted, gather, in_order
from kerngen.report.figure import digits, duration, us
from kerngen.report.page import write_report
from kerngen.report.svg import Plot, Scale, px, short
from kerngen.report.trials import predictions
from kerngen.templates import find_kernel
from kerngen.tuning_db import Store, Winner, problem_key
from kerngen.tuning_db.read.values import StepKey
from kerngen.workload.steps import Step, sequence
from kerngen.workload.workload import find_model

KERNELS = ("add_norm", "attn_prefill", "gelu_gate", "rmsnorm", "softcap_argmax", "w4a16_gemm")
SECTIONS = ["steps", "judged", "tokens", "gain", "arches", "roofline", "searches", "prediction", "provenance"]
AXIS = re.compile(r".+ \((µs|ms|tokens|keys|elements|times|%|FLOP/B|MB|TFLOP/s|GB/s|number|rows)\)")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of some kernels: what others launch has no winner here, and no figure has more rows than a table shows."""
    return measured_store(tmp_path_factory.mktemp("shipped") / "h200.sqlite", KERNELS)


@pytest.fixture(scope="module")
def shipped(file: Path) -> Any:
    with Store.open(file, read_only=True) as store:
        yield store


@pytest.fixture(scope="module")
def text(shipped: Store, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("report") / "report.html"
    write_report(path, [shipped])
    return path.read_text()


@pytest.fixture(scope="module")
def page(text: str) -> Node:
    return read_page(text)


def figures(page: Node, section: str) -> list[Node]:
    (found,) = [s for s in page.all("section") if s.attributes["id"] == section]
    return found.all("figure")


def cells(page: Node, section: str, column: str) -> list[str]:
    return [row[column] for f in figures(page, section) for row in rows_of(f)]


def require_sound(text: str) -> None:
    """What holds of every page, whatever is in its databases."""
    page = read_page(text)
    ids = re.findall(r'\sid="([^"]*)"', text)
    assert len(ids) == len(set(ids))
    assert [s.attributes["id"] for s in page.all("section")] == SECTIONS
    for link in page.all("a"):
        assert link.attributes["href"].removeprefix("#") in ids
    policy = page.one("head").all("meta")[1].attributes
    assert policy["http-equiv"] == "Content-Security-Policy"
    assert policy["content"].startswith("default-src 'none'; ")
    assert "unsafe" not in policy["content"]
    for tag in ("link", "img", "iframe", "object", "embed", "base", "audio", "video", "source"):
        assert not page.all(tag), f"a page that asks for nothing has no <{tag}>"
    for node in page.all(""):
        assert not {"src", "srcset", "style", "onload", "onerror", "xlink:href"} & node.attributes.keys()
        assert node.attributes.get("href", "#").startswith("#")
    for tag in ("style", "script"):
        code = page.one("head" if tag == "style" else "body").one(tag).text
        for loads in ("url(", "@import", "fetch(", "XMLHttpRequest", "import(", "eval("):
            assert loads not in code
        assert set(re.findall(r"\w+://[^\"]*", code)) <= {"http://www.w3.org/2000/svg"}, "the name of SVG, no address"
    for plot in svgs(text):
        assert plot.get("role") == "img"
        about = {child.get("id"): (child.text or "").strip() for child in plot[:2]}
        assert plot.attrib["aria-labelledby"].split() == list(about)
        assert all(about.values()), "it has a title and is described"
        axes = [t.text or "" for t in plot.iter() if t.get("class") == "axis"]
        assert axes
        assert all(AXIS.fullmatch(a) for a in axes), f"no axis without its unit: {axes}"
        for element in plot.iter():
            for name, value in element.attrib.items():
                if name in ("d", "x", "y", "width", "height", "viewBox"):
                    assert re.fullmatch(r"[MLHVh\d. -]*", value), f"{element.tag} {name}={value}"
        (left, right), (top, bottom) = area_of(plot)
        for path in plot.iter(f"{SVG}path"):
            if (path.get("class") or "").split()[:1] == ["line"]:
                for x, y in (corner for piece in corners_of(path) for corner in piece):
                    assert left <= x <= right, f"{plot[0].text}: {path.attrib}"
                    assert top <= y <= bottom, f"{plot[0].text}: {path.attrib}"
    for f in page.all("figure"):
        assert f.one("figcaption").one("h3").text.strip()
        assert rows_of(f), "there is a table behind it"
        assert all(th.attributes["scope"] == "col" for th in f.all("th"))
        for row in f.one("tbody").all("tr"):
            for cell in row.all("td"):
                if cell.attributes.get("class") == "number" and cell.text:
                    assert re.fullmatch(r"-?\d+(\.\d*)?(e[+-]\d+)?", cell.text), cell.text


def test_the_page_of_the_shipped_database_is_sound(text: str, page: Node) -> None:
    require_sound(text)
    assert page.one("html").attributes["lang"] == "en"
    assert all(s.all("figure") for s in page.all("section"))


def test_every_winner_is_there_with_its_time(page: Node, shipped: Store) -> None:
    winners = [w for w in shipped.winners() if w.problem.dynamic is not None]
    assert len(winners) > 100
    assert Counter(cells(page, "tokens", "winner (µs)")) == Counter(us(w.latency_us) for w in winners)
    assert Counter(cells(page, "tokens", "default (µs)")) == Counter(us(w.why["default_us"]) for w in winners)
    assert Counter(cells(page, "tokens", "floor (µs)")) == Counter(us(_floor(w)) for w in winners)
    assert Counter(cells(page, "tokens", "how")) == Counter(w.provenance + ", stale" * w.stale for w in winners)
    every = shipped.winners()
    gains = sorted(f"{w.why['default_us'] / w.latency_us:.3f}" for w in every if w.why["default_us"])
    assert sorted(cells(page, "gain", "gain")) == gains


def _floor(w: Winner) -> float:
    kernel = find_kernel(w.kernel)
    cost = kernel.cost(kernel.problem_type(**w.problem.fields))
    return max(cost.bytes / (w.device.mem_gbps * 1e3), cost.flops / (w.device.tensor_tflops * 1e6))


def test_every_trial_is_there_with_its_time_and_its_rates(page: Node, shipped: Store) -> None:
    rows = shipped.measurements(outcome="ok")
    assert Counter(cells(page, "roofline", "time (µs)")) == Counter(us(o.measurement.p50_us) for o in rows)
    rates = Counter()
    predicted = Counter()
    for o in rows:
        m = o.measurement
        kernel = find_kernel(m.problem.kernel)
        problem = kernel.problem_type(**m.problem.fields)
        rates[digits(kernel.cost(problem).bytes / m.p50_us / 1e3, 4)] += 1
        build = shipped.build(m.build_id or "")
        config = kernel.config_type(**m.config)
        predicted[us(predict(kernel, problem, config, Target.of(m.device), build.entries).latency_us)] += 1
    assert Counter(cells(page, "roofline", "reached (GB/s)")) == rates
    assert Counter(cells(page, "prediction", "measured (µs)")) == Counter(us(o.measurement.p50_us) for o in rows)
    assert Counter(cells(page, "prediction", "predicted (µs)")) == predicted


def test_marks_stand_where_their_rows_say(text: str, page: Node) -> None:
    """Back from pixels: half a tenth of one is what a coordinate is rounded by."""
    plots = svgs(text)
    checked = 0
    columns = {"tokens": (("num_tokens (tokens)", "kv_len (keys)"), "winner (µs)"),
               "prediction": (("measured (µs)",), "predicted (µs)")}  # fmt: skip
    for f, plot in zip(page.all("figure"), plots, strict=True):
        x_names, y_name = columns.get(f.attributes["id"].partition("-")[0], ((), ""))
        rows = rows_of(f) if y_name else []
        for at, x, y in marks_of(plot) if y_name else ():
            assert y == pytest.approx(float(rows[at][y_name]), rel=0.01)
            for name in set(x_names) & rows[at].keys():
                assert x == pytest.approx(float(rows[at][name]), rel=0.01)
                checked += 1
    assert checked > 400


def test_a_step_is_the_sum_of_its_launches(page: Node, shipped: Store) -> None:
    """Computed anew from the recorded step: what a run would look up for each launch."""
    (shown,) = [
        f for f in figures(page, "steps") if f.one("h3").text.strip() == f"gemma-4-31b, {Step.decode(8, 512).name}"
    ]
    lines: dict[str, list[Winner]] = {}
    for w in shipped.winners():
        lines.setdefault(w.problem.cell, []).append(w)
    sums: Counter[str] = Counter()
    unknown: Counter[str] = Counter()
    for launched in sequence(find_model("gemma-4-31b"), Step.decode(8, 512), find_arch("sm90")):
        key = problem_key(find_kernel(launched.kernel), launched.problem)
        above = [w for w in lines.get(key.cell, []) if (w.problem.dynamic or 0) >= (key.dynamic or 0)]
        if above:
            sums[launched.kernel] += min(above, key=lambda w: w.problem.dynamic or 0).latency_us
        else:
            unknown[launched.kernel] += 1
    assert sums
    assert unknown
    assert {row["kernel"]: row["time (µs)"] for row in rows_of(shown)} == {k: us(v) for k, v in sums.items()}
    for kernel, count in unknown.items():
        assert f"{kernel} ({count})" in shown.one("figcaption").text, "what no winner serves is named"


def test_what_the_step_chose_is_shown_with_both_times(tmp_path: Path) -> None:
    """Of the newest base alone: the choice, what is faster alone and loses in the step, and what is slower in both."""
    path = tmp_path / "report.html"
    with Store.open(tmp_path / "t.db") as store:
        builds = [add_build(store, n) for n in range(4)]
        props = {"of_layers": 60}
        short = store.add_step(StepKey("gemma", "sm90", "decode", 1, 1, 32768, 0, 12, "sequence", 0.7, props))
        whole = store.add_step(StepKey("gemma", "sm90", "draft", 1, 1, 512, 0, 60, "other", 0.3, props))

        def row(n: int, us: float, step: str, step_us: float, base: str, at: int) -> None:
            store.add_measurement(measured(builds[n], n, us, stage="step", step_id=step, step_us=step_us, base_id=base,
                                           base_step_us=5000.0, at=f"2026-01-01T00:00:{at:02}+00:00"))  # fmt: skip

        row(3, 8.0, short, 4000.0, "older", 1)
        for step in (short, whole):
            row(0, 9.0, step, 5100.0, "newer", 2)
            row(1, 10.0, step, 5000.0, "newer", 3)
            row(2, 12.0, step, 5050.0, "newer", 4)
        store.recompute_winners("toy", key_of().static_key, Target.of(H200))
        write_report(path, [store])
    require_sound(path.read_text())
    page = read_page(path.read_text())
    first, second = figures(page, "judged")
    assert [f.one("h3").text.strip() for f in (first, second)] == [
        "gemma: decode batch=1 q_len=1 context=32768", "gemma: draft batch=1 q_len=1 context=512"
    ]  # fmt: skip
    assert "estimated from 12 of its 60 layers" in first.text
    assert "estimated" not in second.text
    assert "1 are faster alone by 1 % or more, and slow the step down" in first.text
    where = "dtype=bf16 head_dim=128 batch=8 dynamic=64"
    assert [list(row.values()) for row in rows_of(first)] == [
        ["toy", where, "block_n=1", "10.00", "1", "5000", "5000", "0.000", "winner"],
        ["toy", where, "block_n=2", "12.00", "1.2", "5050", "5000", "1.000", "rival"],
        ["toy", where, "block_n=0", "9.000", "0.9", "5100", "5000", "2.000", "rival"],
    ]
    columns = ("alone over chosen", "the step changes by (%)")
    for f, plot in zip(
        (first, second), [p for p in svgs(path.read_text()) if "gemma: d" in (p[0].text or "")], strict=True
    ):
        rows = rows_of(f)
        marks = list(marks_of(plot))
        assert len(marks) == 3
        for at, x, y in marks:
            assert (x, y) == (pytest.approx(float(rows[at][columns[0]]), rel=0.01),
                              pytest.approx(float(rows[at][columns[1]]), abs=0.02))  # fmt: skip


def test_times_have_a_unit_that_a_person_reads_and_legends_an_order() -> None:
    said = {0.0: "0 µs", 3.25: "3.25 µs", 999.6: "1 ms", 814540: "815 ms", 3.6e6: "3.6 s", 4e9: "4000 s"}
    assert {us: duration(us) for us in said} == said
    texts = [f"batch={n} q_len={q}" for n in (16, 1, 2, 32, 4, 8) for q in (4, 1)]
    assert sorted(texts, key=in_order) == [f"batch={n} q_len={q}" for n in (1, 2, 4, 8, 16, 32) for q in (1, 4)]


def test_the_page_of_the_shipped_database_names_no_power_of_ten(text: str, page: Node) -> None:
    assert not re.search(r"\de\+\d", re.sub(r"<[^>]*>", "", text))
    legends = [[item.text.strip() for item in ul.all("li")] for f in figures(page, "tokens") for ul in f.all("ul")]
    assert any(len(names) > 1 for names in legends)
    assert legends == [sorted(names, key=in_order) for names in legends]


def test_an_empty_database(tmp_path: Path) -> None:
    with Store.open(tmp_path / "empty.db") as store:
        made = write_report(tmp_path / "report.html", [store])
    text = (tmp_path / "report.html").read_text()
    require_sound(text)
    page = read_page(text)
    assert not page.all("figure")
    said = [p.text for s in page.all("section") for p in s.all("p") if p.attributes.get("class") == "empty"]
    assert len(said) == len(set(said)) == len(SECTIONS)
    assert made.summary()["figures"] == dict.fromkeys(SECTIONS, 0)


def test_a_hostile_database_says_nothing_but_words(tmp_path: Path) -> None:
    """What lies in a database was written by others: names and reasons are text, whatever they look like."""
    evil = "\"><script>alert(1)</script><img src=x onerror='alert(2)'>&amp;"
    with Store.open(tmp_path / "tuning.db") as store:
        build = add_build(store, 0)
        rows = [measured(build, 0, 10.0, run=evil, environment={evil: evil}, tags={"search": evil}),
                measured(None, 9, None, outcome="invalid", reason=evil, run=evil, tags={"search": evil})]  # fmt: skip
        store.add_measurements(rows)
        store.recompute_winners("toy", key_of().static_key, Target.of(H200))
        write_report(tmp_path / "report.html", [store], title=evil)
    text = (tmp_path / "report.html").read_text()
    require_sound(text)
    page = read_page(text)
    assert len(page.all("script")) == 1
    assert page.one("head").one("title").text == evil
    assert any(evil in row["run"] for f in figures(page, "provenance") for row in rows_of(f))


def test_a_kernel_that_is_not_installed_has_times_and_no_floor(tmp_path: Path) -> None:
    with Store.open(tmp_path / "tuning.db") as store:
        builds = [add_build(store, n) for n in range(2)]
        store.add_measurements([measured(b, n, 10.0 + n) for n, b in enumerate(builds)])
        store.recompute_winners("toy", key_of().static_key, Target.of(H200))
        facts = gather([store])
        assert [p.place.floor_us for p in facts.points] == [None]
        write_report(tmp_path / "report.html", [store])
    text = (tmp_path / "report.html").read_text()
    require_sound(text)
    page = read_page(text)
    assert cells(page, "tokens", "winner (µs)") == ["10.00"]
    assert cells(page, "tokens", "floor (µs)") == [""]
    assert not figures(page, "roofline")
    (runs,) = figures(page, "provenance")
    assert [row["ok"] for row in rows_of(runs)] == ["2"]


def test_only_what_is_wanted(shipped: Store) -> None:
    facts = gather([shipped], Wanted(kernels=frozenset(["rmsnorm"])))
    assert {p.place.kernel for p in facts.points} == {t.place.kernel for t in facts.trials} == {"rmsnorm"}
    assert not gather([shipped], Wanted(arches=frozenset(["sm70"]))).trials
    assert not gather([shipped], Wanted(device="V100")).points
    assert gather([shipped, shipped], Wanted(device="H200")).trials == gather([shipped]).trials, "each row once"


def test_of_a_tune(tmp_path: Path, kerngen: Kerngen) -> None:
    """A predicted database: searches with several trials, and nothing that looks measured."""
    tune = (
        "tune", "--arch", "sm70", "--model", "gemma-4-31b", "--kernel", "embed,rmsnorm", "--jobs", "1", "--trials", "4",
    )  # fmt: skip
    out = kerngen.ok(*tune, "--report", "page.html", "--json")
    results = json.loads(out)["results"]
    text = (tmp_path / "page.html").read_text()
    require_sound(text)
    page = read_page(text)
    assert page.one("head").one("title").text == "gemma-4-31b on sm70 (V100)"
    found = {tuple(sorted(r["config"].items())): r["latency_us"] for r in results}
    assert found
    assert Counter(cells(page, "tokens", "winner (µs)")) == Counter(us(r["latency_us"]) for r in results)
    searches = [row for f in figures(page, "searches") for row in rows_of(f)]
    assert len(searches) == len([r for r in results if r["num_tried"] > 1])
    assert {row["how"] for row in searches} == {"predicted"}
    assert "measured" not in "".join(cells(page, "tokens", "how") + cells(page, "roofline", "how"))
    assert not figures(page, "prediction")
    assert {row["kernel"] for f in figures(page, "steps") for row in rows_of(f)} <= {"embed", "rmsnorm"}


def test_the_command(file: Path, tmp_path: Path, kerngen: Kerngen) -> None:
    shipped = str(file)
    out = kerngen.ok("db", "report", "-o", "sub/page.html", "--db", shipped, "--kernel", "rmsnorm", "--json")
    said = json.loads(out)
    assert said["kernels"] == ["rmsnorm"]
    assert said["bytes"] == (tmp_path / "sub" / "page.html").stat().st_size
    (tmp_path / "folder").mkdir()
    for args, says in (
        (("-o", "folder"), "folder"),
        (("-o", "tuning.db/page.html", "--db", shipped), "tuning.db"),
        (("-o", "a.html", "--kernel", "rmsnrm"), "rmsnorm"),
        (("-o", "a.html", "--arch", "sm71"), "sm70"),
        (("-o", "a.html", "--db", "absent.db"), "absent.db"),
        (("-o", "a.html", "--db", shipped, "--model", "gemma-5"), "gemma-4-31b"),
    ):
        (tmp_path / "tuning.db").write_bytes(b"")
        code, out, err = kerngen("db", "report", *args)
        assert code in (1, 2), args
        assert says in err
        assert "Traceback" not in err
        assert not (tmp_path / "a.html").exists()
        (tmp_path / "tuning.db").unlink()


def test_a_plot_takes_no_number_that_is_none() -> None:
    with pytest.raises(ValueError, match="nan"):
        px(float("nan"))
    assert [short(v) for v in (0.5, 20, 4096, 32768, 2e6)] == ["0.5", "20", "4096", "32.8k", "2M"]
    for low, high in ((0.003, 0.9), (1.0, 1.03), (0.9, 8200.0), (1e-3, 1e9)):
        scale = Scale("time", "µs", low, high, 0.0, 300.0, is_log=True)
        ticks = scale.ticks(34.0)
        assert 2 <= len(ticks) <= 300 / 34, (low, high, ticks)
        assert all(low <= t <= high for t in ticks)
    assert Scale("trial", "number", 1.0, 2.0, 0.0, 300.0).ticks(30.0) == [1.0, 2.0]


def drawn(plot: Plot) -> list[list[list[tuple[float, float]]]]:
    """The pieces of each line of a plot, in pixels."""
    (svg,) = svgs(plot.render("p"))
    return [corners_of(p) for p in svg.iter(f"{SVG}path") if (p.get("class") or "").startswith("line")]


@pytest.mark.parametrize(("points", "pieces"), [
    ([(0, 0), (10, 10)], [[(0, 100), (100, 0)]]),
    ([(0, 0), (10, 0), (10, 10)], [[(0, 100), (100, 100), (100, 0)]]),  # along its edges
    ([(-10, -10), (20, 20)], [[(0, 100), (100, 0)]]),
    ([(20, 20), (5, 5)], [[(100, 0), (50, 50)]]),
    ([(-5, 5), (5, 15)], []),  # a corner and no more
    ([(-4, 7), (4, 15)], []),  # past a corner, in the sight of both of its sides
    ([(-5, 6), (5, 16), (5, 5)], [[(50, 0), (50, 50)]]),
    ([(5, -5), (5, 15)], [[(50, 100), (50, 0)]]),
    ([(11, 0), (11, 10)], []),
    ([(-20, 5), (-10, 5)], []),
    ([(2, 2), (2, 20), (8, 20), (8, 2)], [[(20, 80), (20, 0)], [(80, 0), (80, 80)]]),  # out, and in again
    ([(5, 5), (15, 5), (15, 8), (5, 8), (15, 2)], [[(50, 50), (100, 50)], [(100, 20), (50, 20), (100, 50)]]),
    ([(5, 5), (15, 5), (5, 5)], [[(50, 50), (100, 50), (50, 50)]]),  # back as it went
    ([(5, 5)], []),
    ([], []),
])  # fmt: skip
def test_a_line_ends_where_its_axes_do(
    points: list[tuple[float, float]], pieces: list[list[tuple[float, float]]]
) -> None:
    plot = Plot("p", "p", Scale("x", "number", 0.0, 10.0, 0.0, 100.0), Scale("y", "number", 0.0, 10.0, 100.0, 0.0))
    plot.line(points, "one")
    assert drawn(plot) == ([pieces] if pieces else [])


def test_a_stepped_line_is_cut_at_its_steps() -> None:
    plot = Plot("p", "p", Scale("x", "number", 0.0, 10.0, 0.0, 100.0), Scale("y", "number", 0.0, 10.0, 100.0, 0.0))
    plot.line([(0, 20), (2, 5), (4, 5), (20, 0)], "one", is_stepped=True)
    plot.across("one", x=3)
    plot.across("one", y=11)
    assert drawn(plot) == [[[(20, 0), (20, 50), (40, 50), (100, 50)]], [[(30, 100), (30, 0)]]]


@pytest.mark.parametrize("widest", [1.0, 1.6, 1.99, 2.5, 300.0])
def test_a_factor_of_two_is_drawn_where_the_axes_have_it(file: Path, widest: float) -> None:
    """Times that differ by less leave no place for its lines."""
    with Store.open(file, read_only=True) as store:
        trials = [t for t in gather([store], Wanted(kernels=frozenset(["rmsnorm"]))).trials if t.us and t.predicted_us]
    trials = [
        replace(t, row=replace(t.row, p50_us=10.0 * widest ** (i % 2)), predicted_us=10.0) for i, t in enumerate(trials)
    ]
    (figure,) = predictions(Facts(trials=trials))
    (plot,) = svgs(figure.svg)
    (left, right), (top, bottom) = area_of(plot)
    bounds = [p for p in plot.iter(f"{SVG}path") if p.get("class") == "line bound"]
    _, low, high, *_ = plot.attrib["data-x"].split()
    assert len(bounds) == (2 if float(high) > 2 * float(low) else 0)
    for path, times in zip(bounds, (2, 0.5), strict=False):
        (((x0, y0), (x1, y1)),) = corners_of(path)
        for x, y in ((x0, y0), (x1, y1)):
            assert value_at(plot.attrib["data-y"], y) == pytest.approx(
                times * value_at(plot.attrib["data-x"], x), rel=0.01
            )
        assert (x0 == left and y1 == top) if times == 2 else (y0 == bottom and x1 == right)
