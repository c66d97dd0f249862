"""`kerngen doctor`: what a model would run on a GPU, what is missing for it, and what improves it."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from collections import Counter
from contextlib import closing
from dataclasses import replace

import pytest
from command import ROOT, Kerngen, lent_boards

from kerngen.arch import Target, find_arch, find_device
from kerngen.bundles.bundle import Bundle, BundleCache
from kerngen.bundles.preflight import KINDS, Preflight, advice, kind_of, preflight
from kerngen.compiler.builds import Build
from kerngen.runtime.fallbacks import FALLBACKS
from kerngen.runtime.selection import Selector
from kerngen.templates import find_kernel
from kerngen.tuning.worker import present_arch
from kerngen.tuning_db import default_sources, lookup
from kerngen.tuning_db.read.reader import Reader
from kerngen.tuning_db.shipped import Shipped
from kerngen.workload.workload import find_workload

MODEL = "gemma-4-31b"


@pytest.mark.parametrize(("device", "kind"), [("H200", "exact device"), ("H100", "default")])
def test_a_models_problems_are_counted_by_who_chose_for_them(kerngen: Kerngen, device: str, kind: str) -> None:
    """As looking each of them up says, but for a row of many more tokens that gives way to the default."""
    out = kerngen.ok("doctor", "--model", MODEL, "--device", device, "--json")
    found = json.loads(out)["model"]
    target = Target.of(find_device(device))
    want: dict[str, Counter[str]] = {}
    sources = default_sources()
    selector = Selector(sources, target)
    for item in find_workload(MODEL, target.arch).items:
        winner = lookup(sources, find_kernel(item.kernel), item.problem, target)
        if winner is not None and winner.problem.dynamic != getattr(item.problem, item.problem.DYNAMIC or "", None):
            winner = selector.choice(find_kernel(item.kernel), item.problem).winner
        want.setdefault(item.kernel, Counter())["default" if winner is None else kind] += 1
    # what won near in shape is predicted for a problem that no row is of
    near = {
        k: row | {"default": row["default"] + row["predicted"], "predicted": 0} for k, row in found["kernels"].items()
    }
    assert {k: Counter({n: c for n, c in row.items() if c}) for k, row in near.items()} == want
    assert sum(row[kind] for row in found["kernels"].values()) > 0
    assert found["builds"] == found["in_database"] + len(found["missing"])
    assert list(found["outside"]) == ["dense matrices"]
    shown = kerngen("doctor", "--model", MODEL, "--device", device)[1]
    assert f"{MODEL} on sm90 ({device})" in shown
    untuned = sum(row["default"] for row in found["kernels"].values())
    assert (f"kerngen tune --arch sm90 --model {MODEL}" in shown) == (untuned > 0)


def test_what_was_measured_on_a_board_of_its_kind_is_the_same_arch(kerngen: Kerngen) -> None:
    kernel, board = find_kernel("add_norm"), find_device("H200")
    kin = Target.of(replace(board, name="H200 NVL", mem_gbps=4000))
    problem = kernel.problem_type(has_scalar=True)
    shipped = [Shipped()]
    kinds = [kind_of(Selector(shipped, t).choice(kernel, problem), t) for t in (Target.of(board), kin)]
    assert kinds == ["exact device", "same arch"]


def test_predictions_count_as_such(kerngen: Kerngen) -> None:
    which = ("--arch", "sm70", "--model", MODEL)
    assert kerngen("tune", *which, "--kernel", "embed", "--trials", "1", "--jobs", "1")[0] == 0
    found = json.loads(kerngen("doctor", *which, "--json")[1])["model"]
    assert found["kernels"]["embed"] == {"exact device": 0, "same arch": 0, "carried": 0, "predicted": 14, "default": 0}
    assert found["kernels"]["rmsnorm"]["default"] == 20
    first, *_ = found["commands"]
    assert first.startswith("kerngen tune --arch sm70 --model gemma-4-31b --kernel decode_inputs,rmsnorm,")
    assert first.endswith("--objective predicted")
    assert "embed" not in first


def test_what_may_not_be_compiled_and_is_missing_fails(kerngen: Kerngen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNGEN_NO_COMPILE", "1")
    code, out, _ = kerngen("doctor", "--model", MODEL, "--device", "L4")
    assert code == 1
    assert "cannot run: KERNGEN_NO_COMPILE forbids compiling" in out
    assert "embed(hidden=" in out
    assert "kerngen compile --arch sm89 --device L4 --model gemma-4-31b -o FILE" in out
    monkeypatch.delenv("KERNGEN_NO_COMPILE")
    out = kerngen.ok("doctor", "--model", MODEL, "--device", "L4")
    assert "cannot run" not in out


def test_a_bundle_is_shown_to_be_complete_or_not(kerngen: Kerngen, monkeypatch: pytest.MonkeyPatch) -> None:
    which = ("--arch", "sm70", "--model", MODEL, "--kernel", "embed,rmsnorm", "--jobs", "1", "-o", "bundle.kgdb")
    assert kerngen("compile", *which)[0] == 0
    load = find_workload(MODEL, find_arch("sm70")).only(["embed", "rmsnorm"])
    bundle, target = Bundle.open("bundle.kgdb"), Target.of(find_arch("sm70"))
    monkeypatch.setenv("KERNGEN_NO_COMPILE", "1")
    found = preflight(load, Selector(bundle.sources(), target), BundleCache(bundle))
    assert found.works
    assert (found.builds, found.missing) == (6, [])
    with closing(sqlite3.connect("file:bundle.kgdb?mode=ro&immutable=1", uri=True)) as connection:
        ((lost,),) = connection.execute("SELECT min(sha) FROM artifact").fetchall()
    with monkeypatch.context() as context:
        whole = Reader.image
        context.setattr(Reader, "image", lambda self, b: None if b.image_sha == lost else whole(self, b))
        found = preflight(load, Selector(bundle.sources(), target), BundleCache(bundle))
    assert not found.works
    assert len(found.missing) == 1
    assert kerngen("doctor", "--bundle", "bundle.kgdb")[0] == 0
    assert kerngen("doctor", "--model", MODEL, "--arch", "sm70", "--bundle", "bundle.kgdb")[0] == 1, "the other kernels"
    code, _, err = kerngen("doctor", "--model", MODEL, "--arch", "sm75", "--bundle", "bundle.kgdb")
    assert code == 2
    assert "was made for sm70, not for sm75" in err
    (kerngen.folder / "bundle.kgdb").chmod(0o644)
    with (kerngen.folder / "bundle.kgdb").open("r+b") as f:
        f.seek(-100, 2)
        f.write(b"damage")
    code, out, _ = kerngen("doctor", "--bundle", "bundle.kgdb")
    assert code == 1
    assert "bundle.kgdb is damaged" in out


def test_without_a_model_it_lists_what_no_kernel_serves(kerngen: Kerngen) -> None:
    out = kerngen.ok("doctor")
    assert all(f"    {name}: {why}" in out for name, why in FALLBACKS.items())
    assert json.loads(kerngen("doctor", "--json")[1])["outside"] == FALLBACKS
    for args in (("--arch", "sm70"), ("--device", "L4"), ("--db", "x.db")):
        code, _, err = kerngen("doctor", *args)
        assert code == 2
        assert "go with a --model" in err
    code, _, err = kerngen(
        "doctor", "--model", str(ROOT / "examples/tiny/gemma-4-tiny"), "--arch", "sm70", "--device", "L4"
    )
    assert code == 2
    assert "device L4 is sm89, not sm70" in err


def _ready(device: str, kinds: dict[str, dict[str, int]], missing: int = 0, blocked: str = "") -> Preflight:
    target = Target.of(find_device(device))
    kernel = find_kernel("embed")
    problem = kernel.cases.CASES[0].problem
    build = Build(kernel, target, problem, kernel.default_config(problem, target), "")
    counts = {k: Counter(row) for k, row in kinds.items()}
    return Preflight(target, counts, 9, 9 - missing, [build] * missing, blocked)


@pytest.mark.parametrize(("found", "here", "bundle", "commands"), [
    (_ready("H200", {"a": {"exact device": 3}, "b": {"exact device": 1}}), "H200", False, []),
    (_ready("H200", {"a": {"exact device": 3}, "b": {"predicted": 1}}), "H200", False,
     ["kerngen tune --arch sm90 --model m --kernel b"]),
    (_ready("H100", {"a": {"same arch": 3}, "b": {"same arch": 1}}), None, False,
     ["kerngen tune --arch sm90 --model m"]),
    (_ready("L4", {"a": {"predicted": 3}, "b": {"default": 1}}), None, False,
     ["kerngen tune --arch sm89 --device L4 --model m --kernel b --objective predicted",
      "kerngen tune --arch sm89 --model m"]),
    (_ready("L4", {"a": {"exact device": 3}}, 2), None, False, ["kerngen compile --arch sm89 --device L4 --model m"]),
    (_ready("V100", {"a": {"exact device": 3}}, 2, "no NVRTC"), None, True,
     ["kerngen compile --arch sm70 --model m -o FILE"]),
    (_ready("V100", {"a": {"default": 3}}), "V100", True,
     ["kerngen tune --arch sm70 --model m", "kerngen compile --arch sm70 --model m -o FILE"]),
])  # fmt: skip
def test_the_command_that_improves_it(found: Preflight, here: str | None, bundle: bool, commands: list[str]) -> None:
    target = Target.of(find_device(here)) if here else None
    assert list(advice(found, "m", target, bundle=bundle)) == commands
    assert set().union(*found.kinds.values()) <= set(KINDS)


LOOKS = (("doctor",), ("doctor", "--json"),
         ("kernel", "show", "rmsnorm", "--arch", "sm70", "--problem", "hidden=5376", "--no-source"),
         ("db", "explain", "embed", "--arch", "sm70", "--problem", "hidden=5376,num_tokens=1"))  # fmt: skip


@pytest.mark.skipif(present_arch() is not None, reason="with a GPU here, doctor asks torch whether it can use it")
@pytest.mark.parametrize("args", LOOKS, ids=" ".join)
def test_a_look_loads_no_torch(kerngen: Kerngen, args: tuple[str, ...]) -> None:
    """torch alone takes seconds of CPU, a tuning study more: what is merely looked at is there at once."""
    code = ("import sys\nfrom kerngen.cli import main\ntry:\n    main()\nexcept SystemExit:\n    pass\n"
            "assert not {'torch', 'optuna'} & set(sys.modules), 'a heavy module was loaded'")  # fmt: skip
    with lent_boards(kerngen.folder / "cache"):
        done = subprocess.run([sys.executable, "-c", code, *args], env=os.environ | {"PYTHONPATH": str(ROOT)},
                              capture_output=True, text=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout
