"""The sheets that kerngen is shipped with: as they are written, honest about who says so, whole, of today's code."""

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
from kerngen.tuning_db.dist import prediction_file, results_file
from kerngen.tuning_db.dist.prediction_file import PredictionFile
from kerngen.tuning_db.dist.results_file import ResultsFile
from kerngen.tuning_db.dist.results_folder import as_sheet, build, parse
from kerngen.tuning_db.read.boards import shipped_boards
from kerngen.tuning_db.read.canonical_fields import canonical_fields_of
from kerngen.tuning_db.read.freshness import source_sha
from kerngen.tuning_db.read.places import PREBUILT
from kerngen.workload.workload import MODELS, find_workload
from tools.prebuilt import LEFT_TO_DEFAULTS, PREDICTED

SHEETS = sorted(PREBUILT.rglob("*.txt"))
BOARDS = shipped_boards()
FORETOLD = [b for b in BOARDS if any(p.name.endswith(PREDICTED) for p in b.sheets())]
MOST_BYTES = 200_000  # of a board


@cache
def told(path: Path) -> ResultsFile | PredictionFile:
    return parse(path.read_text(), str(path))


def test_there_are_sheets() -> None:
    assert MEASURED, "what an H200 measured is shipped"
    assert FORETOLD, "and what is predicted"
    assert sorted(p.name for p in PREBUILT.iterdir() if not p.is_dir()) == ["README.md"]


def test_no_architecture_is_left_out() -> None:
    assert {b.device.arch for b in FORETOLD} == set(ARCHES)
    assert {b.name for b in FORETOLD} == {"V100", "T4", "A100", "RTX3090", "L4", "RTX4090", "H200", "B200", "RTX5090"}


@pytest.mark.parametrize("path", SHEETS, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_a_sheet_is_as_it_is_written_and_says_who_says_so(path: Path) -> None:
    """Predicted everywhere, but for what an H200 measured; and each is of the board whose folder it lies in."""
    sheet = told(path)
    assert path.name == sheet.kernel + (PREDICTED if isinstance(sheet, PredictionFile) else ".txt")
    assert (sheet.board, sheet.arch) == (path.parent.name, find_device(path.parent.name).arch)
    if isinstance(sheet, PredictionFile):
        assert prediction_file.dump(sheet) == path.read_text()
        assert "measured" not in path.read_text()
        assert sheet.model == MODEL, "predict it anew: python -m tools.prebuilt"
        assert Target.of(find_device(sheet.board)).device.num_sms == sheet.device["num_sms"]
    else:
        assert results_file.dump(sheet) == path.read_text()
        assert path.parent.name == "H200", "nobody measured on anything else"
        trials = [t for c in sheet.cells for p in c.points for t in p.trials]
        assert trials
        assert all(t.run is not None for t in trials)
        assert sheet.device["source"] == "probed"


@pytest.mark.parametrize("board", BOARDS, ids=lambda b: b.name)
def test_a_board_is_small(board: Any) -> None:
    assert sum(p.stat().st_size for p in board.sheets() if p.name.endswith(PREDICTED)) < MOST_BYTES


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("board", FORETOLD, ids=lambda b: b.name)
def test_each_problem_of_each_model_has_an_answer(board: Any, model: str) -> None:
    """Every tuned point of its workload is in a sheet, but what no configuration of a kernel can run."""
    said = set()
    for path in board.sheets():
        sheet = as_sheet(told(path))
        for cell in sheet.cells:
            said |= {(sheet.kernel, repr(sorted(cell.static.items())), repr(sorted(cell.runtime.items())), p.dynamic)
                     for p in cell.points if any(t.won for t in p.trials)}  # fmt: skip
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
def _cases(board: str) -> list[tuple[Any, Any, Any, str]]:
    """(kernel, problem, configuration, source's digest) of each point of a board's outlooks."""
    found = []
    for path in (PREBUILT / board).glob(f"*{PREDICTED}"):
        sheet = as_sheet(told(path))
        kernel, of = find_kernel(sheet.kernel), canonical_fields_of(sheet.kernel)
        for cell in sheet.cells:
            for point in cell.points:
                stated = {**cell.static, **cell.runtime, sheet.dynamic: point.dynamic}
                problem = kernel.problem_type(**filled(point.fields or stated, of.fields))
                (trial,) = point.trials
                found.append((kernel, problem, kernel.config_type(**filled(trial.config, of.config)), trial.source))
    return found


@pytest.mark.parametrize("board", [b.name for b in FORETOLD])
def test_each_configuration_is_valid_and_fits(board: str) -> None:
    target = Target.of(find_device(board))
    for kernel, problem, config, _ in _cases(board):
        assert kernel.why_invalid(problem, config, target) is None, (kernel.name, problem, config)
        for launch in kernel.launches(problem, config, target):
            assert launch.smem_bytes <= target.arch.max_smem_bytes


@pytest.mark.parametrize("board", [b.name for b in FORETOLD])
def test_what_is_predicted_is_of_the_sources_of_today(board: str) -> None:
    """Else run `python -m tools.prebuilt` for it: its winners would be left out."""
    arch, known = find_arch(find_device(board).arch), {}
    for kernel, problem, config, digest in _cases(board):
        what = kernel.name, problem_key(kernel, problem).static_key, config
        if what not in known:
            known[what] = source_sha(source_of(kernel, problem, config, arch))
        assert known[what].startswith(digest), (kernel.name, problem, config)


def test_a_sample_compiles_to_what_fits(tmp_path: Path) -> None:
    board = min((b.name for b in FORETOLD), key=lambda name: ARCHES[find_device(name).arch].cc)
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


def test_what_was_measured_wins_over_what_is_predicted(tmp_path: Path) -> None:
    """On the H200, of a kernel that has both sheets; and it is served where it was measured."""
    paths = list((PREBUILT / "H200").glob("gelu_gate*.txt"))
    target = Target.of(find_device("H200"))
    kernel = find_kernel("gelu_gate")
    with Store.open(tmp_path / "h200.db") as store:
        done = build([told(p) for p in paths], store, None)
        assert (done.faults, done.stale) == ([], [])
        sheet = as_sheet(told(PREBUILT / "H200" / "gelu_gate.txt"))
        for point in sheet.cells[0].points:
            problem = kernel.problem_type(**sheet.cells[0].static, num_tokens=point.dynamic)
            found = lookup([store], kernel, problem, target)
            assert found is not None
            assert (found.provenance, found.stale, found.closure) == ("measured", False, source_digest_of(kernel))


@pytest.mark.parametrize("through", ["the path", "a link"])
def test_nothing_is_written_to_where_the_sheets_lie(through: str, tmp_path: Path) -> None:
    place = PREBUILT / "new.sqlite"
    if through == "a link":
        (tmp_path / "mine").symlink_to(PREBUILT)
        place = tmp_path / "mine" / "new.sqlite"
    with pytest.raises(UsageError, match="shipped with kerngen") as caught:
        Store.open(place)
    assert "--db FILE" in str(caught.value)
    assert not place.exists()


@pytest.mark.parametrize("kernel", ["rmsnorm", "gelu_gate"])
def test_what_was_measured_wins_over_what_is_predicted_beside_it(tmp_path: Path, kernel: str) -> None:
    measured, foretold = told(PREBUILT / "H200" / f"{kernel}.txt"), told(PREBUILT / "H200" / f"{kernel}{PREDICTED}")
    with Store.open(tmp_path / "both.db") as store:
        done = build([measured, foretold], store, None)
        assert done.faults == [], "and that the text says otherwise is no fault of it"
        winners = store.winners(kernel)
    points = {name: sum(len(c.points) for c in as_sheet(sheet).cells)
              for name, sheet in (("measured", measured), ("predicted", foretold))}  # fmt: skip
    assert sum(w.provenance == "measured" for w in winners) == points["measured"] > 0
    assert points["predicted"] > sum(w.provenance == "predicted" for w in winners) > 0
