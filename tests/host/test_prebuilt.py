"""The results files that kerngen ships: as they are written, honest about who says so, whole, of today's code."""

from __future__ import annotations

import shutil
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from sheets import MEASURED

from kerngen.arch import ARCHES, Target, find_arch, find_device
from kerngen.compiler.cache import CachedCompiler, CompileCache
from kerngen.compiler.compile import elf_resources
from kerngen.compiler.render import source_of
from kerngen.compiler.source_digest import source_digest_of
from kerngen.cost.predict import MODEL
from kerngen.errors import KerngenError, UsageError
from kerngen.templates import find_kernel
from kerngen.templates.kernel import filled
from kerngen.tuning_db import Store, lookup, problem_key
from kerngen.tuning_db.dist.results_file import Config, ResultsFile
from kerngen.tuning_db.dist.results_folder import build
from kerngen.tuning_db.dist.results_parser import parse
from kerngen.tuning_db.read.boards import shipped_boards
from kerngen.tuning_db.read.canonical_fields import canonical_fields_of
from kerngen.tuning_db.read.freshness import source_sha
from kerngen.tuning_db.read.places import PREBUILT
from kerngen.workload.workload import MODELS, find_workload
from tools.prebuilt import CARRIED, PREDICTED, known_points, predict, write_carried

FILES = sorted(PREBUILT.rglob("*.txt"))
BOARDS = shipped_boards()
PREDICTED_ON = [b.name for b in BOARDS if any(p.name.endswith(PREDICTED) for p in b.files())]
CARRIED_ON = [b.name for b in BOARDS if any(p.name.endswith(CARRIED) for p in b.files())]
LATER = {  # what carried rows of the H200 were chosen by since
    "steps beside DFlash on an H200, by bench ab: data/experiments/steps.toml",
    "timed alone on an H200, by bench ab: data/experiments/moe_w4a16.toml",
    "steps of the 31B in Q4_K_M and Q8_0 on an H200: data/experiments/w4a16_gemm.toml",
}
MOST_BYTES = 300_000  # of a board, without what was measured


@cache
def told(path: Path) -> ResultsFile:
    """Parsed, which proves that it is written as results files are."""
    return parse(path.read_text(), str(path))


def test_there_are_files() -> None:
    assert MEASURED, "what an H200 measured is shipped"
    assert PREDICTED_ON, "and what is predicted"
    assert sorted(p.name for p in PREBUILT.iterdir() if not p.is_dir()) == ["README.md"]


def test_no_architecture_is_left_out() -> None:
    assert {b.device.arch for b in BOARDS} == set(ARCHES)
    everywhere = {"V100", "T4", "A100", "RTX3090", "L4", "RTX4090", "B200", "RTX5090"}
    assert set(PREDICTED_ON) == everywhere | {"H100"}
    (late,) = (PREBUILT / "H100").glob(f"*{PREDICTED}")
    assert {p.dynamic for _, p in told(late).points()} == {2, 4}, (
        "experts, of a body that is younger than what is carried"
    )
    assert set(CARRIED_ON) == {"H100", "H200"}, "on which steps and sweeps were run"


@pytest.mark.parametrize("path", FILES, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_a_file_is_as_it_is_written_and_says_who_says_so(path: Path) -> None:
    """Predicted, but for what an H200 measured and what is carried; each is of the board whose folder it lies in."""
    file, trials = told(path), [t for _, p in told(path).points() for t in p.trials]
    suffix = next((s for s in (CARRIED, PREDICTED) if path.name.endswith(s)), ".txt")
    assert path.name == file.kernel + suffix
    assert (file.board, file.arch) == (path.parent.name, find_device(path.parent.name).arch)
    assert trials
    if suffix == ".txt":
        assert path.parent.name == "H200", "nobody measured on anything else"
        assert (file.models, file.carried) == ((), ())
        assert file.device["source"] == "probed"
        return
    assert file.runs == ()
    assert Target.of(find_device(file.board)).device.num_sms == file.device["num_sms"]
    if suffix == PREDICTED:
        assert [m.name for m in file.models] == [MODEL], "predict it anew: python -m tools.prebuilt"
        assert file.carried == ()
        assert {(t.model, t.won) for t in trials} == {(0, True)}
    else:
        assert file.models == ()
        first, *later = file.carried
        assert {(t.us, t.won) for t in trials} == {(None, True)}
        assert {t.carried for t in trials} == set(range(1 + len(later)))
        assert f"by steps and sweeps on an {file.board}: docs/experiments.md" in first
        assert set(later) <= (LATER if file.board == "H200" else set())


@pytest.mark.parametrize("board", BOARDS, ids=lambda b: b.name)
def test_a_board_is_small(board: Any) -> None:
    assert sum(p.stat().st_size for p in board.files() if p.name.endswith((CARRIED, PREDICTED))) < MOST_BYTES


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("board", BOARDS, ids=lambda b: b.name)
def test_each_problem_of_each_model_has_an_answer(board: Any, model: str) -> None:
    """Every tuned point of its workload is in a file, but what no configuration of a kernel can run."""
    said = set()
    for path in board.files():
        file = told(path)
        said |= {(file.kernel, repr(sorted(of.static.items())), repr(sorted(p.runtime.items())), p.dynamic)
                 for of, p in file.points() if any(t.won for t in p.trials)}  # fmt: skip
    target, lacking = Target.of(find_device(board.name)), []
    for item in find_workload(model, target.arch).items:
        key = problem_key(find_kernel(item.kernel), item.problem).filed()
        at = (item.kernel, repr(sorted(key.static.items())), repr(sorted(key.runtime.items())), key.dynamic)
        if at not in said and find_kernel(item.kernel).why_unsupported(item.problem, target) is None:
            lacking.append(at)
    assert lacking == []


@cache
def _cases(board: str) -> list[tuple[Any, Any, Any, Config]]:
    """(kernel, problem, configuration, the same as its file has it) of each point that is predicted for a board, or
    carried of it.
    """
    found = []
    for path in (p for s in (CARRIED, PREDICTED) for p in (PREBUILT / board).glob(f"*{s}")):
        file = told(path)
        kernel, of = find_kernel(file.kernel), canonical_fields_of(file.kernel)
        for problem, point in file.points():
            (trial,) = point.trials
            config = problem.configs[trial.config]
            asked = kernel.problem_type(**filled(file.fields(problem, point), of.fields))
            found.append((kernel, asked, kernel.config_type(**filled(config.fields, of.config)), config))
    return found


@pytest.mark.parametrize("board", [*PREDICTED_ON, *CARRIED_ON])
def test_each_configuration_is_valid_and_fits(board: str) -> None:
    target = Target.of(find_device(board))
    for kernel, problem, config, _ in _cases(board):
        assert kernel.why_invalid(problem, config, target) is None, (kernel.name, problem, config)
        for launch in kernel.launches(problem, config, target):
            assert launch.smem_bytes <= target.arch.max_smem_bytes


@pytest.mark.parametrize("board", [*PREDICTED_ON, *CARRIED_ON])
def test_what_is_predicted_or_carried_holds_today(board: str) -> None:
    """It is of today's sources, or of the revision that a body has today. Else `python -m tools.prebuilt` makes it new:
    its winners would be left out.
    """
    arch, known = find_arch(find_device(board).arch), {}
    for kernel, problem, config, told in _cases(board):
        what = kernel.name, problem_key(kernel, problem).static_key, config
        if what not in known:
            known[what] = source_sha(source_of(kernel, problem, config, arch))
        holds = known[what].startswith(told.source) or kernel.body(config, arch).revision == told.revision
        assert holds, (kernel.name, problem, config)


def test_a_sample_compiles_to_what_fits(tmp_path: Path) -> None:
    board = min(PREDICTED_ON, key=lambda name: ARCHES[find_device(name).arch].cc)
    arch = find_arch(find_device(board).arch)
    by_kernel = {kernel.name: (kernel, problem, config) for kernel, problem, config, _ in _cases(board)}
    limit = arch.max_smem_bytes + arch.reserved_smem_bytes
    with CachedCompiler(1, CompileCache()) as compiler:
        for name in ("add_norm", "gelu_gate", "rmsnorm"):
            kernel, problem, config = by_kernel[name]
            made = compiler.submit(source_of(kernel, problem, config, arch), arch).result()
            for entry, (registers, smem) in elf_resources(made.image).items():
                assert 0 < registers <= 255, entry
                assert smem <= limit, entry


@pytest.mark.parametrize("through", ["the path", "a link"])
def test_nothing_is_written_to_where_the_files_lie(through: str, tmp_path: Path) -> None:
    place = PREBUILT / "new.sqlite"
    if through == "a link":
        (tmp_path / "mine").symlink_to(PREBUILT)
        place = tmp_path / "mine" / "new.sqlite"
    with pytest.raises(UsageError, match="shipped with kerngen") as caught:
        Store.open(place)
    assert "--db FILE" in str(caught.value)
    assert not place.exists()


@pytest.mark.parametrize("name", ["rmsnorm", "gelu_gate"])
def test_what_was_measured_wins_over_what_is_carried_beside_it(tmp_path: Path, name: str) -> None:
    """On the H200, of kernels that have both files; each is served where it was chosen."""
    paths = {"measured": PREBUILT / "H200" / f"{name}.txt", "carried": PREBUILT / "H200" / f"{name}{CARRIED}"}
    kernel, fields = find_kernel(name), canonical_fields_of(name).fields
    with Store.open(tmp_path / "both.db") as store:
        done = build([told(path) for path in paths.values()], store, None)
        assert (done.faults, done.stale) == ([], [])
        for provenance, path in paths.items():
            file = told(path)
            for problem, point in file.points():
                asked = kernel.problem_type(**filled(file.fields(problem, point), fields))
                found = lookup([store], kernel, asked, Target.of(find_device("H200")))
                assert found is not None
                assert (found.stale, found.closure) == (False, source_digest_of(kernel))
                config = next(problem.configs[t.config] for t in point.trials if t.won)
                if found.provenance == provenance:
                    assert found.config == filled(config.fields, canonical_fields_of(name).config)
                else:
                    assert (found.provenance, provenance) == ("measured", "carried"), "between two measured points"
        counts = Counter(w.provenance for w in store.winners(name))
    assert counts == {how: len(list(told(path).points())) for how, path in paths.items()}


# ---- tools.prebuilt --carried


def _row(num_tokens: int, threads: int, **fields: Any) -> dict[str, Any]:
    return {
        "kernel": "gelu_gate",
        "problem": {"width": 64, "num_tokens": num_tokens},
        "config": {"threads": threads},
    } | fields


def test_carried_rows_are_written_but_for_what_was_measured(tmp_path: Path) -> None:
    """In place of the files of before; and what they hold is no longer predicted."""
    target, place = Target.of(find_device("H200")), tmp_path / "H200"
    shutil.copytree(PREBUILT / "H200", place)
    before = told(place / "gelu_gate.txt")
    measured = _row(8, 64, problem=before.fields(*next(before.points())))
    sizes = write_carried([_row(8, 64), _row(8, 64), _row(16, 128), measured], "steps", target, tmp_path)
    assert sorted(place.glob(f"*{CARRIED}")) == list(sizes) == [place / f"gelu_gate{CARRIED}"]
    file = told(place / f"gelu_gate{CARRIED}")
    assert file.carried == ("steps",)
    assert [(p.dynamic, of.configs[p.trials[0].config].fields) for of, p in file.points()] == [
        (8, {"threads": 64}), (16, {})]  # fmt: skip
    kernel = find_kernel("gelu_gate")
    keys = [problem_key(kernel, kernel.problem_type(width=64, num_tokens=n)).id for n in (8, 16, 32)]
    assert [key in known_points(place) for key in keys] == [True, True, False]
    write_carried([_row(8, 128), _row(8, 64, kernel="rmsnorm")], "more steps", target, tmp_path, ["gelu_gate"])
    assert parse((place / f"gelu_gate{CARRIED}").read_text()).carried == ("more steps",)
    write_carried([_row(16, 64), _row(32, 64)], "later steps", target, tmp_path, keeps=True)
    file = parse((place / f"gelu_gate{CARRIED}").read_text())
    now = {p.dynamic: (of.configs[p.trials[0].config].fields, p.trials[0].carried) for of, p in file.points()}
    assert file.carried == ("later steps", "more steps")
    assert now == {8: ({}, 1), 16: ({"threads": 64}, 0), 32: ({"threads": 64}, 0)}
    with pytest.raises(UsageError, match="nothing of that is carried"):
        write_carried([_row(16, 128)], "steps of others", target, tmp_path, ["rmsnorm"], keeps=True)
    assert parse((place / f"gelu_gate{CARRIED}").read_text()) == file
    with Store.open(tmp_path / "none.db") as store, pytest.raises(UsageError, match="nothing is left to predict"):
        predict(target, ["gemma-4-e2b"], store, known=known_points(PREBUILT / "H200"))


@pytest.mark.parametrize(("rows", "why"), [
    ([{"kernel": "attn_decode", "problem": {}, "config": {"num_stages": 99}}], "shared memory"),
    ([_row(8, 64, config={"no_such": 1})], "cannot be carried"),
    ([_row(8, 64, kernel="no_such")], "cannot be carried"),
    ([{"kernel": "gelu_gate"}], "cannot be carried"),
    ([_row(8, 64), _row(8, 128)], "are of one tuned point"),
])  # fmt: skip
def test_a_row_that_cannot_be_carried_is_named(tmp_path: Path, rows: list[dict[str, Any]], why: str) -> None:
    with pytest.raises(KerngenError, match=why):
        write_carried(rows, "steps", Target.of(find_device("H200")), tmp_path)
    assert list(tmp_path.iterdir()) == []
