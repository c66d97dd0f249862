"""The pages of `kerngen db report` and of benches as a browser shows them: light and dark, on a desk and on a phone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from bench_runs import RUNS
from browser import MISSING, Page, browsing, find_browser
from sheets import measured_store

from kerngen.report.bench.page import write_page
from kerngen.report.page import write_report
from kerngen.tuning_db import Store

LEAST_CONTRAST = 4.5  # WCAG 2.2, AA, of text in normal size

# What leaves its plot, and texts of an axis that lie over each other.
CROWDED = """(() => {
  const found = [];
  for (const svg of document.querySelectorAll("svg")) {
    const id = svg.closest("figure").id, edge = svg.getBoundingClientRect();
    const boxes = [...svg.querySelectorAll("text")].map((t) => [t.textContent, t.getBoundingClientRect()]);
    for (const e of svg.querySelectorAll("path, rect, text")) {
      const b = e.getBoundingClientRect();
      if (b.left < edge.left - 1 || b.right > edge.right + 1 || b.top < edge.top - 1 || b.bottom > edge.bottom + 1)
        found.push(`${id}: ${e.tagName} ${e.getAttribute("class")} ${e.textContent} leaves the plot`);
    }
    boxes.forEach(([text, a], i) => boxes.slice(i + 1).forEach(([other, b]) => {
      if (a.left < b.right - 2 && b.left < a.right - 2 && a.top < b.bottom - 4 && b.top < a.bottom - 4)
        found.push(`${id}: "${text}" lies over "${other}"`);
    }));
  }
  return found;
})()"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    if (executable := find_browser()) is None:
        pytest.skip(MISSING)
    with browsing(executable) as page:
        yield page


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    with Store.open(measured_store(path.with_name("h200.sqlite")), read_only=True) as store:
        write_report(path, [store])
    return path


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", [(1280, 900), (390, 844), (320, 640)], ids=["desk", "phone", "small phone"])
def test_it_can_be_read(browser: Page, path: Path, size: tuple[int, int], dark: bool) -> None:
    _require_readable(browser, path, size, dark)


@pytest.mark.parametrize(
    ("size", "dark"), [((1280, 900), False), ((320, 640), True)], ids=["desk", "small phone, dark"]
)
@pytest.mark.parametrize("bench", RUNS)
def test_a_run_can_be_read(browser: Page, bench: str, size: tuple[int, int], dark: bool, tmp_path: Path) -> None:
    write_page(tmp_path / "run.html", RUNS[bench](1.0), RUNS[bench](1.02))
    _require_readable(browser, tmp_path / "run.html", size, dark)


def _require_readable(browser: Page, path: Path, size: tuple[int, int], dark: bool) -> None:
    browser.requests.clear()
    browser.open(path, width=size[0], height=size[1], dark=dark)
    assert browser.errors == []
    assert set(browser.requests) == {path.as_uri()}, "it asks for nothing but itself"
    assert browser.ask("document.documentElement.scrollWidth <= document.documentElement.clientWidth"), (
        "no scrolling aside"
    )
    assert browser.ask(CROWDED) == []
    ratio, where = browser.contrast("h1, h2, h3, p, a, label, select, summary, th, td, li, svg text")
    assert ratio >= LEAST_CONTRAST, where
    back = browser.ask("getComputedStyle(document.documentElement).backgroundColor")
    assert (back == "rgb(255, 255, 255)") is not dark
    smallest = browser.ask(
        "Math.min(...[...document.querySelectorAll('svg')].map((s) => 11 * s.getBoundingClientRect().width / 340))"
    )
    assert smallest >= 8.5, "a plot's letters on screen, in pixels"


def test_a_mark_tells_its_row(browser: Page, path: Path) -> None:
    browser.open(path)
    at, row = browser.ask("""(async () => {
      const figure = document.querySelector("#tokens figure"), svg = figure.querySelector("svg");
      figure.scrollIntoView();
      await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));  // it has scrolled
      const marks = svg.querySelector(".marks[data-first]"), m = svg.getScreenCTM();
      const [x, y] = marks.getAttribute("d").split("M")[2].replace("h0", "").split(" ").map(Number);
      const row = figure.querySelectorAll("tbody tr")[Number(marks.dataset.first) + 1];
      return [[m.a * x + m.e, m.d * y + m.f], [...row.cells].map((c) => c.textContent)];
    })()""")
    assert browser.ask("document.getElementById('tip').hidden")
    browser.move(at[0] + 3, at[1] - 3)
    told = browser.ask("document.getElementById('tip').hidden ? '' : document.getElementById('tip').textContent")
    assert told
    assert all(cell in told for cell in row)
    inside = browser.ask("""(() => {
      const r = document.getElementById("tip").getBoundingClientRect();
      return r.left >= 0 && r.top >= 0 && r.right <= innerWidth && r.bottom <= innerHeight;
    })()""")
    assert inside
    browser.move(2, 2)
    assert browser.ask("document.getElementById('tip').hidden")


def test_a_table_sorts_and_a_kernel_is_chosen(browser: Page, path: Path) -> None:
    browser.open(path)
    column = """(() => {
      const table = document.querySelector("#roofline table");
      const at = [...table.tHead.rows[0].cells].findIndex((th) => th.textContent.startsWith("time"));
      table.tHead.rows[0].cells[at].querySelector("button").click();
      return [table.tHead.rows[0].cells[at].getAttribute("aria-sort"),
              [...table.tBodies[0].rows].map((r) => Number(r.cells[at].textContent))];
    })()"""
    order, times = browser.ask(column)
    assert (order, times) == ("ascending", sorted(times))
    order, times = browser.ask(column)
    assert (order, times) == ("descending", sorted(times, reverse=True))
    assert len(set(times)) > 1
    kernels = browser.ask("""(() => {
      const select = document.getElementById("kernel");
      select.value = "rmsnorm";
      select.dispatchEvent(new Event("change", {bubbles: true}));
      return [...document.querySelectorAll("figure")].filter((f) => !f.hidden).map((f) => f.dataset.kernel);
    })()""")
    assert set(kernels) == {"rmsnorm", ""}
    assert browser.ask("document.getElementById('narrowed').textContent").startswith(f"{len(kernels)} of ")
    assert browser.errors == []


def test_it_reads_without_its_script(browser: Page, path: Path, tmp_path: Path) -> None:
    """As a viewer shows it that lets no script run: plots and tables are in the page itself."""
    bare = tmp_path / "bare.html"
    text = path.read_text()
    start, end = text.index("<script>"), text.index("</script>")
    bare.write_text(text[:start] + text[end + len("</script>") :])
    browser.open(bare)
    assert browser.ask("document.querySelectorAll('svg .marks').length") > 50
    assert browser.ask("document.querySelector('details').open = true") is True
    assert browser.ask("document.querySelector('table').getBoundingClientRect().height") > 20
    assert browser.ask("getComputedStyle(document.getElementById('narrow')).display") == "none"
