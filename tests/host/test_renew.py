"""Sheets of predictions whose kernels were rewritten: the same winners, of today's sources and times; else a search."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from kerngen.arch import Target, find_device
from kerngen.compiler.cache import CachedCompiler
from kerngen.cost.predict import MODEL
from kerngen.errors import DatabaseError, UsageError
from kerngen.tuning_db.read.places import PREBUILT
from tools.prebuilt import main, renew
from tools.renew import renewed

V100 = Target.of(find_device("V100"))
SHEET = PREBUILT / "V100" / "rmsnorm.predicted.txt"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "V100").mkdir()
    (tmp_path / "V100" / SHEET.name).write_text(SHEET.read_text())
    return tmp_path


def test_what_is_of_today_is_left_alone(folder: Path) -> None:
    assert renew(V100, folder) == {}
    assert (folder / "V100" / SHEET.name).read_text() == SHEET.read_text()


def test_another_source_is_built_and_timed_anew(folder: Path) -> None:
    """With nothing else changed the sheet becomes what it was, to the letter: sources, times and winners."""
    path = folder / "V100" / SHEET.name
    first = re.search(r"@([0-9a-f]{12})", SHEET.read_text())
    old = SHEET.read_text().replace(first[0], "@000000000000")
    path.write_text(re.sub(r"=[0-9.]+a\b", "=12.5a", old))
    assert path.read_text() != SHEET.read_text()
    assert renew(V100, folder) == {path: 1}
    told, meant = path.read_text(), SHEET.read_text()
    assert told.count(first[0]) == 1
    assert told.splitlines()[:6] == meant.splitlines()[:6]
    family = meant.split("\n\n")[1]
    assert family in told, "the family of that plan is as it was"


def test_what_takes_a_new_search_says_so(folder: Path) -> None:
    path = folder / "V100" / SHEET.name
    with CachedCompiler(1) as compiler:
        path.write_text(SHEET.read_text().replace(MODEL, "roofline-0"))
        with pytest.raises(DatabaseError, match=f"roofline-0.*{MODEL}") as caught:
            renewed(path, V100, compiler)
        assert caught.value.hint == "python -m tools.prebuilt --device V100"
        old = re.sub(r"@[0-9a-f]{12}", "@000000000000", SHEET.read_text(), count=1)
        path.write_text(re.sub(r"nvrtc [0-9.]+", "nvrtc 11.8", old))
        with pytest.raises(DatabaseError, match=r"NVRTC 11\.8"):
            renewed(path, V100, compiler)
        path.write_text(SHEET.read_text().replace('"num_sms":80', '"num_sms":81'))
        with pytest.raises(DatabaseError, match=r"V100.*figures"):
            renewed(path, V100, compiler)


def test_what_a_renewal_does_not_heed_is_refused() -> None:
    done = CliRunner().invoke(main, ["--device", "V100", "--renew", "--kernel", "rmsnorm"])
    assert isinstance(done.exception, UsageError)
    assert "--renew keeps what is predicted" in done.exception.message


def test_a_folder_without_sheets_is_refused(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["--device", "V100", "--renew", "-o", str(tmp_path)])
    assert isinstance(done.exception, UsageError)
    assert "has no predicted files of V100" in done.exception.message
