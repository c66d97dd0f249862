"""What is released is whole, signed and small enough to say; what is shipped can be compiled ahead."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command import ROOT, Kerngen

from kerngen.arch import Target, find_device
from kerngen.bundles.bundle import Bundle
from kerngen.compiler import builds
from kerngen.compiler.builds import Built
from kerngen.runtime.selection import Selector
from kerngen.templates import find_kernel
from kerngen.tuning_db import default_sources, lookup
from kerngen.tuning_db.store.bundles import open_bundle
from kerngen.workload.workload import find_model, workload

MODELS = ("--model", "gemma-4-31b", "--model", "gemma-4-12b")
KERNELS = ("--kernel", "gelu_gate,rmsnorm", "--jobs", "1")
H200 = Target.of(find_device("H200"))


def test_a_release_has_all_that_its_models_run(kerngen: Kerngen, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two models in one file: each problem has its machine code there, and nothing else is asked."""
    out = kerngen.ok("release", "-o", "dist", "--arch", "sm90", *MODELS, *KERNELS, "--json")
    (made,) = json.loads(out)["bundles"]
    file = Path("dist/kerngen-sm90.kgdb")
    assert (made["file"], made["arch"], made["boards"]) == (str(file), "sm90", ["H200"])
    assert made["bytes"] == file.stat().st_size
    assert made["image_bytes"] > 0
    assert len(made["signed_by"]) == 1
    assert made["failures"] == []
    assert made["winners"]["measured"] == 26
    assert kerngen("db", "verify", str(file))[0] == 0
    monkeypatch.setenv("KERNGEN_NO_COMPILE", "1")
    bundle = Bundle.open(file)
    selector = Selector(bundle.sources(), H200)
    for model in ("gemma-4-31b", "gemma-4-12b"):
        load = workload(find_model(model), H200.arch).only(["gelu_gate", "rmsnorm"])
        choices = [selector.choice(find_kernel(i.kernel), i.problem) for i in load.items]
        assert all(c.cubin is not None for c in choices)
        assert any(c.provenance == "measured" for c in choices) or model != "gemma-4-31b"
    with open_bundle(file) as store:
        assert {store.build(w.build_id).status for w in store.winners()} <= {"ok", "uncompiled"}


def test_what_lacks_a_kernel_is_not_released(kerngen: Kerngen, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = builds.build_all

    def failing(*args: Any, **options: Any) -> list[Built]:
        first, *others = plain(*args, **options)
        return [replace(first, image=None, made="no room"), *others]

    monkeypatch.setattr(builds, "build_all", failing)
    asked = ("release", "-o", "dist", "--arch", "sm90", "--model", "gemma-4-31b", *KERNELS)
    code, out, err = kerngen(*asked)
    assert code == 1
    assert "no room" in err
    assert "was not written" in err
    assert "digest" not in out
    code, out, _ = kerngen(*asked, "--json")
    assert code == 1
    assert [(b["bytes"], b["digest"], len(b["failures"])) for b in json.loads(out)["bundles"]] == [(0, None, 1)]
    assert not list(Path("dist").glob("*"))


@pytest.mark.parametrize(("args", "says"), [
    (("--arch", "sm71"), "sm70"), (("--arch", "sm70"), "no board of sm70 is among H200"),
    (("--device", "V101"), "V100"), (("--model", "gemma-5"), "gemma-4-31b"), (("--key", "no.key"), "no.key"),
])  # fmt: skip
def test_what_cannot_be_released_is_said(kerngen: Kerngen, args: tuple[str, ...], says: str) -> None:
    code, _, err = kerngen("release", "-o", "dist", *args)
    assert code != 0
    assert says in err
    assert not Path("dist").exists()


def test_what_is_shipped_can_be_compiled_ahead(kerngen: Kerngen, monkeypatch: pytest.MonkeyPatch) -> None:
    small = ("--model", "gemma-4-31b", "--jobs", "1")
    for sheet in (kerngen.folder / "prebuilt" / "H200").iterdir():
        if sheet.name not in ("gelu_gate.txt", "rmsnorm.txt"):
            sheet.unlink()
    out = kerngen.ok("db", "install", "--prebuilt", "--device", "H200", *small)
    assert "installed prebuilt-H200" in out
    assert "26 winners" in out
    monkeypatch.setenv("KERNGEN_NO_COMPILE", "1")
    kernel = find_kernel("gelu_gate")
    problem = next(i.problem for i in workload(find_model("gemma-4-31b"), H200.arch).only(["gelu_gate"]).items)
    winner = lookup(default_sources(), kernel, problem, H200)
    assert (winner.source, winner.provenance) == ("bundle prebuilt-H200: exact device", "measured")
    assert winner.cubin is not None
    for args, says in (
        (("--device", "H100"), "nothing is shipped for that board"),
        (("--arch", "sm70"), "nothing is shipped for that board"),
        ((), "this machine has no GPU"),
        (("--arch", "sm90", "file.kgdb"), "give one of them"),
    ):
        code, _, err = kerngen("db", "install", "--prebuilt", *args)
        assert code != 0
        assert says in err
    code, _, err = kerngen("db", "install", "--arch", "sm90")
    assert (code, "go with --prebuilt" in err) == (2, True)


def test_where_the_sheets_are_made_is_said_in_one_command(kerngen: Kerngen) -> None:
    """The measured sheets of a database, written where they are shipped from: the same text."""
    from kerngen.tuning_db import Store
    from tools.prebuilt import write_measured

    assert kerngen("db", "export", "--device", "H200", "--kernel", "gelu_gate", "-o", "h200.kgdb")[0] == 0
    with open_bundle("h200.kgdb") as store:
        assert isinstance(store, Store)
        Path("out/H200").mkdir(parents=True)
        Path("out/H200/gelu_gate.txt").write_text("of an older run")
        for name in ("rmsnorm.txt", "gelu_gate.predicted.txt"):
            Path("out/H200", name).write_text("stays")
        (path,) = write_measured(store, Path("out"))
    assert path == Path("out/H200/gelu_gate.txt")
    assert path.read_text() == (ROOT / "tuning_db/prebuilt/H200/gelu_gate.txt").read_text()
    assert {p.name for p in Path("out/H200").iterdir() if p.read_text() == "stays"} == {
        "rmsnorm.txt",
        "gelu_gate.predicted.txt",
    }
