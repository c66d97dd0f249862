"""Every row that was measured before sources were filed without their comments is shipped still, and answers.

measured_0_1.zip holds the measured text of tuning_db/prebuilt as it was until then, with digests of whole texts. What
was measured anew since may have another winner; of eight problems of dense_gemv, whose winners were judged in steps of
bodies that are gone, only the new rows are shipped.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sheets import MEASURED

from kerngen.arch import Target, find_device
from kerngen.templates import find_kernel
from kerngen.templates.kernel import filled
from kerngen.tuning_db import Store, lookup
from kerngen.tuning_db.dist.fields_text import rounded
from kerngen.tuning_db.dist.former_results import parse_any
from kerngen.tuning_db.dist.results_file import ResultsFile
from kerngen.tuning_db.dist.results_folder import build, read
from kerngen.tuning_db.read.canonical_fields import canonical_fields_of, named_kernel
from kerngen.tuning_db.read.ids import canonical

H200 = Target.of(find_device("H200"))
ANEW = "2026-11-28"  # and later
BEFORE = Path(__file__).with_name("measured_0_1.zip")


def _files() -> Iterator[ResultsFile]:
    with zipfile.ZipFile(BEFORE) as file:
        for name in file.namelist():
            yield parse_any(file.read(name).decode(), name)


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with Store.open(tmp_path_factory.mktemp("shipped") / "h200.db") as store:
        done = build(read(MEASURED), store, None)
        assert (done.stale, done.faults) == ([], [])
        yield store


def _row(kernel: str, fields: Any, config: Any, outcome: str, stage: str, us: float | None) -> str:
    of = canonical_fields_of(kernel)
    return canonical([named_kernel(kernel), filled(fields, of.fields), filled(config, of.config), outcome, stage, us])


def _measured_anew(shipped: Store) -> set[str]:
    """The problems, as `_row` begins with them."""
    observed = (o.measurement for o in shipped.measurements(provenance="measured"))
    return {_problem(m.problem.kernel, m.problem.fields) for m in observed if m.at >= ANEW}


def _problem(kernel: str, fields: Any) -> str:
    return canonical([named_kernel(kernel), filled(fields, canonical_fields_of(kernel).fields)])


def test_every_measured_row_is_found(shipped: Store) -> None:
    now = set()
    for o in shipped.measurements(provenance="measured"):
        m = o.measurement
        now.add(_row(m.problem.kernel, m.problem.fields, m.config, m.outcome, m.stage, m.p50_us and rounded(m.p50_us)))
    rows = [
        _row(file.kernel, file.fields(problem, point), problem.configs[t.config].fields,
             "ok" if t.us is not None else "wrong_result", t.stage, t.us)
        for file in _files() for problem, point in file.points() for t in point.trials
    ]  # fmt: skip
    assert len(rows) > 500
    lost = [row for row in rows if row not in now]
    anew = _measured_anew(shipped)
    gone = {canonical(json.loads(row)[:2]) for row in lost}
    assert gone <= anew
    assert len(gone) <= 8


def test_every_measured_winner_answers(shipped: Store) -> None:
    count, anew = 0, _measured_anew(shipped)
    for file in _files():
        kernel, of = find_kernel(named_kernel(file.kernel)), canonical_fields_of(file.kernel)
        for problem, point in file.points():
            fields = file.fields(problem, point)
            found = lookup([shipped], kernel, kernel.problem_type(**filled(fields, of.fields)), H200)
            assert found is not None, (file.kernel, fields)
            assert (found.provenance, found.stale) == ("measured", False), (file.kernel, fields)
            if _problem(file.kernel, fields) not in anew:
                won = next(problem.configs[t.config] for t in point.trials if t.won)
                assert found.config == filled(won.fields, of.config), (file.kernel, fields)
            count += 1
    assert count > 100
