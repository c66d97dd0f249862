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
from kerngen.compiler.render import render, source_of
from kerngen.compiler.source_digest import source_digest_of
from kerngen.errors import DatabaseError
from kerngen.templates import find_kernel
from kerngen.templates.kernel import fields_of, static_fields
from kerngen.tuning_db import Measurement, Store, problem_key
from kerngen.tuning_db.dist.export import Selection
from kerngen.tuning_db.dist.fields_text import PREDICTED_DIGITS, SOURCE_DIGITS, as_json, rounded
from kerngen.tuning_db.dist.former_results import parse_any
from kerngen.tuning_db.dist.results_file import (
    Config,
    Model,
    Point,
    Problem,
    ResultsFile,
    Run,
    StepTrial,
    Trial,
    dump,
    label,
)
from kerngen.tuning_db.dist.results_folder import build, results_of
from kerngen.tuning_db.dist.results_folder import dump as dump_of
from kerngen.tuning_db.dist.results_parser import parse
from kerngen.tuning_db.read.canonical_fields import filed_device
from kerngen.tuning_db.read.freshness import notes_of, source_sha
from kerngen.tuning_db.read.values import StepKey
from kerngen.tuning_db.store.bundles import open_bundle
from kerngen.tuning_db.store.merge import merge
from tools.prebuilt import write_predicted

NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)
WORDS = st.one_of(NAMES, st.text(max_size=6), st.sampled_from(["true", "NaN", "a b", "|", "@x", "=", "é", "1e5"]))
VALUES = st.one_of(st.booleans(), st.integers(-(2**40), 2**40), st.none(), WORDS, st.floats(allow_nan=False, width=32))
FIELDS = st.dictionaries(NAMES, VALUES, max_size=3)
US = st.floats(1e-3, 1e6).map(rounded)
ERRORS = st.one_of(st.floats(0, 10).map(rounded), st.just(float("inf")))
VERSIONS = st.tuples(st.integers(11, 14), st.integers(0, 9))
RUNS = st.builds(Run, WORDS, st.datetimes().map(lambda d: d.isoformat() + "+00:00"), VERSIONS, FIELDS)
MODELS = st.builds(Model, WORDS.filter(bool), st.none() | VERSIONS)
CONFIGS = st.builds(Config, FIELDS, st.from_regex(r"[0-9a-f]{12}", fullmatch=True), st.integers(0, 3))


@st.composite
def trials(draw: st.DrawFn, file: ResultsFile, config: int, won: bool) -> Trial:
    if file.carried and draw(st.booleans()):
        return Trial(config, None, won, carried=draw(st.integers(0, len(file.carried) - 1)))
    wrong = not won and draw(st.booleans())
    known: dict[str, Any] = {"reason": draw(st.text(min_size=1, max_size=9))} if wrong else {}
    us = None if wrong else draw(US)
    if file.models and not (file.runs and draw(st.booleans())):
        return Trial(config, us, won, model=draw(st.integers(0, len(file.models) - 1)), **known)
    known |= {"run": draw(st.integers(0, len(file.runs) - 1)), "after": round(draw(st.floats(0, 1e5)), 2)}
    if not wrong:
        spread = draw(st.booleans())
        known |= {"stage": draw(st.sampled_from(["trial", "final"])), "samples": draw(st.integers(1, 99)),
                  "p10_us": draw(US) if spread else None, "p90_us": draw(US) if spread else None,
                  "min_us": draw(st.none() | US), "error_abs": draw(ERRORS),
                  "error_rel": draw(st.none() | ERRORS)}  # fmt: skip
        if file.steps and file.bases and draw(st.booleans()):
            step, base = draw(st.integers(0, len(file.steps) - 1)), draw(st.integers(0, len(file.bases) - 1))
            known |= {"stage": "step", "in_step": StepTrial(step, draw(US), draw(US), base)}
    return Trial(config, us, won, **known)


@st.composite
def points(draw: st.DrawFn, file: ResultsFile, configs: int, runtime: dict[str, Any], at: int | None) -> Point:
    which, fields = st.integers(0, configs - 1), draw(st.none() | FIELDS)
    if file.models and draw(st.booleans()):  # a winner that is predicted, alone
        return Point(runtime, at, (Trial(draw(which), draw(US), True, model=0),), fields)
    if file.carried and draw(st.booleans()):  # one that is carried
        return Point(runtime, at, (Trial(draw(which), None, True, carried=0),), fields)
    winner, named = draw(which), draw(st.lists(which, max_size=3))
    told = tuple(draw(trials(file, c, c == winner and draw(st.booleans()))) for c in named)
    refused = draw(st.dictionaries(st.sampled_from(["invalid", "timed_out"]), st.integers(1, 99)))
    return Point(runtime, at, told, fields, refused)


@st.composite
def problems(draw: st.DrawFn, file: ResultsFile) -> Problem:
    """Its last point has a trial of each configuration."""
    configs = draw(st.lists(CONFIGS, min_size=1, max_size=30, unique_by=lambda c: as_json([c.fields, c.source])))
    drawn = []
    for runtime in draw(st.lists(FIELDS, max_size=3, unique_by=as_json)):
        for at in draw(st.lists(st.integers(1, 9999), max_size=3, unique=True)) if file.dynamic else [None]:
            drawn.append(draw(points(file, len(configs), runtime, at)))
    every = tuple(draw(trials(file, i, False)) for i in range(len(configs)))
    last = Point({"last": True}, 7 if file.dynamic else None, every)
    return Problem(draw(FIELDS), tuple(configs), (*drawn, last))


@st.composite
def files(draw: st.DrawFn) -> ResultsFile:
    arch, numbers = draw(NAMES), [st.integers(0, 9999)] * 5
    steps = st.builds(StepKey, WORDS, st.just(arch), WORDS, *numbers, WORDS, st.floats(1e-6, 9), FIELDS)
    parts = (RUNS, MODELS, st.text(min_size=1, max_size=9), steps, WORDS)
    head = [tuple(draw(st.lists(of, min_size=of is RUNS, max_size=2))) for of in parts]
    dynamic = draw(st.just("") | NAMES.filter(lambda n: n != "point"))
    bare = ResultsFile(draw(WORDS), arch, draw(WORDS), draw(FIELDS), dynamic, *head, problems=())
    made = tuple(draw(st.lists(problems(bare), max_size=3)))
    return replace(bare, dynamic=dynamic if made else "", problems=made)


@given(files())
@settings(max_examples=120, deadline=None)
def test_what_is_written_is_read_back(file: ResultsFile) -> None:
    text = dump(file)
    assert parse(text) == file
    assert dump(parse(text)) == text
    assert parse_any(text) == file


@given(st.integers(0, 20000), st.integers(0, 20000))
def test_each_configuration_has_a_letter_of_its_own(a: int, b: int) -> None:
    assert (label(a) == label(b)) == (a == b)
    assert label(a).isascii()
    assert label(a).isalpha()


SAMPLE = """\
kerngen-results 2 rmsnorm sm90 H200
board {"arch":"sm90","name":"H200"}
run r1 a1 2026-11-21T09:06:01+00:00 nvrtc 13.0 {"driver":"580"}
model m1 roofline-5 nvrtc 12.9
carried c1 "steps of an H200"
step s1 gemma-4-31b decode batch=1 q_len=1 context=8192 chunk=0 layers=12 weight=0.5 of "77aa01" {}
base b1 a91f03

problem dtype=fp16 hidden=5376
 a @77aa01c2b3d4
 b block_m=2 @a91f03c2b7d0 revision 2
 c block_m=4 @0c3fb1a2d4e5
 batch=1 | num_tokens 64=3.412a 512=4.02b 1024=c
 batch=8 | num_tokens 1=3.45a
 batch=8 | num_tokens=64
  = 16.602b r1+53.77 final n=15 16.52..16.71 min 16.49 err 0.0039 0.01
  = 16.602b r1+90.2 step n=15 err 0.0039 in s1 4321.55/4330.2 b1
  + 17.02c m1
  ! a r1+12.5 "[3, 4] is off by 0.5"
  # 31 invalid, 2 launch_failed
 batch=8 | num_tokens=100 as {"batch":7,"num_tokens":100}
  = 3.5a m1
 batch=8 | num_tokens=128
  = b c1
  + c c1
"""


def test_the_sample() -> None:
    file = parse(SAMPLE)
    assert dump(file) == SAMPLE
    assert (file.steps[0].arch, file.steps[0].weight, file.steps[0].context) == ("sm90", 0.5, 8192)
    assert (file.bases, file.models, file.dynamic) == (("a91f03",), (Model("roofline-5", (12, 9)),), "num_tokens")
    assert file.carried == ("steps of an H200",)
    (problem,) = file.problems
    words = [({"batch": 1}, 64, 3.412, 0), ({"batch": 1}, 512, 4.02, 1), ({"batch": 8}, 1, 3.45, 0)]
    assert (*problem.points[:2], problem.points[3]) == tuple(
        Point(of, at, (Trial(c, us, True, model=0),)) for of, at, us, c in words
    )
    assert problem.points[2] == Point({"batch": 1}, 1024, (Trial(2, None, True, carried=0),))
    assert problem.points[-1].trials == (Trial(1, None, True, carried=0), Trial(2, None, False, carried=0))
    won, stepped, near, wrong = problem.points[4].trials
    assert stepped.in_step == StepTrial(0, 4321.55, 4330.2, 0)
    assert (won.run, won.samples, won.error_abs, won.us) == (0, 15, 0.0039, 16.602)
    assert (near.run, near.model, near.samples, near.error_abs) == (None, 0, 0, None)
    assert (wrong.us, wrong.reason) == (None, "[3, 4] is off by 0.5")
    fields = [file.fields(*at) for at in file.points()]
    assert fields[0] == {"dtype": "fp16", "hidden": 5376, "batch": 1, "num_tokens": 64}
    assert fields[-2] == {"batch": 7, "num_tokens": 100}


REFUSED = {  # line -> what is changed, into what
    1: [("kerngen-results 2", "kerngen-results 3"), ("kerngen-results 2", "kerngen"),
        ("rmsnorm sm90 H200", "rmsnorm sm90")],
    2: [('board {"arch":"sm90","name":"H200"}', "board 7")],
    3: [("run r1", "run r2"), ("nvrtc 13.0", "nvrtc 13"), ("2026-11-21T09:06:01+00:00", "2026-11-21T09:06:01"),
        ("2026-11-21T09:06:01+00:00", "yesterday")],
    4: [("model m1", "model m2"), ("roofline-5", '""'), ("nvrtc 12.9", "nvrtc 12")],
    5: [("carried c1", "carried c2"), ('"steps of an H200"', '""'), ('"steps of an H200"', "steps")],
    6: [("step s1", "step s2"), ("weight=0.5", "weight=0")],
    7: [("base b1", "base b2")],
    9: [("problem dtype", "problems dtype"), ("dtype=fp16 hidden=5376", "hidden=5376 dtype=fp16"),
        ("dtype=fp16", 'dtype="fp16"'), ("problem dtype=fp16 hidden=5376\n", "")],
    11: [("block_m=2 @", "block_m=2  @"), ("block_m=2", "block_m=2 block_m=2")],
    12: [("model m1 roofline-5 nvrtc 12.9\n", ""), (" c block_m=4", " d block_m=4"), ("@0c3fb1a2d4e5", "@0c3fb1a2d4e"),
        ("@0c3fb1a2d4e5", "@0c3fb1a2d4e5 "), ('carried c1 "steps of an H200"\n', ""),
        (" c block_m=4 @0c3fb1a2d4e5", " c block_m=2 @a91f03c2b7d0 revision 2"),
        ("@0c3fb1a2d4e5", "@0c3fb1a2d4e5 revision 1"), ("@0c3fb1a2d4e5", "@0c3fb1a2d4e5 revision -1"),
        ("@0c3fb1a2d4e5", "@0c3fb1a2d4e5 revision 02"), ("@0c3fb1a2d4e5", "@0c3fb1a2d4e5 revision")],
    13: [(" c block_m=4 @0c3fb1a2d4e5\n", " c block_m=4 @0c3fb1a2d4e5\n d block_m=8 @0c3fb1a2d4e5\n"),
        ("512=4.02b", "512=4.02d"), ("batch=8 | num_tokens 1", "batch=1 | num_tokens 1"), ("512=4.02b", "512=4.020b"),
        ("512=4.02b", "512=0b"), ("512=4.02b", "512=-1b"), ("512=4.02b", "4.02b"),
        ("num_tokens 64=", "num_tokens  64="), ("num_tokens 64=", "num_tokens 064="), ("512=4.02b", "64=4.02b"),
        ("1024=c", "1024=d"), ("1024=c", "1024=0c")],
    14: [("batch=8 | num_tokens 1", "batch=8 | hidden 1"), ("batch=8 | num_tokens 1=3.45a", "batch=8 | num_tokens"),
        ("batch=8 | num_tokens 1=3.45a", "batch=8 | num_tokens=1\n  = 3.45a m1")],
    15: [('run r1 a1 2026-11-21T09:06:01+00:00 nvrtc 13.0 {"driver":"580"}\n', ""),
        ("batch=8 | num_tokens=64", "batch=8 | point"), (" batch=8 | num_tokens=64\n", ""),
        ("num_tokens=64\n", "num_tokens=64 \n")],
    16: [("base b1 a91f03\n", ""), ("r1+53.77", "r2+53.77"), (" err 0.0039 0.01", ""), ("final n=15", "best n=15"),
        ("n=15", "n=-1"), ("final n=15", "step n=15"), ("16.602b", "16.6020b"), ("16.602b", "-16.602b"),
        ("16.602b", "nanb"), ("16.602b", "1e999b")],
    17: [("in s1", "in s0"), ("4330.2 b1", "4330.2 b2"), (" in s1 4321.55/4330.2 b1", ""), ("step n=15", "final n=15"),
        ("4321.55/", "0/"), ("4321.55/", "4321.550/")],
    18: [("17.02c m1", "17.02c m2"), ("17.02c m1", "17.02c"), ("17.02c m1", "17.02c r1"), ("17.02c m1", "17.02c r1+1"),
        ("17.02c m1", "17.02c r1+1 final n=0 err 0"), ("17.02c m1", "17.02c r1+1 final n=5"),
        ("17.02c m1", "17.02c m1 final n=5 err 0"), ("17.02c", "17.02"), ("  + 17.02c", "  = 17.02c"),
        ("  + 17.02c", "  - 17.02c")],
    19: [(' "[3, 4] is off by 0.5"', ""), ('"[3, 4] is off by 0.5"', '""'), ('"[3, 4] is off by 0.5"', "7")],
    20: [("31 invalid", "31 ok"), ("31 invalid", "0 invalid"), ("31 invalid", "2 launch_failed")],
    21: [("as {", "as [{"), ('as {"batch":7,"num_tokens":100}', "as 7"),
        ("  # 31 invalid, 2 launch_failed\n", "  # 31 invalid\n  # 2 launch_failed\n"),
        ("batch=8 | num_tokens=100", "batch=8 | num_tokens=64"),
        ('{"batch":7,"num_tokens":100}', '{"batch":7,"num_tokens":100} ')],
    24: [("= b c1", "= b c2")],
    25: [("+ c c1", "! c c1"), ("+ c c1", "= c c1"), ("+ c c1", "+ c"), ("+ c c1", "+ c c1 final"),
        ("+ c c1", "+ c r1+1")],
}  # fmt: skip


@pytest.mark.parametrize(("line", "old", "new"), [(line, *case) for line, cases in REFUSED.items() for case in cases])
def test_what_is_not_so_written_is_refused(line: int, old: str, new: str) -> None:
    assert old in SAMPLE
    with pytest.raises(DatabaseError, match=rf"sheet, line {line}\b"):
        parse(SAMPLE.replace(old, new, 1), "sheet")


@pytest.mark.parametrize("text", ["", "kerngen-results 2 rmsnorm sm90 H200", SAMPLE.removesuffix("\n"), SAMPLE + "\n"])
def test_a_text_that_ends_too_early_or_too_late_is_refused(text: str) -> None:
    with pytest.raises(DatabaseError, match="sheet"):
        parse_any(text, "sheet")


@st.composite
def changed(draw: st.DrawFn, text: str) -> str:
    """`text` with a character changed, put in or taken away."""
    at = draw(st.integers(0, len(text) - 1))
    put = draw(st.sampled_from(["", "\n", " ", "{", "9", "x", '"', "\ud800", "é", text[at] * 2]))
    return text[:at] + put + text[at + 1 :]


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_garbage_is_refused_in_words(data: st.DataObject) -> None:
    """A character changed, put in or taken away: it is refused in one line, or is another text that stands."""
    sample = data.draw(st.sampled_from([SAMPLE, FORMER_MEASURED, FORMER_PREDICTED]))
    text = data.draw(changed(sample))
    try:
        file = parse_any(text)
        assert sample is not SAMPLE or dump(file) == text
    except DatabaseError as e:
        assert e.message.startswith("text")  # noqa: PT017


# ---- the two grammars of before

FORMER_MEASURED = """\
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
  ! wrong_result measured r1+12.5 "[3, 4] is off by 0.5" | @77aa01c2b3d4
  # 31 invalid, 2 launch_failed

problem dtype=fp16 hidden=5376 |
 num_tokens=100 as {"batch":7,"num_tokens":100}
  = 3.5 predicted roofline-3 | @77aa01c2b3d4
"""
FORMER_PREDICTED = """\
kerngen-outlook 1 attn_decode sm70 V100
board {"arch":"sm70","name":"V100"}
predicted roofline-5 nvrtc 12.9

problem dtype=fp16 head_dim=256
 a @a91f03c2b7d0
 b block_n=32 @0c3fb1a2d4e5
 batch=1 | kv_len 64=3.412a 512=4.02b
 batch=2 | kv_len 100=3.5b as {"batch":2,"kv_len":97}
"""


def test_the_grammars_of_before_are_read() -> None:
    today, file = parse(SAMPLE), parse_any(FORMER_MEASURED)
    assert (file.runs, file.steps, file.bases) == (today.runs, today.steps, today.bases)
    assert file.models == (Model("roofline-3", None),)
    first, second = file.problems
    fields = [c.fields for c in today.problems[0].configs]
    assert [fields.index(c.fields) for c in first.configs] == [1, 2, 0]
    assert {c.revision for p in file.problems for c in p.configs} == {0}, "it does not say"
    meant = today.problems[0].points[4]
    told = tuple(replace(t, config=[2, 0, 1][t.config]) for t in meant.trials)
    assert first.points == (replace(meant, trials=told),)
    fields = {"batch": 7, "num_tokens": 100}
    assert second.points == (Point({}, 100, (Trial(0, 3.5, True, model=0),), fields),)
    predicted = parse_any(FORMER_PREDICTED)
    assert (predicted.kernel, predicted.dynamic, predicted.models) == (
        "attn_decode", "kv_len", (Model("roofline-5", (12, 9)),))  # fmt: skip
    assert [(p.runtime, p.dynamic, p.trials[0].us, p.trials[0].config, p.fields) for _, p in predicted.points()] == [
        ({"batch": 1}, 64, 3.412, 0, None), ({"batch": 1}, 512, 4.02, 1, None),
        ({"batch": 2}, 100, 3.5, 1, {"batch": 2, "kv_len": 97})]  # fmt: skip
    assert [parse(dump(former)) for former in (file, predicted)] == [file, predicted]


@pytest.mark.parametrize(
    ("line", "old", "new"),
    [
        (1, "kerngen-text 1", "kerngen-text 2"), (8, " num_tokens=64\n", ""), (8, "num_tokens=64", "num_tokens 64=3a"),
        (7, "hidden=5376 | batch=8", "hidden=5376"), (8, "num_tokens=64", "num_tokens=64 65"), (9, "r1+53", "r2+53"),
        (10, " in s1 4321.55/4330.2 b1", ""), (11, "predicted roofline-3", "measured roofline-3"),
        (11, "predicted roofline-3", "measured r1+1"), (11, "predicted roofline-3", "predicted"),
        (11, " | block_m=4", ""), (11, "  + 17.02", "  = 17.02"), (12, "! wrong_result", "!"),
    ],
)  # fmt: skip
def test_what_was_no_measured_text_before_is_none_now(line: int, old: str, new: str) -> None:
    assert old in FORMER_MEASURED
    with pytest.raises(DatabaseError, match=rf"sheet, line {line}\b"):
        parse_any(FORMER_MEASURED.replace(old, new, 1), "sheet")


@pytest.mark.parametrize(
    ("line", "old", "new"),
    [(1, "kerngen-outlook 1", "kerngen-outlook 2"), (3, "predicted roofline-5", "measured r1"), (8, "4.02b", "4.02c"),
     (9, "3.5b as", "3.5b 128=4b as")],
)  # fmt: skip
def test_what_was_no_predicted_text_before_is_none_now(line: int, old: str, new: str) -> None:
    assert old in FORMER_PREDICTED
    with pytest.raises(DatabaseError, match=rf"sheet, line {line}\b"):
        parse_any(FORMER_PREDICTED.replace(old, new, 1), "sheet")


# ---- from a database and back


@pytest.fixture
def kerngen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Kerngen:
    return Kerngen(tmp_path, monkeypatch, capsys)


def test_from_a_database_to_text_and_back(kerngen: Kerngen) -> None:
    """What is shipped, measured, and a prediction beside it: the same winners, and the same text again."""
    small = ("--kernel", "gelu_gate", "--arch")
    assert kerngen("tune", "--model", "gemma-4-31b", *small, "sm70", "--trials", "3", "--jobs", "1")[0] == 0
    assert kerngen("db", "dump", *small, "sm70,sm90", "-o", "text")[0] == 0
    measured, predicted = (kerngen.folder / "text" / board / "gelu_gate.txt" for board in ("H200", "V100"))
    assert "\nmodel " not in measured.read_text()
    assert "\nrun " not in predicted.read_text()
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
        assert again.read_text() == file.read_text()


def test_predicted_winners_alone_and_back(kerngen: Kerngen) -> None:
    """The same winners, the same text again; without compiling, and with the machine code where it is compiled."""
    command = ("tune", "--model", "gemma-4-31b", "--kernel", "gelu_gate", "--arch", "sm70", "--trials", "3")
    assert kerngen(*command, "--jobs", "1", "--db", "tuned.db")[0] == 0

    def told(store: Store) -> list[tuple[Any, ...]]:
        return [(w.problem.id, w.config, w.provenance, rounded(w.latency_us, PREDICTED_DIGITS), w.closure)
                for w in store.winners()]  # fmt: skip

    with Store.open("tuned.db", read_only=True) as tuned, Store.open("again.db") as again:
        (file,) = results_of([tuned], Selection(), rivals=False)
        assert len(list(file.points())) == len(tuned.winners())
        assert {(t.won, t.model) for _, p in file.points() for t in p.trials} == {(True, 0)}
        assert "\n  " not in dump(file), "each point is one word"
        done = build([file], again, None)
        assert (done.faults, done.stale) == ([], [])
        assert told(again) == told(tuned)
        assert {again.build(w.build_id).status for w in again.winners()} == {"uncompiled"}
        assert all(again.image(again.build(w.build_id)) is None for w in again.winners())
        assert results_of([again], Selection(), rivals=False) == [file]
    Path("sheets").mkdir()
    Path("sheets/gelu_gate.predicted.txt").write_text(dump(file))
    assert kerngen("db", "build", "sheets", "-o", "built.kgdb", "--jobs", "1")[0] == 0
    assert kerngen("db", "verify", "built.kgdb")[0] == 0
    assert kerngen("db", "merge", "again.db", "built.kgdb")[0] == 0
    with Store.open("again.db") as again:
        assert {again.build(w.build_id).status for w in again.winners()} == {"ok"}, "what was compiled takes its place"
        assert all(again.image(again.build(w.build_id)) is not None for w in again.winners())
        build([replace(file, models=(Model("roofline-0", file.models[0].nvrtc),))], again, None)
        with pytest.raises(DatabaseError, match=r"more than one maker \(roofline-0 with NVRTC [0-9.]+, roofline-\d"):
            write_predicted(again, Target.of(find_device("V100")), Path("out"))
        (text,) = dump_of([again], Selection()).values()
    assert [m.name for m in parse(text).models] == ["roofline-0", file.models[0].name]
    assert {tuple(t.model for t in p.trials) for _, p in parse(text).points()} == {(0, 1)}, "that tells all"
    assert not Path("out").exists()


def test_text_that_contradicts_itself_builds_nothing(kerngen: Kerngen) -> None:
    assert kerngen("db", "dump", "--arch", "sm90", "--kernel", "gelu_gate", "-o", "text")[0] == 0
    file = kerngen.folder / "text" / "H200" / "gelu_gate.txt"
    text = file.read_text()
    mark = re.search(r"@([0-9a-f]{12})", text)
    assert mark is not None
    file.write_text(text.replace(mark.group(), "@000000000000 revision 7"))
    _, _, err = kerngen("db", "build", "text", "-o", "built.kgdb", "--jobs", "1")
    assert "left out, as its body has another revision today: gelu_gate on H200" in err
    file.write_text(text.replace("problem ", "problem no_such=1 ", 1))
    code, _, err = kerngen("db", "build", "text", "-o", "none.kgdb", "--jobs", "1")
    assert code == 1
    assert "the text contradicts itself: gelu_gate on H200: " in err
    assert not (kerngen.folder / "none.kgdb").exists()


def test_what_an_earlier_source_of_the_revision_gave_is_taken_over(kerngen: Kerngen) -> None:
    """As what today's source gives, and written again as what it was; but for its wrong results."""
    config = GATE.config_type(threads=64)
    board = f"gelu_gate sm90 H200\nboard {as_json(filed_device(H200.device))}\n"
    text = (
        f"kerngen-results 2 {board}run r1 a1 2026-11-21T09:06:01+00:00 nvrtc 13.0 {{}}\n\nproblem width=64\n"
        " a @000000000000\n b threads=64 @111111111111\n | num_tokens=8\n  = 2.5b r1+5 final n=15 min 2.3 err 0\n"
    )
    Path("earlier.txt").write_text(f'{text}  ! a r1+2 "[1] is off by 3"\n')
    (winner,) = _winners_built(kerngen, "earlier.txt")
    assert (winner["config"], winner["latency_us"], winner["stale"]) == (fields_of(config), 2.5, False)
    with open_bundle("built.kgdb", allow_unsigned=True) as store:
        (found,) = store.winners("gelu_gate")
        assert "earlier source" in found.reason
        assert store.wrong_sources(found.problem.static_key) == set()
        (again,) = dump_of([store], Selection()).values()
    assert parse(again).problems[0].configs == (Config({"threads": 64}, "1" * 12),)


def test_what_is_carried_is_built_and_written_again(kerngen: Kerngen) -> None:
    """It wins over a prediction beside it, holds for the revision of its body, and gives way to a measurement."""
    board = f"gelu_gate sm90 H200\nboard {as_json(filed_device(H200.device))}\n"
    text = (
        f'kerngen-results 2 {board}carried c1 "steps of an H200"\n\nproblem width=64\n'
        " a threads=64 @111111111111\n b @000000000000\n | num_tokens 8=a 16=b\n"
    )
    Path("sheets").mkdir()
    Path("sheets/gelu_gate.carried.txt").write_text(text)
    Path("sheets/gelu_gate.predicted.txt").write_text(
        f"kerngen-results 2 {board}model m1 roofline-5 nvrtc 12.9\n\nproblem width=64\n"
        " a threads=256 @222222222222\n | num_tokens 8=2.7a 32=3.1a\n"
    )
    winners = _winners_built(kerngen, "sheets")
    told = [(w["problem"]["num_tokens"], w["config"]["threads"], w["provenance"], w["latency_us"]) for w in winners]
    assert sorted(told) == [(8, 64, "carried", None), (16, 128, "carried", None), (32, 256, "predicted", 3.1)]
    asked = ("gelu_gate", "--problem", "width=64,num_tokens=8", "--arch", "sm90", "--db", "built.kgdb")
    for command in ("show", "explain"):
        shown = kerngen("db", command, *asked)[1]
        assert "no time, carried on H200" in shown
        assert "carried: steps of an H200" in shown
    assert "carried" in kerngen("db", "ls", "--db", "built.kgdb")[1]
    assert kerngen("db", "verify", "built.kgdb")[0] == 0
    with open_bundle("built.kgdb", allow_unsigned=True) as built, Store.open("tuned.db") as tuned:
        (file,) = results_of([built], Selection(provenances=["carried"]))
        assert dump(file) == text
        merge(tuned, [built])
        at = next(o.measurement for o in tuned.measurements(provenance="carried") if o.measurement.problem.dynamic == 8)
        row = replace(at, provenance="measured", reason="", p50_us=99.0, samples=5, error_abs=0.0, run="r")
        tuned.add_measurement(row)
        found = tuned.recompute_winners(GATE, KEY.static_key, H200)
    assert [(w.problem.dynamic, w.provenance, w.latency_us) for w in found] == [
        (8, "measured", 99.0), (16, "carried", None), (32, "predicted", 3.1)]  # fmt: skip


def test_files_of_the_grammars_of_before_are_built(kerngen: Kerngen) -> None:
    """As a user may have written them with `kerngen db dump`, or kept them of what was shipped."""
    config = GATE.config_type(threads=64)
    digits = source_sha(source_of(GATE, PROBLEM, config, H200.arch))[:SOURCE_DIGITS]
    board = f"gelu_gate sm90 H200\nboard {as_json(filed_device(H200.device))}\n"
    Path("former").mkdir()
    Path("former/measured.txt").write_text(
        f"kerngen-text 1 {board}run r1 a1 2026-11-21T09:06:01+00:00 nvrtc 13.0 {{}}\n\nproblem width=64 |\n"
        f" num_tokens=8\n  = 2.5 measured r1+5 final n=15 2.4..2.6 min 2.3 err 0 | threads=64 @{digits}\n"
    )
    Path("former/predicted.txt").write_text(
        f"kerngen-outlook 1 {board}predicted roofline-5 nvrtc 12.9\n\nproblem width=64\n a threads=64 @{digits}\n"
        " | num_tokens 8=2.7a 16=3.1a\n"
    )
    winners = _winners_built(kerngen, "former")
    told = [(w["problem"]["num_tokens"], w["latency_us"], w["provenance"], w["config"]["threads"]) for w in winners]
    assert sorted(told) == [(8, 2.5, "measured", 64), (16, 3.1, "predicted", 64)]


def _winners_built(kerngen: Kerngen, results: str) -> list[dict[str, Any]]:
    """Of `built.kgdb`, which is built of a file or a folder."""
    code, _, err = kerngen("db", "build", results, "-o", "built.kgdb", "--jobs", "1")
    assert code == 0, err
    winners: list[dict[str, Any]] = json.loads(kerngen("db", "ls", "--db", "built.kgdb", "--json")[1])
    return winners


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
            notes = notes_of(source_digest_of(GATE), GATE, fields_of(config), "sm90")
            builds.append(store.add_build(image, "gelu_gate", source, fields_of(config), static_fields(PROBLEM),
                                          notes=notes))  # fmt: skip
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
        file = parse(text)
        assert [(s.phase, s.q_len, s.weight) for s in file.steps] == [("decode", 1, 0.75), ("verify", 4, 0.25)]
        assert file.bases == ("b" * 64,)
        assert len([t for _, p in file.points() for t in p.trials if t.in_step is not None]) == 6
        done = build([file], again, compiler)
        assert (done.faults, done.stale, done.trials) == ([], [], len(rows))
        assert [(w.config, w.why["step"]["judged"]) for w in again.winners()] == [(winner.config, 3)]
        assert again.steps().keys() == store.steps().keys()
        assert dump_of([again], Selection()) == {name: text}
        # Without its steps the text says that another wins than what its trials give.
        told = [line for line in text.split("\n") if " step n=" not in line]
        with Store.open(tmp_path / "three.db") as other:
            assert "is said to win" in build([parse("\n".join(told))], other, compiler).faults[0]
