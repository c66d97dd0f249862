"""The text that is reviewed says all that a database of it holds, in one way, and nothing predicted as measured."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command import Kerngen
from hypothesis import given, settings
from hypothesis import strategies as st
from sheets import PlayedCompiler

from kerngen.arch import Target, find_device
from kerngen.compiler.render import render
from kerngen.compiler.source_digest import source_digest_of
from kerngen.errors import DatabaseError
from kerngen.templates import find_kernel
from kerngen.templates.kernel import fields_of, static_fields
from kerngen.tuning_db import Measurement, Store, problem_key
from kerngen.tuning_db.dist.export import Selection
from kerngen.tuning_db.dist.fields_text import rounded
from kerngen.tuning_db.dist.results_file import Cell, Point, ResultsFile, Run, Step, StepTrial, Trial, dump, parse
from kerngen.tuning_db.dist.results_folder import build
from kerngen.tuning_db.dist.results_folder import dump as dump_of
from kerngen.tuning_db.read.values import StepKey
from kerngen.tuning_db.store.bundles import open_bundle

NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)
WORDS = st.one_of(NAMES, st.text(max_size=6), st.sampled_from(["true", "NaN", "a b", "|", "@x", "=", "é", "1e5"]))
VALUES = st.one_of(st.booleans(), st.integers(-(2**40), 2**40), st.none(), WORDS, st.floats(allow_nan=False, width=32))
FIELDS = st.dictionaries(NAMES, VALUES, max_size=3)
US = st.floats(1e-3, 1e6).map(rounded)
ERRORS = st.one_of(st.floats(0, 10).map(rounded), st.just(float("inf")))
SOURCES = st.from_regex(r"[0-9a-f]{12}", fullmatch=True)
RUNS = st.builds(Run, WORDS, st.datetimes().map(lambda d: d.isoformat() + "+00:00"),
                 st.tuples(st.integers(11, 14), st.integers(0, 9)), FIELDS)  # fmt: skip


STEPS = st.builds(Step, WORDS, WORDS, *[st.integers(0, 9999)] * 5, st.floats(1e-6, 9), WORDS, FIELDS)


@st.composite
def trials(draw: st.DrawFn, runs: int, winner: tuple[dict[str, Any], str], steps: int, bases: int) -> Trial:
    won = draw(st.booleans())
    config, source = winner if won else (draw(FIELDS), draw(SOURCES))
    known: dict[str, Any] = {"model": draw(WORDS.filter(bool))}
    wrong = not won and draw(st.booleans())
    if runs and draw(st.booleans()):
        known = {"run": draw(st.integers(0, runs - 1)), "after": round(draw(st.floats(0, 1e5)), 2)}
        if not wrong:
            spread = draw(st.booleans())
            known |= {"stage": draw(st.sampled_from(["trial", "final"])), "samples": draw(st.integers(1, 99)),
                      "p10_us": draw(US) if spread else None, "p90_us": draw(US) if spread else None,
                      "min_us": draw(st.none() | US), "error_abs": draw(ERRORS),
                      "error_rel": draw(st.none() | ERRORS)}  # fmt: skip
            if steps and bases and draw(st.booleans()):
                look = StepTrial(draw(st.integers(0, steps - 1)), draw(US), draw(US), draw(st.integers(0, bases - 1)))
                known |= {"stage": "step", "look": look}
    if wrong:
        return Trial(False, None, config, source, reason=draw(st.text(min_size=1, max_size=9)), **known)
    return Trial(won, draw(US), config, source, **known)


@st.composite
def sheets(draw: st.DrawFn) -> ResultsFile:
    runs = tuple(draw(st.lists(RUNS, max_size=2)))
    steps, bases = tuple(draw(st.lists(STEPS, max_size=2))), tuple(draw(st.lists(WORDS, max_size=2)))
    dynamic = draw(st.none() | NAMES.filter(lambda n: n != "point"))
    cells = []
    for _ in range(draw(st.integers(0, 3))):
        points = []
        for _ in range(draw(st.integers(1, 3))):
            winner = draw(FIELDS), draw(SOURCES)
            told = draw(st.lists(trials(len(runs), winner, len(steps), len(bases)), max_size=3))
            refused = draw(st.dictionaries(st.sampled_from(["invalid", "timed_out"]), st.integers(1, 99)))
            at = draw(st.integers(1, 9999)) if dynamic else None
            points.append(Point(at, tuple(told), draw(st.none() | FIELDS), refused))
        cells.append(Cell(draw(FIELDS), draw(FIELDS), tuple(points)))
    named = dynamic if dynamic and cells else ""
    return ResultsFile(draw(WORDS), draw(NAMES), draw(WORDS), draw(FIELDS), named, runs, tuple(cells), steps, bases)


@given(sheets())
@settings(max_examples=80, deadline=None)
def test_what_is_written_is_read_back(sheet: ResultsFile) -> None:
    text = dump(sheet)
    assert parse(text) == sheet
    assert dump(parse(text)) == text


SAMPLE = """\
kerngen-text 1 rmsnorm sm90 H200
board {"arch":"sm90","name":"H200"}
run r1 a1 2026-11-21T09:06:01+00:00 nvrtc 13.0 {"driver":"580"}
step s1 gemma-4-31b decode batch=1 q_len=1 context=8192 chunk=0 layers=12 weight=0.5 of "77aa01" {}
base b1 a91f03

problem dtype=fp16 hidden=5376 | batch=8
 num_tokens=64
  = 16.602 measured r1+53.77 final n=15 16.52..16.71 min 16.49 err 0.0039 0.01 | block_m=2 @a91f03c2b7d0
  = 16.602 measured r1+90.2 step n=15 err 0.0039 in s1 4321.55/4330.2 b1 | block_m=2 @a91f03c2b7d0
  + 17.02 predicted roofline-3 | block_m=4 @0c3fb1a2d4e5
  ! wrong_result measured r1+12.5 "[3, 4] is off by 0.5" | block_m=8 @77aa01c2b3d4
  # 31 invalid, 2 launch_failed
"""


def test_the_sample() -> None:
    sheet = parse(SAMPLE)
    assert dump(sheet) == SAMPLE
    (cell,) = sheet.cells
    won, stepped, near, wrong = cell.points[0].trials
    assert stepped.look == StepTrial(0, 4321.55, 4330.2, 0)
    assert (sheet.steps[0].weight, sheet.steps[0].context, sheet.bases) == (0.5, 8192, ("a91f03",))
    assert (won.run, won.samples, won.error_abs, won.p50_us) == (0, 15, 0.0039, 16.602)
    assert (near.run, near.model, near.samples, near.error_abs) == (None, "roofline-3", 0, None)
    assert (wrong.p50_us, wrong.reason) == (None, "[3, 4] is off by 0.5")


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        # what was predicted cannot say that it was measured
        ("17.02 predicted roofline-3", "17.02 measured roofline-3", 11),
        ("17.02 predicted roofline-3", "17.02 measured", 11),
        ("17.02 predicted roofline-3", "17.02 measured r1+1", 11),
        ("17.02 predicted roofline-3", "17.02 measured r1+1 final n=0 err 0", 11),
        ("17.02 predicted roofline-3", "17.02 measured r1+1 final n=5", 11),
        ("17.02 predicted roofline-3", "17.02 measured r2+1 final n=5 err 0", 11),
        ("17.02 predicted roofline-3", "17.02 predicted", 11),
        (" err 0.0039 0.01", "", 9),
        ("n=15", "n=-1", 9),
        ("r1+53.77", "r0+53.77", 9),
        # what was tried in a step says what came of that, and in which
        (" in s1 4321.55/4330.2 b1", "", 10),
        ("step n=15", "final n=15", 10),
        ("final n=15", "step n=15", 9),
        ("in s1", "in s2", 10),
        ("in s1", "in s0", 10),
        ("4330.2 b1", "4330.2 b2", 10),
        ("4321.55/", "0/", 10),
        ("4321.55/", "4321.550/", 10),
        ("step s1", "step s2", 4),
        ("weight=0.5", "weight=0", 4),
        ("base b1 a91f03\n", "", 9),
        # one way to say a thing
        ("16.602", "16.6020", 9),
        ("16.602", "-16.602", 9),
        ("16.602", "nan", 9),
        ("16.602", "1e999", 9),
        ("block_m=2 @", "block_m=2  @", 9),
        ("block_m=2", "block_m=2 block_m=2", 9),
        ("dtype=fp16 hidden=5376", "hidden=5376 dtype=fp16", 7),
        ('dtype=fp16', 'dtype="fp16"', 7),
        ("@a91f03c2b7d0", "@a91f03c2b7d", 9),
        ("  + 17.02", "  = 17.02", 11),
        (" num_tokens=64", " num_tokens=64 ", 8),
        ("31 invalid", "31 ok", 13),
        ("31 invalid", "0 invalid", 13),
        ("kerngen-text 1", "kerngen-text 2", 1),
        ("kerngen-text 1", "kerngen", 1),
        ('board {"arch":"sm90","name":"H200"}', "board []", 2),
        ("nvrtc 13.0", "nvrtc 13", 3),
        ("2026-11-21T09:06:01+00:00", "2026-11-21T09:06:01", 3),
        ("2026-11-21T09:06:01+00:00", "yesterday", 3),
        ("problem dtype", "problems dtype", 7),
        (" num_tokens=64\n", "", 8),
    ],
)  # fmt: skip
def test_what_is_not_so_written_is_refused(old: str, new: str, line: int) -> None:
    assert old in SAMPLE
    with pytest.raises(DatabaseError, match=rf"sheet, line {line}\b"):
        parse(SAMPLE.replace(old, new, 1), "sheet")


@st.composite
def changed(draw: st.DrawFn, text: str) -> str:
    """`text` with a character changed, put in or taken away."""
    at = draw(st.integers(0, len(text) - 1))
    put = draw(st.sampled_from(["", "\n", " ", "{", "9", "x", '"', "\ud800", "é", text[at] * 2]))
    return text[:at] + put + text[at + 1 :]


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_garbage_is_refused_in_words(data: st.DataObject) -> None:
    """A character changed, put in or taken away: it is refused in one line, or is another text that stands."""
    text = data.draw(changed(SAMPLE))
    try:
        assert dump(parse(text)) == text
    except DatabaseError as e:
        assert e.message.startswith("text")  # noqa: PT017


@pytest.fixture
def kerngen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Kerngen:
    return Kerngen(tmp_path, monkeypatch, capsys)


def test_from_a_database_to_text_and_back(kerngen: Kerngen) -> None:
    """What is shipped, measured, and a prediction beside it: the same winners, and the same text again."""
    small = ("--kernel", "gelu_gate", "--arch")
    assert kerngen("tune", "--model", "gemma-4-31b", *small, "sm70", "--trials", "3", "--jobs", "1")[0] == 0
    assert kerngen("db", "dump", *small, "sm70,sm90", "-o", "text")[0] == 0
    measured, predicted = (kerngen.folder / "text" / board / "gelu_gate.txt" for board in ("H200", "V100"))
    assert " predicted " not in measured.read_text()
    assert " measured " not in predicted.read_text()
    assert kerngen("db", "build", "text", "-o", "built.kgdb", "--jobs", "1")[0] == 0
    with open_bundle("built.kgdb") as built:
        assert {(w.arch.name, w.provenance) for w in built.winners()} == {("sm70", "predicted"), ("sm90", "measured")}
        assert all(built.image(built.build(w.build_id)) is not None for w in built.winners())

    def told(*where: str) -> list[tuple[Any, ...]]:
        """Of each winner what does not hang on the version of the code that it was chosen for."""
        winners = json.loads(kerngen("db", "ls", "--json", *where)[1])
        return sorted((w["arch"], json.dumps(w["problem"]), json.dumps(w["config"])) for w in winners)

    assert told("--db", "built.kgdb") == told(*small, "sm70,sm90")
    assert kerngen("db", "verify", "built.kgdb")[0] == 0
    assert kerngen("db", "dump", "--db", "built.kgdb", "-o", "again")[0] == 0
    for file in (measured, predicted):
        again = kerngen.folder / "again" / file.relative_to(kerngen.folder / "text")
        assert again.read_text() == re.sub(r"  # .*\n", "", file.read_text())


def test_text_that_contradicts_itself_builds_nothing(kerngen: Kerngen) -> None:
    assert kerngen("db", "dump", "--arch", "sm90", "--kernel", "gelu_gate", "-o", "text")[0] == 0
    file = kerngen.folder / "text" / "H200" / "gelu_gate.txt"
    text = file.read_text()
    file.write_text(
        text.replace("  = ", "  + ", 1).replace("  + ", "  = ", 1).replace("@", "@0", 1).replace("@0", "@", 1)
    )
    assert file.read_text() == text
    mark = re.search(r"@([0-9a-f]{12})", text)
    assert mark is not None
    file.write_text(text.replace(mark.group(), "@000000000000"))
    _, _, err = kerngen("db", "build", "text", "-o", "built.kgdb", "--jobs", "1")
    assert "left out, as its kernel renders another source today: gelu_gate on H200" in err
    file.write_text(text.replace("problem ", "problem no_such=1 ", 1))
    code, _, err = kerngen("db", "build", "text", "-o", "none.kgdb", "--jobs", "1")
    assert code == 1
    assert "the text contradicts itself: gelu_gate on H200: " in err
    assert not (kerngen.folder / "none.kgdb").exists()


def _in_step(build: str, config: dict[str, Any], us: float, step: str, ratio: float, at: str) -> Measurement:
    return Measurement(
        KEY, "sm90", H200.device, config, build, "ok", "measured", stage="step", p50_us=us, p10_us=us, p90_us=us,
        min_us=us, samples=15, error_abs=0.0, run="a", at=at, environment={"driver": "580"}, step_id=step,
        step_us=5000.123 * ratio, base_step_us=5000.123, base_id="b" * 64,
    )  # fmt: skip


GATE = find_kernel("gelu_gate")
H200 = Target.of(find_device("H200"))
PROBLEM = GATE.problem_type(width=64, num_tokens=8)
KEY = problem_key(GATE, PROBLEM)


def test_what_was_tried_in_steps_of_a_model_decides_in_the_text_too(tmp_path: Path) -> None:
    """The slower one alone wins, since its steps are faster: from the database, from the text, and from that again."""
    configs = [GATE.config_type(threads=t) for t in (64, 128, 256)]
    compiler: Any = PlayedCompiler()
    with Store.open(tmp_path / "one.db") as store, Store.open(tmp_path / "two.db") as again:
        builds = []
        for config in configs:
            source = render(GATE, PROBLEM, config, H200)
            image = compiler.submit(source, H200.arch).result()
            builds.append(store.add_build(image, "gelu_gate", source, fields_of(config), static_fields(PROBLEM),
                                          closure=source_digest_of(GATE)))  # fmt: skip
        steps = [store.add_step(StepKey("gemma-4-31b", "sm90", phase, 1, q, 8192, 0, 12, f"{phase}'s launches", weight))
                 for phase, q, weight in (("decode", 1, 0.75), ("verify", 4, 0.25))]  # fmt: skip
        at = "2026-11-22T10:00:{:02}.000000+00:00"
        rows = []
        for i, (id, config) in enumerate(zip(builds, configs, strict=True)):
            alone = _in_step(id, fields_of(config), 10.0 + i, steps[0], 1.0, at.format(i))
            rows.append(replace(alone, stage="final", step_id=None, step_us=None, base_step_us=None, base_id=None))
        for i, ratios in enumerate([(1.004, 1.0), (0.99, 0.999), (0.995, 0.999)]):
            for step, ratio in zip(steps, ratios, strict=True):
                rows.append(_in_step(builds[i], fields_of(configs[i]), 10.0 + i, step, ratio, at.format(10 + i)))
        store.add_measurements(rows)
        (winner,) = store.recompute_winners(GATE, KEY.static_key, H200)
        assert winner.config == fields_of(configs[1]), "neither the fastest alone nor the default"
        ((name, text),) = dump_of([store], Selection()).items()
        assert name == "H200/gelu_gate.txt"
        sheet = parse(text)
        assert [(s.phase, s.q_len, s.weight) for s in sheet.steps] == [("decode", 1, 0.75), ("verify", 4, 0.25)]
        assert sheet.bases == ("b" * 64,)
        assert len([t for t in sheet.cells[0].points[0].trials if t.look is not None]) == 6
        done = build([sheet], again, compiler)
        assert (done.faults, done.stale, done.trials) == ([], [], len(rows))
        assert [(w.config, w.why["step"]["judged"]) for w in again.winners()] == [(winner.config, 3)]
        assert again.steps().keys() == store.steps().keys()
        assert dump_of([again], Selection()) == {name: text}
        # Without its looks the text says that another wins than what its trials give.
        told = [line for line in text.split("\n") if " step n=" not in line]
        with Store.open(tmp_path / "three.db") as other:
            assert "is said to win" in build([parse("\n".join(told))], other, compiler).faults[0]
