"""What is renamed keeps what was tuned: a field of a problem, of a configuration or of a board, and a kernel."""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sheets import MEASURED
from test_tuning_db import measured
from test_tuning_db_winners import build as build_of

from kerngen import templates
from kerngen.arch import Target, find_device
from kerngen.boards import Device
from kerngen.errors import UnknownName
from kerngen.templates import TEMPLATES_VARIABLE, find_kernel, rescan
from kerngen.templates.kernel import Kernel, defaults_of, filled, parse_fields, trimmed
from kerngen.tuning_db import Observation, Store, Winner, lookup, problem_key
from kerngen.tuning_db.dist.export import Selection
from kerngen.tuning_db.dist.results_folder import build, dump, results_of
from kerngen.tuning_db.dist.results_parser import parse
from kerngen.tuning_db.read import canonical_fields
from kerngen.tuning_db.read.canonical_fields import device_from, filed_device, filed_kernel, named_kernel
from kerngen.tuning_db.read.places import PREBUILT
from kerngen.tuning_db.read.reader import Reader
from kerngen.tuning_db.store.winners import choose

H200 = Target.of(find_device("H200"))
MEASURED_SHEET = next(p for p in MEASURED if p.stem == "gelu_gate")
CARRIED_SHEET = PREBUILT / "H200" / "gelu_gate.carried.txt"


RENAMES = {"num_tokens": "rows", "width": "num_columns", "threads": "work_group_size"}


@pytest.fixture
def renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    """gelu_gate as `gated_gelu` and in its place, with two fields of Problem and one of Config renamed."""
    folder = tmp_path / "root" / "gated_gelu"
    shutil.copytree(find_kernel("gelu_gate").folder, folder)
    spec = (folder / "spec.py").read_text()
    for old, new in RENAMES.items():
        spec = re.sub(rf"\b{old}\b", new, spec)
        field = rf'\1field(default=\2, metadata={{"filed": "{old}"}})'
        spec, count = re.subn(rf"^(    {new}: int = )(\d+)", field, spec, flags=re.MULTILINE)
        assert count == 1
        for path in folder.glob("*.jinja"):
            path.write_text(re.sub(rf"\b([pc])\.{old}\b", rf"\1.{new}", path.read_text()))
    spec = spec.replace("import dataclass\n", "import dataclass, field\n", 1)
    own = '    RUNTIME, DYNAMIC = ("rows",), "rows"\n\n    def __post_init__'  # in place of those of TokenProblem
    spec = spec.replace("    def __post_init__", own, 1)
    (folder / "spec.py").write_text(f'{spec}\nFILED = "gelu_gate"\n')
    with monkeypatch.context() as m:
        m.setenv(TEMPLATES_VARIABLE, str(folder.parent))
        rescan()
        kernel = find_kernel("gated_gelu")
        m.delitem(templates._library().folders, "gelu_gate")
        yield kernel
    rescan()


def _store(paths: list[Path], where: Path) -> Store:
    store = Store.open(where)
    done = build([parse(p.read_text(), str(p)) for p in paths], store, None)
    assert (done.stale, done.faults) == ([], [])
    return store


def test_the_shipped_winners_of_a_renamed_kernel_are_found(renamed: Kernel, tmp_path: Path) -> None:
    """From sheets that were written under the old names; and what is written of it is what the old one wrote."""
    with pytest.raises(UnknownName):
        find_kernel("gelu_gate")
    assert (filed_kernel("gated_gelu"), named_kernel("gelu_gate")) == ("gelu_gate", "gated_gelu")
    with _store([MEASURED_SHEET, CARRIED_SHEET], tmp_path / "new.db") as store:
        winners = store.winners("gated_gelu")
        assert {w.kernel for w in winners} == {w.problem.kernel for w in winners} == {"gated_gelu"}
        assert {w.provenance for w in winners} == {"measured", "carried"}
        for w in winners:
            assert set(w.config) == {"work_group_size", "vecs_per_thread"}
            problem = renamed.problem_type(**w.problem.fields)
            for found in (lookup([store], renamed, problem, H200), _by_reader(tmp_path / "new.db", renamed, problem)):
                assert (found.config, found.stale, found.latency_us) == (w.config, False, w.latency_us)
        sheet = parse(MEASURED_SHEET.read_text(), "sheet")
        (told,) = dump([store], Selection(provenances=["measured"])).items()
        assert told[0] == "H200/gelu_gate.txt"
        assert parse(told[1], "again") == sheet
        (carried,) = results_of([store], Selection(provenances=["carried"]), rivals=False)
        assert carried == parse(CARRIED_SHEET.read_text())


def _by_reader(path: Path, kernel: Kernel, problem: Any) -> Winner | None:
    reader = Reader.open(path)
    assert reader is not None
    with reader:
        assert reader.winners(kernel.name)
        return lookup([reader], kernel, problem, H200)


def test_ids_are_those_of_before(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    with _store([MEASURED_SHEET], tmp_path / "old.db") as store:
        before = _ids(store)
    renamed: Kernel = request.getfixturevalue("renamed")
    with _store([MEASURED_SHEET], tmp_path / "new.db") as store:
        assert _ids(store) == before
    with Store.open(tmp_path / "old.db") as store:  # a database that was written under the old name
        winners = store.winners("gated_gelu")
        assert winners
        found = lookup([store], renamed, renamed.problem_type(**winners[0].problem.fields), H200)
        assert not found.stale
        key = problem_key(renamed, renamed.problem_type(**winners[0].problem.fields))
        assert store.recompute_winners(renamed, key.static_key, H200)


def test_a_tie_is_broken_by_the_names_that_are_filed(request: pytest.FixtureRequest) -> None:
    """`work_group_size` comes after `vecs_per_thread` in the alphabet, and `threads` before it: the winner stays."""
    pairs = [(128, 4), (256, 2)]
    before = _winner_of_tie("gelu_gate", [{"threads": t, "vecs_per_thread": v} for t, v in pairs])
    kernel: Kernel = request.getfixturevalue("renamed")
    now = _winner_of_tie(kernel.name, [{"work_group_size": t, "vecs_per_thread": v} for t, v in pairs])
    assert (before["threads"], before["vecs_per_thread"]) == (now["work_group_size"], now["vecs_per_thread"])


def _winner_of_tie(kernel: str, configs: list[dict[str, int]]) -> dict[str, Any]:
    """The winner where each was measured to take the same."""
    builds, rows = {}, []
    for n, config in enumerate(configs):
        id = f"b{n}"
        builds[id] = replace(build_of(n), kernel=kernel, config=config)
        rows.append(Observation(f"m{n}", replace(measured(id, n, 10.0), config=config)))
    choice = choose(rows, builds)
    assert choice is not None
    assert choice.why["within_noise"] == len(configs)
    return builds[choice.build_id].config


def _ids(store: Store) -> list[tuple[str, str, str]]:
    return sorted((w.problem.id, w.build_id, w.problem.static_key) for w in store.winners())


def test_a_field_of_a_board_may_be_renamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sheets that are shipped are read, and what is filed of a board is what was."""
    fields: list[Any] = [(f.name, f.type) for f in dataclasses.fields(Device)]
    at = next(i for i, f in enumerate(fields) if f[0] == "l2_bytes")
    fields[at] = ("l2_cache_bytes", int, dataclasses.field(metadata={"filed": "l2_bytes"}))
    newer = dataclasses.make_dataclass("Device", fields, frozen=True)
    stated = parse(MEASURED_SHEET.read_text(), "sheet").device
    before = device_from(stated)
    monkeypatch.setattr(canonical_fields, "Device", newer)
    monkeypatch.setattr(canonical_fields, "_DEVICE", canonical_fields._filed_names(newer))
    now: Any = device_from(stated)
    assert (now.name, now.l2_cache_bytes) == (before.name, before.l2_bytes)
    assert filed_device(now) == stated


# ---- the two functions


@dataclasses.dataclass(frozen=True)
class Renamed:
    new: int = dataclasses.field(default=1, metadata={"filed": "old"})
    same: int = 2


def test_fields_are_filed_under_their_old_names_and_read_from_them() -> None:
    defaults = defaults_of(Renamed)
    assert trimmed({"new": 5, "same": 2}, defaults) == {"old": 5}
    assert trimmed({"new": 1, "same": 3}, defaults) == {"same": 3}
    assert filled({"old": 5}, defaults) == {"new": 5, "same": 2}
    assert filled({}, defaults) == {"new": 1, "same": 2}
    assert trimmed(trimmed({"new": 5, "same": 3}, defaults), defaults) == {"old": 5, "same": 3}


def test_a_command_may_name_either() -> None:
    assert parse_fields(Renamed, "old=7") == parse_fields(Renamed, "new=7") == Renamed(7)
