"""`kerngen bench ab` on a GPU that is played: what is timed, what is written down, what is kept in a step."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command import ROOT, Kerngen
from played_gpu import PlayedGpu
from toy import TOYS

from kerngen.arch import Target, find_device
from kerngen.cli.bench_ab import where_of
from kerngen.compiler.compile import Cubin, Resources
from kerngen.errors import LaunchError
from kerngen.runtime.config import AS_STORED
from kerngen.templates import find_kernel
from kerngen.templates.kernel import Kernel, fields_of
from kerngen.tuning import ab
from kerngen.tuning.ab import PAIRS, SURE_PAIRS, InStep, Look, Place, Trial
from kerngen.tuning.ab_plan import AGAIN, Candidate, Entry, read_plan
from kerngen.tuning.recorded import Recorded
from kerngen.tuning.worker import Observed
from kerngen.tuning_db import Measurement, Store, problem_key
from kerngen.workload.steps import Ratio, Step
from kerngen.workload.workload import find_model
from tools.recordings import read_folder

MODEL, STEP, TARGET = find_model("gemma-4-31b"), Step.verify(2, 5, 512), Target.of(find_device("H200"))
V100 = Target.of(find_device("V100"))
FILE = """
device = "V100"
[[entry]]
kernel = "scale"
problem = "width=512"
configs = ["threads=64", {config = "vectors=4", note = "was the default"}, "flavour=broken", "flavour=spilling"]
"""
PATCHED = """
[[entry]]
kernel = "scale"
problem = "width=512"
configs = ["threads=64"]
[[entry.patch]]
name = "three"
config = "threads=64"
wrong = true
[[entry.patch.replace]]
this = "2.0f"
by = "3.0f"
[[entry.patch]]
name = "a word"
[[entry.patch.replace]]
this = "2.0f"
by = "2.0f /* twice */"
"""
RECORDED = """
device = "V100"
[[entry]]
kernel = "scale"
name = "one"
problem = {width = 512}
grid = [{}]
[[entry]]
kernel = "scale"
name = "two"
problem = {num_tokens = 512}
held_out = true
grid = [{threads = [32, 64, 256], vectors = [1, 4], flavour = ["plain", "broken", "spilling"]}]
[[entry]]
kernel = "scale"
name = "three"
problem = {num_tokens = 4096}
sample = 5
"""
# Without what does not compile, which no cache remembers.
SOUND = (
    RECORDED.replace("[{}]", '[{flavour = ["plain", "spilling"]}]')
    .replace(', "broken"', "")
    .replace("sample = 5", 'sample = 5\ngrid = [{flavour = ["plain"]}]')
)


def us(problem: Any, config: Any) -> float | str:
    """A V100's, of the toy kernel."""
    if config.flavour == "spilling":
        return "out[0] is 1,\nreference 2"
    return 100.0 + problem.num_tokens - config.vectors * 10 - config.threads / 64


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources are the same in every test."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture
def kerngen(
    tmp_path: Path, compiled: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Kerngen:
    made = Kerngen(tmp_path, monkeypatch, capsys)
    monkeypatch.setenv("KERNGEN_CACHE_DIR", str(compiled))
    monkeypatch.setenv("KERNGEN_TEMPLATES", str(TOYS))
    return made


@pytest.fixture
def bench(kerngen: Kerngen, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, str]]:
    """`kerngen bench ab` on a GPU. A text of several lines is a file's."""

    def run(gpu: PlayedGpu, *args: str) -> tuple[int, str, str]:
        monkeypatch.setattr("kerngen.tuning.worker.GpuWorker", gpu)
        given = list(args)
        for i, text in enumerate(args):
            if "\n" in text:
                (kerngen.folder / f"{i}.toml").write_text(text)
                given[i] = f"{i}.toml"
        return kerngen("bench", "ab", *given, "--jobs", "1")

    return run


def _rows() -> list[Measurement]:
    with Store.open(None) as store:
        return [o.measurement for o in store.measurements()]


# -- alone


def test_every_look_is_told_and_written_down(bench: Callable[..., Any], scale: Kernel) -> None:
    gpu = PlayedGpu(us, board="V100")
    code, out, err = bench(gpu, FILE)
    assert code == 1
    assert "2 candidates are wrong or failed" in err
    lines = out.splitlines()
    assert "reads 4580 GB/s, multiplies 790 TFLOP/s" in lines[0]
    assert lines[1].startswith("scale [width=512")
    assert len(lines) == 2 + 5 + 1 + 3
    assert "compile_failed: " in lines[5]
    assert "wrong_result: out[0] is 1," in lines[6]
    best, second, default = lines[8:]
    assert "vectors=4" in best
    assert "-33.15 %" in best, "60.5 us in place of 90.5"
    assert "threads=64" in second
    assert "the default" in default
    rows = _rows()
    assert {(m.outcome, m.stage) for m in rows} == {
        ("ok", "trial"), ("ok", "final"), ("compile_failed", "trial"), ("wrong_result", "trial")
    }  # fmt: skip
    assert len(rows) == 5 + 3
    assert all(m.tags["ab"] == "alone" and m.tags["board"] == "GPU-1" and "patch" not in m.tags for m in rows)
    assert {m.environment["driver"] for m in rows} == {"555.1"}
    with Store.open(None) as store:
        (winner,) = store.recompute_winners(scale, rows[0].problem.static_key, V100)
    assert winner.config["vectors"] == 4, "what was seen alone counts"


@pytest.mark.parametrize(("args", "count"), [
    (("--body", "kernel.cu.jinja", "--most", "3"), 3),
    (("--config", "threads=64", "--config", "threads=64", "--config", "vectors=2"), 3),
    (("--random", "4"), 5),
])  # fmt: skip
def test_candidates_by_options(bench: Callable[..., Any], scale: Kernel, args: tuple[str, ...], count: int) -> None:
    gpu = PlayedGpu(lambda problem, config: 10.0 + config.threads, board="V100")
    _, out, _ = bench(gpu, "scale", "--problem", "width=512", *args, "--json", "--again", "0")
    said = json.loads(out)
    (entry,) = said["entries"]
    assert entry["trials"][0]["config"] == fields_of(scale.config_type(32)), "the default is the first"
    assert entry["trials"][0]["ratio"] == 1.0
    assert len(entry["trials"]) in (count, count + 1), "the default may be among a body's best"
    assert gpu.together == []
    assert said["read_gbps"] == 4580


def test_what_breaks_at_the_second_look_is_not_called_the_best(bench: Callable[..., Any], scale: Kernel) -> None:
    def again(problem: Any, config: Any) -> float | str:
        return "!no more" if config.vectors == 4 else us(problem, config)

    code, out, err = bench(PlayedGpu(us, board="V100", again=again), FILE, "--json")
    assert (code, "3 candidates are wrong or failed" in err) == (1, True)
    trials = {json.dumps(t["config"]): t for t in json.loads(out)["entries"][0]["trials"]}
    (broken,) = (t for t in trials.values() if t["config"]["vectors"] == 4)
    assert (broken["outcome"], broken["us"], broken["ratio"]) == ("launch_failed", None, None)
    lost = PlayedGpu(us, board="V100", again=lambda problem, config: "!the kernel took its process down")
    _, out, _ = bench(lost, FILE, "--json")
    assert not any(t["again"] for t in json.loads(out)["entries"][0]["trials"]), "the first looks stand"


def test_a_patched_source_is_never_a_winner(bench: Callable[..., Any], scale: Kernel) -> None:
    """Though it be the fastest by far. What is known to be wrong is timed all the same, and fails nothing."""
    asked: list[bool] = []

    def times(problem: Any, config: Any) -> float | str:
        asked.append(True)
        return "out[0] is 3, reference 2" if len(asked) == 3 else us(problem, config)

    def again(problem: Any, config: Any) -> float | str:
        asked.append(True)
        return "out[0] is 3, reference 2" if len(asked) == 5 + 3 else us(problem, config)

    gpu = PlayedGpu(times, board="V100", again=again)
    code, out, err = bench(gpu, PATCHED, "--json")
    assert code == 0, err
    trials = json.loads(out)["entries"][0]["trials"]
    assert [t["name"] for t in trials] == ["", "", "three", "a word", AGAIN]
    three, word = trials[2:4]
    assert (three["outcome"], three["us"], three["patched"], three["wrong"]) == ("wrong_result", 1.0, True, True)
    assert word["same_code"], "a comment is no other machine code"
    patched = [m for m in _rows() if "patch" in m.tags]
    assert [(m.tags["ab"], m.tags["patch"]["name"], m.outcome) for m in patched] == [
        ("patch", "three", "wrong_result")
    ] * 2, "what is no other machine code is not written as if it were"
    with Store.open(None) as store:
        builds = store.builds(patched[0].problem.static_key)
        (winner,) = store.recompute_winners(scale, patched[0].problem.static_key, V100)
    assert winner.build_id not in {m.build_id for m in patched}
    assert builds[patched[0].build_id or ""].source_sha not in {
        b.source_sha for b in builds.values() if b.id != patched[0].build_id
    }


# -- recordings, and going on


def test_all_of_a_plan_is_recorded(bench: Callable[..., Any], kerngen: Kerngen, scale: Kernel) -> None:
    def again(problem: Any, config: Any) -> float | str:
        return "!no more" if (config.vectors, config.threads) == (4, 64) else float(us(problem, config)) + 0.5

    gpu = PlayedGpu(us, board="V100", again=again)
    code, _, err = bench(gpu, RECORDED, "--csv", "out", "--again", "6")
    assert (code, "wrong or failed" in err) == (1, True), "some of the toy's are wrong"
    found = {r.head.name: r for r in read_folder(kerngen.folder / "out")}
    for entry in read_plan(kerngen.folder / "0.toml").entries:
        head, rows = found[entry.name].head, found[entry.name].rows
        assert {r.config for r in rows} == {c.config for c in entry.candidates(V100)}
        assert (head.complete, head.held_out, head.exhaustive) == (True, entry.held_out, not entry.sample)
        assert head.folder_digest == scale.folder_digest
        assert head.environment["driver"] == "555.1"
        assert [c["temperature_c"] for c in head.clocks] == [40, 40]
        for r in rows:
            assert (r.takes is None) == (r.outcome == "compile_failed")
            assert bool(r.reason) == (r.outcome != "ok")
            if r.us is not None:
                assert (r.us, r.mhz) == (round(float(us(found[entry.name].problem, r.config)), 3), 1530)
    two = found["two"]
    assert any("this flavour is broken" in r.reason for r in two.rows)
    assert any(r.reason == "out[0] is 1, reference 2" for r in two.rows)
    assert [r.reason for r in two.rows if r.outcome == "launch_failed"] == ["at the second look: no more"]
    assert two.best.config == scale.config_type(256, 4)
    order = [c for p, c in gpu.measured if p.width == 512]
    assert order[0] == scale.config_type(32)
    keys = [(c.threads, c.vectors, c.flavour) for c in order]
    assert keys != sorted(keys), "shuffled, so that a GPU that warms up favours no part of the grid"
    for configs in gpu.together:
        assert scale.config_type(32) in configs, "the default, which is the slowest"
        assert len(configs) <= 7


def _said(folder: Path) -> dict[str, Recorded]:
    return {r.head.name: replace(r, head=replace(r.head, clocks=())) for r in read_folder(folder)}


@pytest.mark.parametrize("cut", [1, 26])
def test_stopped_and_resumed_it_is_as_if_nothing_had_been(
    bench: Callable[..., Any], kerngen: Kerngen, scale: Kernel, cut: int
) -> None:
    def stop(measured: int) -> None:
        if measured == cut:
            raise KeyboardInterrupt

    first = PlayedGpu(us, board="V100", after=stop)
    code, _, _ = bench(first, SOUND, "--csv", "out")
    assert code == 130
    other = PlayedGpu(us, board="V100", uuid="GPU-2")
    bench(other, SOUND, "--csv", "other", "--resume")
    gpu = PlayedGpu(us, board="V100")
    bench(gpu, SOUND, "--csv", "out", "--resume")
    assert len(gpu.measured) + cut == len(other.measured), "nothing is measured twice, and two boards are two"
    assert _said(kerngen.folder / "out") == _said(kerngen.folder / "other")
    again = PlayedGpu(us, board="V100")
    bench(again, SOUND, "--csv", "out", "--resume")
    assert (again.measured, again.together) == ([], []), "files that are whole stay as they are"


def test_out_of_time_it_says_what_is_left(
    bench: Callable[..., Any], kerngen: Kerngen, scale: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("kerngen.cli.bench_ab.monotonic", lambda: now[0])

    def after(measured: int) -> None:
        now[0] = 100.0 if measured >= 25 else 0.0

    code, out, _ = bench(PlayedGpu(us, board="V100", after=after), SOUND, "--csv", "out", "--minutes", "1")
    assert code == 1
    assert "the time is over: 2 of 3 problems are left" in out
    assert [r.head.name for r in read_folder(kerngen.folder / "out")] == ["one"]


def test_another_board_than_the_recordings_is_refused(bench: Callable[..., Any], scale: Kernel) -> None:
    gpu = PlayedGpu(us, board="H200")
    code, _, err = bench(gpu, RECORDED, "--csv", "out")
    assert (code, "the file is for V100 (sm70, 80 SMs); this is H200" in err) == (2, True)
    assert gpu.measured == []


# -- in a step


ADD_NORM = [p.entry for p in ab.places_of(MODEL, STEP, TARGET, ["add_norm"])]
DEFAULT = ADD_NORM[0].kernel.default_config(ADD_NORM[0].problem, TARGET)  # two vectors a thread, one row a block
ONE_VECTOR, TWO_ROWS, FOUR = (
    replace(DEFAULT, **change) for change in ({"vecs_per_thread": 1}, {"rows_per_block": 2}, {"vecs_per_thread": 4})
)


class NoRows:
    """Takes rows, and writes none."""

    def add_step(self, *what: Any) -> None:
        pass


def _place(entry: Entry, *candidates: Any) -> Place:
    """Whose candidates all ran alone."""
    made = Cubin("key", "sm90", (13, 0), b"\x7fELF", {"add_norm": Resources(40, 0, 0, 0, 0)}, "", 1.0)
    found = [c if isinstance(c, Candidate) else Candidate(c) for c in (DEFAULT, *candidates)]
    return Place(entry, 1, [Trial(entry, c, "", made, Observed("ok", "", 5.0)) for c in found])


def _in_step(gpu: PlayedGpu, *places: Place) -> InStep:
    rows: Any = NoRows()
    return InStep(MODEL, STEP, places, gpu, rows, 0.001)


def _factors(of: dict[Any, float | str]) -> Callable[[Any, Any, int], float | str]:
    return lambda problem, config, pairs: of.get(config, 1.0)


def _kept(looks: list[Look]) -> list[tuple[Any, Any]]:
    return [(look.place.entry.problem, look.trial.candidate.config) for look in looks if look.kept]


FIRST, SECOND = (e.problem for e in ADD_NORM)


def test_what_gains_is_looked_at_again_and_beside_all_that_follows() -> None:
    gpu = PlayedGpu(factors=_factors({ONE_VECTOR: 0.9, TWO_ROWS: 0.8}))
    run = _in_step(gpu, _place(ADD_NORM[0], ONE_VECTOR, TWO_ROWS), _place(ADD_NORM[1], ONE_VECTOR))
    looks = list(run.round())
    assert _kept(looks) == [(FIRST, TWO_ROWS), (SECOND, ONE_VECTOR)]
    assert [pairs for _, _, pairs in gpu.looks] == [PAIRS, PAIRS, SURE_PAIRS, PAIRS, SURE_PAIRS]
    assert [before for before, _, _ in gpu.looks] == [{}, {}, {}, {FIRST: TWO_ROWS}, {FIRST: TWO_ROWS}]
    whole = run.against_defaults()
    assert isinstance(whole, Ratio)
    assert whole.median == pytest.approx(0.72)


def test_where_time_is_short_each_place_has_a_share_and_what_is_fast_alone_comes_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A look takes a second. Of three candidates a share of two leaves out the one that is slowest alone, which would
    gain most; what has gained is kept all the same.
    """
    gpu = PlayedGpu(factors=_factors({ONE_VECTOR: 0.9, TWO_ROWS: 0.95, FOUR: 0.5}))
    monkeypatch.setattr(ab, "monotonic", lambda: float(len(gpu.looks)))
    first, second = _place(ADD_NORM[0], FOUR, TWO_ROWS, ONE_VECTOR), _place(ADD_NORM[1], TWO_ROWS)
    for trial, us in zip(first.trials, (5.0, 9.0, 7.0, 6.0), strict=True):
        trial.seen = replace(trial.seen, p50_us=us)
    run = _in_step(gpu, first, second)
    looks = list(run.round(4.0))
    assert [tried for _, tried, _ in gpu.looks[:2]] == [{FIRST: ONE_VECTOR}, {FIRST: TWO_ROWS}]
    assert _kept(looks) == [(FIRST, ONE_VECTOR), (SECOND, TWO_ROWS)]
    assert not run.complete


def test_what_gains_by_luck_or_nothing_is_not_kept() -> None:
    """0.9 in a short look and 1.0 in a long one; and a place whose best is slower, which gets no long look."""
    gpu = PlayedGpu(factors=lambda problem, config, pairs: 0.9 if config == ONE_VECTOR and pairs == PAIRS else 1.01)
    run = _in_step(gpu, _place(ADD_NORM[0], ONE_VECTOR, TWO_ROWS), _place(ADD_NORM[1], TWO_ROWS))
    assert not _kept(list(run.round()))
    assert [pairs for _, _, pairs in gpu.looks] == [PAIRS, PAIRS, SURE_PAIRS, PAIRS]


def test_a_second_round_goes_back_where_that_is_faster_by_then() -> None:
    """One vector gains alone, and loses beside the other place's two rows."""
    beside = {"rows": False}

    def factors(problem: Any, config: Any, pairs: int) -> float:
        if config == TWO_ROWS and problem == SECOND:
            beside["rows"] = True
            return 0.8
        return (1.1 if beside["rows"] else 0.9) if config == ONE_VECTOR else 1.0

    run = _in_step(PlayedGpu(factors=factors), _place(ADD_NORM[0], ONE_VECTOR), _place(ADD_NORM[1], TWO_ROWS))
    list(run.round())
    assert [t.candidate.config for t in run.kept.values()] == [ONE_VECTOR, TWO_ROWS]
    assert _kept(list(run.round())) == [(FIRST, DEFAULT)]
    assert [t.candidate.config for t in run.kept.values()] == [TWO_ROWS]


def test_what_is_known_to_be_wrong_is_looked_at_and_never_kept() -> None:
    gpu = PlayedGpu(factors=_factors({TWO_ROWS: 0.5}))
    run = _in_step(gpu, _place(ADD_NORM[0], Candidate(TWO_ROWS, "less", (("a", "b"),), True)))
    looks = list(run.round())
    assert [look.seen.median for look in looks if isinstance(look.seen, Ratio)] == [0.5]
    assert not run.kept


def test_what_breaks_in_the_step_is_told_once() -> None:
    gpu = PlayedGpu(factors=_factors({FOUR: "the kernel took its process down"}))
    run = _in_step(gpu, _place(ADD_NORM[0], FOUR))
    assert [look.seen.reason for look in run.round() if isinstance(look.seen, Observed)] == [
        "the kernel took its process down"
    ]
    assert not list(run.round())


def test_a_step_that_does_not_run_is_said_before_any_look() -> None:
    gpu = PlayedGpu()
    gpu.compare = lambda *_, pairs, fused: Observed("timed_out", "no answer within 1 s")  # type: ignore[method-assign]
    with pytest.raises(LaunchError, match="does not run by default: no answer within 1 s"):
        _in_step(gpu, _place(ADD_NORM[0], TWO_ROWS)).begin()


STEP_FILE = """
[step]
model = "gemma-4-31b"
phase = "verify"
batch = 2
tokens = 5
[[entry]]
kernel = "add_norm"
problem = {PROBLEM}
configs = ["vecs_per_thread=1", "rows_per_block=2", "vecs_per_thread=4"]
"""


def test_a_file_of_a_step(bench: Callable[..., Any]) -> None:
    def times(problem: Any, config: Any) -> float | str:
        return "out[0] is 2" if config == FOUR else 10.0

    told = fields_of(FIRST)
    given = ", ".join(f"{n} = {json.dumps(v)}" for n, v in told.items())
    gpu = PlayedGpu(times, factors=_factors({ONE_VECTOR: 0.9, TWO_ROWS: 0.95}))
    code, out, err = bench(gpu, STEP_FILE.replace("PROBLEM", given), "--rounds", "1")
    assert code == 1
    assert "reads 4580 GB/s, multiplies 790 TFLOP/s; gemma-4-31b, verify 5 tokens, batch 2, context 512" in out
    assert "  wrong_result: out[0] is 2  " in out
    assert all(FOUR not in after.values() for _, after, _ in gpu.looks), "what is wrong alone is tried in no step"
    assert "  kept: 0.9000 +- 0.0001  " in out
    *_, kept, last = out.splitlines()
    assert kept.startswith("kept: add_norm ")
    assert "vecs_per_thread=1" in kept
    assert last.endswith("1.000 ms by default, with what was kept 0.9000 +- 0.0001 of it")
    assert "1 candidates are wrong or failed" in err
    in_step = [m for m in _rows() if m.tags["ab"] == "step"]
    assert {(m.tags["ratio"], m.step_us, m.base_step_us, m.p50_us) for m in in_step} == {
        (0.9, 900.0, 1000.0, 10.0), (0.95, 950.0, 1000.0, 10.0)
    }  # fmt: skip
    with Store.open(None) as store:
        steps = store.steps()
        assert {steps[m.step_id or ""].name for m in in_step} == {"gemma-4-31b: verify batch=2 q_len=5 context=512"}
        key = problem_key(find_kernel("add_norm"), FIRST).static_key
        (winner,) = store.recompute_winners(find_kernel("add_norm"), key, TARGET)
    assert winner.config == fields_of(DEFAULT), "equals alone: the ratios of an A/B decide nothing"


def test_a_step_and_its_problems_by_options(bench: Callable[..., Any], kerngen: Kerngen) -> None:
    step = ("--step", "gemma-4-31b", "--phase", "verify", "--batch", "2", "--tokens", "5", "add_norm")
    out = kerngen.ok("bench", "ab", *step, "--device", "H200", "--dry-run", "--random", "3")
    *problems, whole = out.splitlines()
    assert len(problems) == 2
    assert all(", 60 launches: 4 candidates" in line for line in problems)
    assert whole.startswith("2 problems, 8 candidates, ")
    gpu = PlayedGpu()
    code, out, err = bench(gpu, *step, "--random", "1", "--rounds", "1", "--json")
    assert code == 0, err
    said = json.loads(out)["step"]
    assert (said["ratio"], said["kept"], len(said["looks"])) == (1.0, [], 2)


# -- files, and what cannot be


def test_files_that_are_kept_can_run() -> None:
    """A folder for each board that they were for; of a step's file every problem is launched there."""
    paths = sorted((ROOT / "data" / "ab").glob("*/*.toml"))
    assert {path.parent.name for path in paths} == {"h100", "h200"}
    steps = 0
    for path in paths:
        plan = read_plan(path)
        assert plan.device.lower() == path.parent.name
        assert plan.about
        if path.stem == "recorded":
            continue  # test_ab_plan.py
        target = Target.of(find_device(plan.device))
        assert all(entry.written and entry.candidates(target) for entry in plan.entries)
        if (where := where_of([plan], None, None, AS_STORED, None)) is not None:
            asked = {(e.kernel.name, e.problem) for e in plan.entries}
            apart = ab.apart_for(where.model, where.step, target, asked)
            launched = {p.called for p in ab.places_of(where.model, where.step, target, fused=apart)}
            assert launched | {p.called for p in ab.unasked_places(where.model, where.step, target)} >= asked, path
            steps += 1
    assert steps == 26


@pytest.mark.parametrize(("args", "says"), [
    ((), "what to compare is not clear"),
    (("scale",), "what to compare is not clear"),
    (("scale", "add_norm", "--random", "2"), "what to compare is not clear"),
    ((FILE, "scale"), "FILE.toml says what to compare"),
    ((FILE, "--config", "threads=32"), "FILE.toml says what to compare"),
    (("scale", "--problem", "width=512", "--config", "threads=many"), "threads='many' is not of type int"),
    (("scale", "--problem", "width=512", "--config", "threads=2048"), "at most 1024 a block"),
    (("scale", "--problem", "tokens=3", "--random", "2"), "unknown problem field 'tokens'"),
    (("add_norm", "--case", "nonsense", "--random", "2"), "no bench case of add_norm contains 'nonsense'"),
    (("scale", "--problem", "width=512", "--body", "x.cu"), "scale has 0 bodies 'x.cu'"),
    ((FILE, "--csv", "out"), "--csv records entries that have a name"),
    (("--step", "gemma-4-31b", "--config", "threads=32"), "a file says it in full"),
    (("--step", "gemma-4-31b", "moe_w4a16"), "launches no moe_w4a16"),
    (("--step", "gemma-4-31b", "--context", "300000"), "positions"),
    (("--step", "gemma-4-31b", FILE), "the step does not launch scale"),
    ((FILE, STEP_FILE.replace("{PROBLEM}", '"hidden=5376"')), "the files are timed in different places"),
])  # fmt: skip
def test_what_cannot_be_is_refused(bench: Callable[..., Any], scale: Kernel, args: tuple[str, ...], says: str) -> None:
    code, _, err = bench(PlayedGpu(us, board="V100"), *args)
    assert (code in (1, 2), says in err) == (True, True), err


def test_without_a_gpu_it_says_so(kerngen: Kerngen, scale: Kernel) -> None:
    code, _, err = kerngen("bench", "ab", "scale", "--problem", "width=512", "--random", "2")
    assert (code, "no CUDA device" in err, "Traceback" in err) == (1, True, False), err
