"""Predicted winners as text: all that a database says of them, in one way, and never as measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from command import Kerngen
from hypothesis import given, settings
from hypothesis import strategies as st
from test_results_file import FIELDS, NAMES, SOURCES, WORDS, changed

from kerngen.errors import DatabaseError
from kerngen.tuning_db import Store
from kerngen.tuning_db.dist.export import Selection
from kerngen.tuning_db.dist.predicted import predictions_of
from kerngen.tuning_db.dist.prediction_file import (
    Cell,
    Family,
    Plan,
    Point,
    PredictionFile,
    dump,
    label,
    parse,
    rounded,
)
from kerngen.tuning_db.dist.results_folder import build

US = st.floats(1e-3, 1e6).map(rounded)


@st.composite
def families(draw: st.DrawFn, dynamic: str) -> Family:
    plans = tuple(draw(st.lists(st.builds(Plan, FIELDS, SOURCES), min_size=1, max_size=30)))
    cells = []
    for runtime in draw(st.lists(FIELDS, max_size=3, unique_by=repr)):
        at = draw(st.lists(st.integers(1, 10**6), min_size=1, max_size=4)) if dynamic else [None]
        points = [Point(d, draw(US), draw(st.integers(0, len(plans) - 1)), draw(st.none() | FIELDS)) for d in at]
        cells.append(Cell(runtime, tuple(points)))
    distinct = {repr(sorted(c.runtime.items(), key=repr)): c for c in cells}
    return Family(draw(FIELDS), plans, tuple(distinct.values()))


@st.composite
def outlooks(draw: st.DrawFn) -> PredictionFile:
    dynamic = draw(st.just("") | NAMES.filter(lambda n: n != "point"))
    told = tuple(draw(st.lists(families(dynamic), max_size=3)))
    named = dynamic if any(f.cells for f in told) else ""
    version = draw(st.integers(11, 14)), draw(st.integers(0, 9))
    return PredictionFile(
        draw(WORDS), draw(NAMES), draw(WORDS), draw(FIELDS), draw(WORDS.filter(bool)), version, named, told
    )


@given(outlooks())
@settings(max_examples=80, deadline=None)
def test_what_is_written_is_read_back(outlook: PredictionFile) -> None:
    text = dump(outlook)
    assert parse(text) == outlook
    assert dump(parse(text)) == text


@given(st.integers(0, 20000), st.integers(0, 20000))
def test_each_configuration_has_a_letter_of_its_own(a: int, b: int) -> None:
    assert (label(a) == label(b)) == (a == b)
    assert label(a).isascii()
    assert label(a).isalpha()


SAMPLE = """\
kerngen-outlook 1 attn_decode sm70 V100
board {"arch":"sm70","name":"V100"}
predicted roofline-5 nvrtc 12.9

problem dtype=fp16 head_dim=256
 a @a91f03c2b7d0
 b block_n=32 @0c3fb1a2d4e5
 batch=1 | kv_len 64=3.412a 512=4.02a 2048=7.771b
 batch=2 | kv_len 64=3.45a
 batch=2 | kv_len 100=3.5b as {"batch":2,"kv_len":97}
"""


def test_the_sample() -> None:
    outlook = parse(SAMPLE)
    assert dump(outlook) == SAMPLE
    (family,) = outlook.families
    one, two = family.cells
    assert [(p.dynamic, p.us, p.plan) for p in one.points] == [(64, 3.412, 0), (512, 4.02, 0), (2048, 7.771, 1)]
    assert two.points[1] == Point(100, 3.5, 1, {"batch": 2, "kv_len": 97})
    assert (outlook.model, outlook.nvrtc, outlook.dynamic) == ("roofline-5", (12, 9), "kv_len")


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("predicted roofline-5", "measured r1", 3),
        ("predicted roofline-5", 'predicted ""', 3),
        (" nvrtc 12.9", "", 3),
        ("nvrtc 12.9", "nvrtc 12", 3),
        ("512=4.02a", "512=4.02c", 8),
        ("512=4.02a", "512=4.02", 8),
        ("512=4.02a", "512=4.020a", 8),
        ("512=4.02a", "512=0a", 8),
        ("512=4.02a", "512=-1a", 8),
        ("512=4.02a", "4.02a", 8),
        ("kv_len 64=3.412a", "kv_len  64=3.412a", 8),
        ("batch=2 | kv_len 64", "batch=2 | num_tokens 64", 9),
        ("batch=2 | kv_len 64", "batch=1 | kv_len 64", 9),
        ("batch=2 | kv_len 64=3.45a", "batch=2 | kv_len", 9),
        (" b block_n=32", " c block_n=32", 7),
        ("@0c3fb1a2d4e5", "@0c3fb1a2d4e", 7),
        ("3.5b as", "3.5b 128=4b as", 10),
        ("problem dtype", "problems dtype", 5),
        ("dtype=fp16 head_dim=256", "head_dim=256 dtype=fp16", 5),
        ("kerngen-outlook 1", "kerngen-outlook 2", 1),
        ('board {"arch":"sm70","name":"V100"}', "board 7", 2),
    ],
)
def test_what_is_not_so_written_is_refused(old: str, new: str, line: int) -> None:
    assert old in SAMPLE
    with pytest.raises(DatabaseError, match=rf"sheet, line {line}\b"):
        parse(SAMPLE.replace(old, new, 1), "sheet")


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


def test_from_a_database_to_an_outlook_and_back(kerngen: Kerngen) -> None:
    """The same winners, the same text again; without compiling, and with the machine code where it is compiled."""
    command = ("tune", "--model", "gemma-4-31b", "--kernel", "gelu_gate", "--arch", "sm70", "--trials", "3")
    assert kerngen(*command, "--jobs", "1", "--db", "tuned.db")[0] == 0

    def told(store: Store) -> list[tuple[Any, ...]]:
        return [(w.problem.id, w.config, w.provenance, rounded(w.latency_us), w.closure) for w in store.winners()]

    with Store.open("tuned.db", read_only=True) as tuned, Store.open("again.db") as again:
        (outlook,) = predictions_of(tuned, Selection())
        assert sum(len(c.points) for f in outlook.families for c in f.cells) == len(tuned.winners())
        done = build([outlook], again, None)
        assert (done.faults, done.stale) == ([], [])
        assert told(again) == told(tuned)
        assert {again.build(w.build_id).status for w in again.winners()} == {"uncompiled"}
        assert all(again.image(again.build(w.build_id)) is None for w in again.winners())
        assert [dump(o) for o in predictions_of(again, Selection())] == [dump(outlook)]
        text = dump(outlook)
    Path("sheets").mkdir()
    Path("sheets/gelu_gate.predicted.txt").write_text(text)
    assert kerngen("db", "build", "sheets", "-o", "built.kgdb", "--jobs", "1")[0] == 0
    assert kerngen("db", "verify", "built.kgdb")[0] == 0
    assert kerngen("db", "merge", "again.db", "built.kgdb")[0] == 0
    with Store.open("again.db", read_only=True) as again:
        assert {again.build(w.build_id).status for w in again.winners()} == {"ok"}, "what was compiled takes its place"
        assert all(again.image(again.build(w.build_id)) is not None for w in again.winners())


def test_a_source_that_is_rendered_otherwise_is_named_and_left_out(kerngen: Kerngen) -> None:
    command = ("tune", "--model", "gemma-4-31b", "--kernel", "gelu_gate", "--arch", "sm70", "--trials", "2")
    assert kerngen(*command, "--jobs", "1", "--db", "tuned.db")[0] == 0
    with Store.open("tuned.db", read_only=True) as tuned, Store.open("again.db") as again:
        (outlook,) = predictions_of(tuned, Selection())
        source = outlook.families[0].plans[0].source
        changed = parse(dump(outlook).replace(source, "0" * 12))
        done = build([changed], again, None)
        assert done.stale
        assert all("gelu_gate on V100" in line for line in done.stale)
        assert len(again.winners()) == len(tuned.winners()) - len(done.stale)
