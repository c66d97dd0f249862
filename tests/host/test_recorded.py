"""The file format of recorded measurements: what is written is read back, and what is damaged is named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from recordings import recording

from kerngen.arch import Target, find_arch
from kerngen.compiler.compile import Resources
from kerngen.errors import RecordingError
from kerngen.templates import find_kernel
from kerngen.templates.kernel import Kernel, fields_of
from kerngen.tuning.recorded import Recorded, Row, completed, write
from tools.recordings import read, read_folder

SM90 = Target.of(find_arch("sm90"))


@pytest.fixture
def toy(scale: Kernel) -> Recorded:
    """A complete recording of 33 configurations; those called broken have no time."""
    problem = scale.problem_type(width=512)
    target = Target.of(find_arch("sm70"))
    return recording(
        scale, problem, target, lambda c: "it is broken" if c.flavour == "broken" else 100.0 - c.threads / 8
    )


def _time() -> st.SearchStrategy[float]:
    return st.floats(0.001, 1e7, allow_nan=False).map(lambda x: round(x, 3)).filter(lambda x: x > 0)


_count = st.integers(0, 1 << 20)
_takes = st.builds(lambda *r: {"scale": Resources(*r)}, _count, _count, _count, _count, _count)
_ok = st.builds(
    lambda us, p10, p90, final, mhz, takes: {
        "outcome": "ok", "us": us, "p10_us": p10, "p90_us": p90, "final_us": final, "mhz": mhz, "takes": takes
    },
    _time(), _time(), _time(), st.none() | _time(), st.none() | st.integers(1, 5000), _takes,
)  # fmt: skip
_failed = st.builds(
    lambda outcome, takes, reason: {"outcome": outcome, "takes": takes, "reason": reason},
    st.sampled_from(["invalid", "compile_failed", "wrong_result", "launch_failed", "timed_out"]),
    st.none() | _takes,
    st.text(),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_what_is_written_is_read_back(tmp_path: Path, toy: Recorded, data: st.DataObject) -> None:
    drawn = [data.draw(_ok | _failed) for _ in toy.rows]
    rows = tuple(Row(r.config, **d) for r, d in zip(toy.rows, drawn, strict=True))
    path = tmp_path / toy.head.file_name
    write(path, replace(toy, rows=rows))
    text = path.read_text()
    assert read(path).rows == rows
    assert read(path).head == toy.head
    write(path, read(path))
    assert path.read_text() == text
    assert len(text.splitlines()) == len(rows) + 2, "a line a configuration, whatever its reason holds"


@pytest.mark.parametrize(("name", "problem", "fewer"), [
    ("w4a16_gemm", {"n": 4096, "k": 1024}, {"block_m": (2, 8), "num_stages": (1, 2, 3), "block_n": (32, 64)}),
    ("attn_decode", {"kv_len": 512}, {}),
    ("greedy_head", {"vocab_size": 4096, "hidden": 2816}, {"unroll": (1, 2)}),
    ("dense_gemv", {"n": 128, "k": 512}, {"row_tiles": (1,)}),
])  # fmt: skip
def test_kernels_with_bodies_entries_and_switches_are_read_back(
    tmp_path: Path, name: str, problem: dict[str, Any], fewer: dict[str, tuple[int, ...]]
) -> None:
    kernel = find_kernel(name)
    made = recording(kernel, kernel.problem_type(**problem), SM90, lambda c: 1 + hash(c) % 1000 / 7, fewer=fewer)
    path = tmp_path / made.head.file_name
    write(path, made)
    found = read(path)
    assert found == made
    assert found.target == SM90
    assert found.default == kernel.default_config(found.problem, SM90)
    assert found.best.us == min(r.us for r in made.rows if r.us)
    assert len(path.read_text()) < 110 * len(made.rows) + 6000, "compact enough to be in the repository"


def test_a_recording_under_the_names_of_before_is_read(tmp_path: Path) -> None:
    """`unroll` was `steps` when the recordings of dense_gemv were made."""
    kernel = find_kernel("dense_gemv")
    problem = kernel.problem_type(n=128, k=512)
    made = recording(kernel, problem, SM90, lambda c: 1 + hash(c) % 1000 / 7, fewer={"row_tiles": (1,)})
    path = tmp_path / made.head.file_name
    write(path, made)
    text = path.read_text()
    assert text.count("unroll") == 3, "the default, the grid and the columns"
    path.write_text(text.replace("unroll", "steps"))
    assert read(path) == made


def test_the_columns_are_those_that_vary(tmp_path: Path, toy: Recorded) -> None:
    grid = tuple({**part, "vectors": (1,)} for part in toy.head.grid)
    rows = [r for r in toy.rows if r.config.vectors == 1]
    made = completed(replace(toy.head, grid=grid, num_configs=len(rows)), rows)
    write(path := tmp_path / toy.head.file_name, made)
    assert path.read_text().splitlines()[1].startswith("threads,flavour,outcome,us,")
    assert read(path) == made


def _damaged(path: Path, number: int, old: str, new: str) -> None:
    lines = path.read_text().split("\n")
    assert old in lines[number - 1]
    lines[number - 1] = lines[number - 1].replace(old, new, 1)
    path.write_text("\n".join(lines))


@pytest.mark.parametrize(("line", "old", "new", "says"), [
    (1, '"v": 1', '"v": 2', ":1: version 2; this kerngen reads 1"),
    (1, '"held_out": false', '"held_out": 0', ":1: the head's held_out is 0"),
    (1, '"held_out": false, ', "", ":1: the head lacks, or should not have: held_out"),
    (1, '"threads": [', '"thread": [', ":1: scale has no tunable thread any more"),
    (1, '"width"', '"breadth"', ":1: the head does not fit today's scale"),
    (1, '"num_configs": 33', '"num_configs": 34', ":1: 33 rows; the head says all of 34"),
    (1, '"kernel": "scale"', '"kernel": "scales"', ":1: unknown kernel 'scales'"),
    (2, "vectors", "vector", ":2: unknown column 'vector'"),
    (2, "mhz,", "", ":2: columns "),
    (5, "32,", "33,", ":5: threads='33' is none of: 32, 64, 128, 256, 2048"),
    (5, "ok", "fine", ":5: outcome 'fine' is none of"),
    (5, "96.0", "ninety", ":5: us='ninety' is no number"),
    (5, "96.0", "nan", ":5: nan us is no time"),
    (5, "96.0", "", ":5: ok, without its three times"),
    (5, ",40,", ",,", ":5: resources are not those of the entries scale"),
    (5, ",40,", ",40 40,", ":5: resources are not those of the entries scale"),
    (5, "ok,", "", ":5: 14 cells in 15 columns"),
    (5, "ok", '"ok', ":5: no line of a CSV"),
])  # fmt: skip
def test_damage_is_named_with_file_and_line(
    tmp_path: Path, toy: Recorded, line: int, old: str, new: str, says: str
) -> None:
    write(path := tmp_path / toy.head.file_name, toy)
    _damaged(path, line, old, new)
    with pytest.raises(RecordingError) as caught:
        read(path)
    assert caught.value.message.startswith(f"{path}{says}")


def test_a_configuration_twice_is_refused(tmp_path: Path, toy: Recorded) -> None:
    write(path := tmp_path / toy.head.file_name, toy)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines, lines[4]]))
    with pytest.raises(RecordingError, match=r"scale-made\.csv:36: .*line 5\b"):
        read(path)


def test_two_files_in_one_are_refused(tmp_path: Path, toy: Recorded) -> None:
    write(path := tmp_path / toy.head.file_name, toy)
    path.write_text(path.read_text() * 2)
    with pytest.raises(RecordingError, match=r"scale-made\.csv:36: .*head"):
        read(path)


def test_every_cut_is_seen(tmp_path: Path, toy: Recorded) -> None:
    growing = replace(toy, head=replace(toy.head, complete=False))
    write(path := tmp_path / toy.head.file_name, growing)
    whole = path.read_bytes()
    ends = [i + 1 for i, b in enumerate(whole) if b == ord("\n")]
    for cut in range(ends[1], len(whole), 7):
        path.write_bytes(whole[:cut])
        if cut in ends:
            assert read(path).rows == toy.rows[: ends.index(cut) - 1]
        else:
            with pytest.raises(RecordingError, match=r":\d+: cut short"):
                read(path)


def test_a_folder_of_mixed_versions_is_refused(tmp_path: Path, toy: Recorded) -> None:
    for name, change in (
        ("a", {}), ("b", {"environment": {"driver": "570.1"}}), ("c", {"folder_digest": "f00"}),
    ):  # fmt: skip
        head = replace(toy.head, name=name, **({"environment": {"driver": "555.2"}, "folder_digest": "abc"} | change))
        write(tmp_path / name / head.file_name, replace(toy, head=head))
    write(tmp_path / "a" / "scale-more.csv", replace(read(tmp_path / "a" / "scale-a.csv"), head=replace(
        read(tmp_path / "a" / "scale-a.csv").head, name="more", commit="another")))  # fmt: skip
    assert [r.head.name for r in read_folder(tmp_path / "a")] == ["a", "more"]
    (tmp_path / "b" / "scale-a.csv").write_bytes((tmp_path / "a" / "scale-a.csv").read_bytes())
    with pytest.raises(RecordingError, match=r"scale-b\.csv:1: .*driver.*'570\.1'.*'555\.2'.*scale-a"):
        read_folder(tmp_path / "b")
    (tmp_path / "c" / "scale-a.csv").write_bytes((tmp_path / "a" / "scale-a.csv").read_bytes())
    with pytest.raises(RecordingError, match=r"scale-c\.csv:1: .*folder_digest.*'f00'.*'abc'.*scale-a"):
        read_folder(tmp_path / "c")
    with pytest.raises(RecordingError, match="holds no recordings"):
        read_folder(tmp_path)


def test_a_file_under_another_name_is_refused(tmp_path: Path, toy: Recorded) -> None:
    write(tmp_path / "scale-other.csv", toy)
    with pytest.raises(RecordingError, match=r"scale-other\.csv:1: .*scale-made\.csv"):
        read(tmp_path / "scale-other.csv")


def test_a_row_that_contradicts_itself_is_not_written(tmp_path: Path, toy: Recorded) -> None:
    path = tmp_path / toy.head.file_name
    off = replace(toy.rows[0].config, threads=7)
    for row, says in (
        (replace(toy.rows[0], us=None), "without its three times"),
        (replace(toy.rows[0], outcome="timed_out"), "timed_out, with a time"),
        (replace(toy.rows[0], takes=None), "without the resources"),
        (replace(toy.rows[0], takes={"scales": Resources(1, 0, 0, 0, 0)}), "resources of"),
        (replace(toy.rows[0], config=off), "not on the grid"),
    ):
        with pytest.raises(RecordingError, match=says):
            write(path, replace(toy, rows=(row, *toy.rows[1:])))
    assert not path.exists()
    assert json.loads(toy.head.text())["default"] == fields_of(toy.default)
