"""The results files that kerngen ships: as they are written, honest about who says so, whole, of today's code."""

from __future__ import annotations

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
from kerngen.errors import UsageError
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
from tools.prebuilt import LEFT_TO_DEFAULTS, PREDICTED

FILES = sorted(PREBUILT.rglob("*.txt"))
BOARDS = shipped_boards()
PREDICTED_ON = [b for b in BOARDS if any(p.name.endswith(PREDICTED) for p in b.files())]
MOST_BYTES = 200_000  # of a board


@cache
def told(path: Path) -> ResultsFile:
    """Parsed, which proves that it is written as results files are."""
    return parse(path.read_text(), str(path))


def test_there_are_files() -> None:
    assert MEASURED, "what an H200 measured is shipped"
    assert PREDICTED_ON, "and what is predicted"
    assert sorted(p.name for p in PREBUILT.iterdir() if not p.is_dir()) == ["README.md"]


def test_no_architecture_is_left_out() -> None:
    assert {b.device.arch for b in PREDICTED_ON} == set(ARCHES)
    names = {"V100", "T4", "A100", "RTX3090", "L4", "RTX4090", "H200", "B200", "RTX5090"}
    assert {b.name for b in PREDICTED_ON} == names


@pytest.mark.parametrize("path", FILES, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_a_file_is_as_it_is_written_and_says_who_says_so(path: Path) -> None:
    """Predicted everywhere, but for what an H200 measured; and each is of the board whose folder it lies in."""
    file, trials = told(path), [t for _, p in told(path).points() for t in p.trials]
    is_predicted = path.name.endswith(PREDICTED)
    assert path.name == file.kernel + (PREDICTED if is_predicted else ".txt")
    assert (file.board, file.arch) == (path.parent.name, find_device(path.parent.name).arch)
    assert trials
    if is_predicted:
        assert [m.name for m in file.models] == [MODEL], "predict it anew: python -m tools.prebuilt"
        assert file.runs == ()
        assert {(t.model, t.won) for t in trials} == {(0, True)}
        assert Target.of(find_device(file.board)).device.num_sms == file.device["num_sms"]
    else:
        assert path.parent.name == "H200", "nobody measured on anything else"
        assert file.models == ()
        assert file.device["source"] == "probed"


@pytest.mark.parametrize("board", BOARDS, ids=lambda b: b.name)
def test_a_board_is_small(board: Any) -> None:
    assert sum(p.stat().st_size for p in board.files() if p.name.endswith(PREDICTED)) < MOST_BYTES


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("board", PREDICTED_ON, ids=lambda b: b.name)
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
        if (board.name, item.kernel) in LEFT_TO_DEFAULTS:
            continue
        if at not in said and find_kernel(item.kernel).why_unsupported(item.problem, target) is None:
            lacking.append(at)
    assert lacking == []


@cache
def _cases(board: str) -> list[tuple[Any, Any, Any, Config]]:
    """(kernel, problem, configuration, the same as its file has it) of each point that is predicted for a board."""
    found = []
    for path in (PREBUILT / board).glob(f"*{PREDICTED}"):
        file = told(path)
        kernel, of = find_kernel(file.kernel), canonical_fields_of(file.kernel)
        for problem, point in file.points():
            (trial,) = point.trials
            config = problem.configs[trial.config]
            asked = kernel.problem_type(**filled(file.fields(problem, point), of.fields))
            found.append((kernel, asked, kernel.config_type(**filled(config.fields, of.config)), config))
    return found


@pytest.mark.parametrize("board", [b.name for b in PREDICTED_ON])
def test_each_configuration_is_valid_and_fits(board: str) -> None:
    target = Target.of(find_device(board))
    for kernel, problem, config, _ in _cases(board):
        assert kernel.why_invalid(problem, config, target) is None, (kernel.name, problem, config)
        for launch in kernel.launches(problem, config, target):
            assert launch.smem_bytes <= target.arch.max_smem_bytes


@pytest.mark.parametrize("board", [b.name for b in PREDICTED_ON])
def test_what_is_predicted_holds_today(board: str) -> None:
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
    board = min((b.name for b in PREDICTED_ON), key=lambda name: ARCHES[find_device(name).arch].cc)
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
def test_what_was_measured_wins_over_what_is_predicted_beside_it(tmp_path: Path, name: str) -> None:
    """On the H200, of kernels that have both files; and it is served where it was measured."""
    measured, predicted = told(PREBUILT / "H200" / f"{name}.txt"), told(PREBUILT / "H200" / f"{name}{PREDICTED}")
    kernel, fields = find_kernel(name), canonical_fields_of(name).fields
    with Store.open(tmp_path / "both.db") as store:
        done = build([measured, predicted], store, None)
        assert (done.faults, done.stale) == ([], []), "and that the text says otherwise is no fault of it"
        winners = store.winners(name)
        for at in measured.points():
            problem = kernel.problem_type(**filled(measured.fields(*at), fields))
            found = lookup([store], kernel, problem, Target.of(find_device("H200")))
            assert found is not None
            assert (found.provenance, found.stale, found.closure) == ("measured", False, source_digest_of(kernel))
    assert sum(w.provenance == "measured" for w in winners) == len(list(measured.points())) > 0
    assert len(list(predicted.points())) > sum(w.provenance == "predicted" for w in winners) > 0
