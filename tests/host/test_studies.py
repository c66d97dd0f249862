"""`kerngen db studies`: the searches of a database as Optuna studies, and optuna-dashboard shows them as they are."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import ProxyHandler, build_opener

import optuna
import pytest
from click.testing import CliRunner
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState
from test_tuning_db import H200, add_build, key_of, measured, predicted

from kerngen.arch import Target
from kerngen.cli.db import db
from kerngen.errors import UnknownName
from kerngen.report.data import gather
from kerngen.report.studies import write_studies
from kerngen.tuning_db import Store

REASON = "[3, 4] is off by 0.5"
START_S = 60.0


@pytest.fixture
def database(tmp_path: Path) -> Path:
    """Two searches of one problem, measured and predicted, with a failure, and one of another problem."""
    path = tmp_path / "tuning.db"
    with Store.open(path) as store:
        builds = [add_build(store, n) for n in range(4)]
        first, other = {"search": "a" * 64}, {"search": "b" * 64}
        rows = [measured(builds[n], n, 10.0 + 5 * n, tags=first, at=f"2026-01-01T00:00:0{n}+00:00") for n in range(3)]
        rows += [
            measured(builds[3], 3, None, outcome="wrong_result", reason=REASON, tags=first, error_abs=float("inf"),
                     at="2026-01-01T00:00:09+00:00"),
            measured(builds[0], 0, 10.5, tags=first, stage="final", at="2026-01-01T00:01:00+00:00"),
            predicted(builds[2], 2, 7.0, tags=other),
            measured(builds[1], 1, 30.0, problem=key_of(128), tags=first),
        ]  # fmt: skip
        store.add_measurements(rows)
        store.recompute_winners("toy", key_of().static_key, Target.of(H200))
    return path


def studies_of(path: Path) -> dict[str, optuna.Study]:
    storage = JournalStorage(JournalFileBackend(str(path)))
    names = optuna.get_all_study_names(storage)
    return {name: optuna.load_study(study_name=name, storage=storage) for name in names}


def test_a_study_is_the_search(database: Path, tmp_path: Path) -> None:
    with Store.open(database, read_only=True) as store:
        facts = gather([store])
    path = tmp_path / "studies.journal"
    assert write_studies(path, facts) == 3
    found = studies_of(path)
    (study,) = [s for s in found.values() if len(s.trials) == 4]
    assert study.study_name.startswith("toy[")
    assert study.study_name.endswith(f"on H200 {'a' * 8}")
    assert [t.state for t in study.trials] == [TrialState.COMPLETE] * 3 + [TrialState.PRUNED], "in their order"
    assert [t.value for t in study.trials] == [10.0, 15.0, 20.0, None]
    assert [t.params for t in study.trials] == [{"block_n": n} for n in range(4)]
    assert study.best_trial.number == 0
    assert study.best_trial.user_attrs["is_winner"]
    assert study.trials[3].user_attrs["reason"] == REASON
    assert study.trials[3].constraints["excess"] > 0 >= study.trials[0].constraints["excess"]
    assert study.user_attrs["value is"] == "measured microseconds"
    assert {s.user_attrs["value is"].split()[0] for s in found.values()} == {"measured", "predicted"}


def test_the_command(database: Path, tmp_path: Path) -> None:
    path = tmp_path / "sub" / "studies.journal"
    done = CliRunner().invoke(db, ["studies", "-o", str(path), "--db", str(database), "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout) == {"file": str(path), "studies": 3, "trials": 7}
    assert len(studies_of(path)) == 3
    assert sorted(p.name for p in path.parent.iterdir()) == [path.name], "no lock, no scratch file beside it"
    empty = CliRunner().invoke(db, ["studies", "-o", str(path), "--db", str(database), "--arch", "sm70"])
    assert empty.exit_code == 0
    assert studies_of(path) == {}


@pytest.mark.parametrize("command", ["studies", "report"])
@pytest.mark.parametrize(("asked", "says"), [
    (("--kernel", "rmsnrm"), "did you mean rmsnorm"),
    (("--arch", "sm71"), "known: sm70"),
    (("--device", "H2O"), "H200"),
])  # fmt: skip
def test_what_is_drawn_is_named_right(
    database: Path, tmp_path: Path, command: str, asked: tuple[str, str], says: str
) -> None:
    path = tmp_path / "out"
    with pytest.raises(UnknownName, match=asked[1]) as caught:
        CliRunner().invoke(db, [command, "-o", str(path), "--db", str(database), *asked], catch_exceptions=False)
    assert says in str(caught.value)
    assert not path.exists()


def test_optuna_dashboard_opens_them_as_they_are(database: Path, tmp_path: Path) -> None:
    if find_spec("optuna_dashboard") is None:
        pytest.skip("optuna-dashboard is not installed: pip install -c constraints.txt -e '.[dev]'")
    path = tmp_path / "studies.journal"
    with Store.open(database, read_only=True) as store:
        write_studies(path, gather([store]))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", "from optuna_dashboard._cli import main; main()", str(path), "--port", str(port),
               "--host", "127.0.0.1", "--server", "wsgiref", "--quiet"]  # fmt: skip
    with (tmp_path / "log").open("wb") as log:
        started = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=os.environ.copy())
    opener = build_opener(ProxyHandler({}))

    def ask(what: str) -> Any:
        with opener.open(f"http://127.0.0.1:{port}{what}", timeout=START_S) as answer:
            assert answer.status == 200
            return answer.read()

    try:
        deadline = time.monotonic() + START_S
        while True:
            try:
                page = ask("/dashboard/")
                break
            except (URLError, ConnectionError):
                assert started.poll() is None, (tmp_path / "log").read_text()
                assert time.monotonic() < deadline, (tmp_path / "log").read_text()
                time.sleep(0.1)
        assert b"<html" in page.lower()
        listed = json.loads(ask("/api/studies"))["study_summaries"]
        assert {s["study_name"] for s in listed} == set(studies_of(path))
        (shown,) = [s["study_id"] for s in listed if "64" in s["study_name"] and s["study_name"].endswith("a" * 8)]
        detail = json.loads(ask(f"/api/studies/{shown}"))
        assert [t["state"] for t in detail["trials"]] == ["Complete"] * 3 + ["Pruned"]
        assert [t["values"] for t in detail["trials"][:3]] == [[10.0], [15.0], [20.0]]
        reasons = [[a["value"] for a in t["user_attrs"] if a["key"] == "reason"] for t in detail["trials"]]
        assert reasons[3] == [REASON]
        assert ask(f"/csv/{shown}").count(b"\n") >= 5
    finally:
        started.terminate()
        started.wait(10)
