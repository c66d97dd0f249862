"""A bundle runs every problem of its workload on a host that has nothing else, and says so where it cannot."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from command import ROOT, Kerngen

import kerngen.compiler.cache as cache_module
import kerngen.compiler.compile as compile_module
from kerngen.arch import Target, find_arch, find_device
from kerngen.bundles.bundle import Bundle, BundleCache, sources_for
from kerngen.compiler import render
from kerngen.compiler.builds import choices, lengths_between, workload_builds
from kerngen.errors import DatabaseError, DeviceError, TrustError, TuningMiss, UsageError
from kerngen.ops import devices
from kerngen.runtime import launcher
from kerngen.runtime.selection import Choice, Selector
from kerngen.templates import find_kernel
from kerngen.templates.attn_prefill import spec as attn_prefill
from kerngen.tuning_db import Store, default_stores, lookup, stores_for
from kerngen.tuning_db.read.sealed import Sealed
from kerngen.tuning_db.store.bundles import open_bundle
from kerngen.workload.workload import Workload, find_model, workload

TINY = ROOT / "examples" / "tiny"
SMALL = ("--model", "gemma-4-31b", "--kernel", "gelu_gate,rmsnorm", "--jobs", "1")
OTHER = find_kernel("gelu_gate").problem_type(width=64, dtype="fp16")  # of no bundle here


def _alone(kerngen: Kerngen, monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on the bundle is all that this host has: no cache, no database, no shipped one, and no compiler."""
    shutil.rmtree(kerngen.folder / "cache", ignore_errors=True)
    for path in kerngen.folder.glob("tuning.db*"):
        path.unlink()
    monkeypatch.setattr("kerngen.tuning_db.read.places.PREBUILT", kerngen.folder / "none")
    monkeypatch.setenv("KERNGEN_NO_COMPILE", "1")
    for module in (compile_module, cache_module):
        monkeypatch.setattr(module, "nvrtc_version", lambda: pytest.fail("NVRTC was asked for"))
        monkeypatch.setattr(module, "compile_cubin", lambda *_: pytest.fail("something was compiled"))


def _chosen(load: Workload, stores: list[Store], target: Target) -> Iterator[tuple[object, Choice]]:
    return choices(load, Selector(stores, target), Counter())


@pytest.mark.parametrize(("model", "draft", "kernels", "target", "tuned"), [
    (str(TINY / "gemma-4-tiny-w4a16"), str(TINY / "gemma-4-tiny-assistant"),
     "embed,rmsnorm,add_norm,attn_prefill", Target.of(find_arch("sm80")), "embed"),
    ("gemma-4-31b", None, "rmsnorm,gelu_gate", Target.of(find_device("H200")), None),
], ids=["a folder, tuned in part", "a released model, shipped winners"])  # fmt: skip
def test_a_host_with_a_bundle_alone_runs_every_problem_of_the_workload(
    kerngen: Kerngen, monkeypatch: pytest.MonkeyPatch, model: str, draft: str | None, kernels: str, target: Target,
    tuned: str | None,
) -> None:  # fmt: skip
    which = ("--model", model, *(("--draft", draft) if draft else ()), "--jobs", "1")
    if tuned:
        assert kerngen("tune", "--arch", target.arch.name, *which, "--kernel", tuned, "--trials", "2")[0] == 0
    code, out, err = kerngen(
        "compile", "--device", target.device.name, *which, "--kernel", kernels, "-o", "bundle.kgdb"
    )
    assert code == 0
    assert all(line.startswith("compile: ") for line in err.splitlines()), "nothing but progress"
    assert "bundle.kgdb is a bundle: kerngen run MODEL --bundle bundle.kgdb" in out
    load = workload(find_model(model, draft), target.arch).only(kernels.split(","))
    stores = default_stores()
    before = dict(_chosen(load, stores, target))
    for store in stores:
        store.close()
    _alone(kerngen, monkeypatch)
    monkeypatch.setenv("KERNGEN_BUNDLE", "bundle.kgdb")
    stores, cache, bundle = sources_for(None, None)
    assert bundle is not None
    assert {i.problem for i in load.items} <= set(before)
    provenances = Counter()
    for problem, choice in _chosen(load, stores, target):
        image = choice.cubin or cache.get_or_compile(choice.text, target.arch)
        assert image.arch == target.arch.name
        assert (choice.config, choice.provenance) == (before[problem].config, before[problem].provenance)
        provenances[choice.provenance] += (choice.kernel.name, problem) not in load.of_towers
    assert set(+provenances) == ({"predicted", "default"} if tuned else {"measured"})
    assert bool(load.of_towers) is (tuned is None), "images are no reason to compile either"
    assert [p.name for p in kerngen.folder.iterdir() if p.is_file()] == ["bundle.kgdb"], "reading leaves nothing"
    assert (kerngen.folder / "bundle.kgdb").stat().st_mode & 0o777 == 0o444


def test_lengths_between_the_tuned_ones_are_prepared_too() -> None:
    """attn_decode's contexts are 64, 512, 2048, ...: the default of 100 is that of 128."""
    load = workload(find_model("gemma-4-31b"), find_arch("sm70")).only(["attn_decode"])
    problems = {p for _, p in lengths_between(load)}
    item = next(i.problem for i in load.items if i.problem.kv_len == 512 and not i.problem.window)
    assert {replace(item, kv_len=1 << n) for n in range(6, 18)} <= problems
    selector = Selector([], Target.of(find_arch("sm70")))
    prepared = {id(selector.choice(find_kernel("attn_decode"), p)) for p in problems}
    for length in (65, 100, 700, 5000, 100_000):
        assert id(selector.choice(find_kernel("attn_decode"), replace(item, kv_len=length))) in prepared
    for batch in (3, 7, 13, 19, 31):  # and of batches between
        assert id(selector.choice(find_kernel("attn_decode"), replace(item, batch=batch))) in prepared


def test_prompts_with_images_are_prepared_where_images_see_themselves() -> None:
    """In sliding layers, and with what was tuned for prompts of text; nothing is tuned for them."""
    target = Target.of(find_arch("sm80"))
    load = workload(find_model("gemma-4-31b"), target.arch).only(["attn_prefill"])
    assert not any(item.problem.ends for item in load.items)
    chosen = {p: c for p, c in _chosen(load, [], target) if isinstance(p, attn_prefill.Problem)}
    of_text = {p for p in chosen if not p.ends}
    assert {p for p in chosen if p.ends} == {replace(p, ends=True) for p in of_text if p.window}
    assert all(chosen[p].config == chosen[replace(p, ends=False)].config for p in chosen)
    causal = workload(find_model("gemma-4-e4b"), target.arch).only(["attn_prefill"])
    assert not any(p.ends for p, _ in _chosen(causal, [], target) if isinstance(p, attn_prefill.Problem))


def test_each_source_of_a_workload_is_rendered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    load = workload(find_model("gemma-4-31b"), find_arch("sm90")).only(["w4a16_gemm", "rmsnorm"])
    chosen: list[Choice] = []
    rendered: list[object] = []
    source_of = render.source_of
    with monkeypatch.context() as patch:
        patch.setattr(render, "source_of", lambda *asked: (rendered.append(asked), source_of(*asked))[1])
        builds = workload_builds(load, Selector([], Target.of(find_arch("sm90"))), [], chosen)
    sources = [str(build.source) for build in builds]
    assert len(rendered) == len(set(sources)) == len(sources) < len(chosen)
    assert {choice.text for choice in chosen} == set(sources)


def test_no_length_between_is_prepared_twice() -> None:
    """w4a16_gemm prefers eighths of a power too, where those are whole: between 1 and 2 there is none."""
    load = workload(find_model("gemma-4-31b"), find_arch("sm90")).only(["w4a16_gemm"])
    ends = tuple(item for item in load.items if item.problem.num_tokens in (1, 16))
    lengths: dict[Any, list[int]] = {}
    for _, problem in lengths_between(replace(load, items=ends)):
        lengths.setdefault(replace(problem, num_tokens=1), []).append(problem.num_tokens)
    assert lengths
    assert all(sorted(found) == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16] for found in lengths.values())


def test_what_a_bundle_lacks_is_an_error_where_nothing_may_be_compiled(
    kerngen: Kerngen, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert kerngen("compile", "--arch", "sm70", *SMALL, "-o", "bundle.kgdb")[0] == 0
    _alone(kerngen, monkeypatch)
    bundle = Bundle.open("bundle.kgdb")
    target = Target.of(find_arch("sm70"))
    choice = Selector(bundle.sources(), target).choice(find_kernel("gelu_gate"), OTHER)
    with pytest.raises(TuningMiss, match=r"bundle\.kgdb.*KERNGEN_NO_COMPILE") as caught:
        BundleCache(bundle).get_or_compile(choice.text, target.arch)
    assert caught.value.hint == "say what it lacks: kerngen doctor --model gemma-4-31b --bundle bundle.kgdb"


def test_the_ops_of_the_library_run_what_a_bundle_holds(kerngen: Kerngen, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, which is played: $KERNGEN_BUNDLE counts for them as it does for a model."""
    assert kerngen("compile", "--device", "H200", *SMALL, "-o", "bundle.kgdb")[0] == 0
    assert kerngen("compile", "--arch", "sm70", *SMALL, "-o", "other.kgdb")[0] == 0
    _alone(kerngen, monkeypatch)

    class Loaded:
        def __init__(self, kernel: Any, config: Any, target: Target, image: bytes, source: str, index: int) -> None:
            self.source = source

        def plan(self, problem: Any) -> tuple[tuple[()], int]:
            return (), 0

    monkeypatch.setattr(launcher, "Function", Loaded)
    monkeypatch.setattr(launcher, "probe_device", lambda index=0: find_device("H200"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=0: (9, 0))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    gpu, asked = torch.device("cuda", 0), find_kernel("gelu_gate").problem_type(width=8192)
    try:
        monkeypatch.setenv("KERNGEN_BUNDLE", "bundle.kgdb")
        devices.use_stores(None)
        sources = devices.load_ahead([("gelu_gate", asked)], 32, gpu)
        assert all(source.startswith("bundle") for source in sources)
        assert sources.total() > 0
        with pytest.raises(TuningMiss, match=r"bundle\.kgdb.*KERNGEN_NO_COMPILE"):
            devices.load_ahead([("gelu_gate", OTHER)], 1, gpu)
        monkeypatch.setenv("KERNGEN_BUNDLE", "other.kgdb")
        devices.use_stores(None)
        with pytest.raises(UsageError, match="was made for sm70, not for sm90"):
            devices.load_ahead([("gelu_gate", asked)], 1, gpu)
        with pytest.raises(DeviceError, match="on cpu"):
            devices.load_ahead([("gelu_gate", asked)], 1, torch.device("cpu"))
    finally:
        monkeypatch.undo()
        devices.use_stores(None)


def test_without_that_the_users_cache_stands_behind_a_bundle(kerngen: Kerngen) -> None:
    assert kerngen("compile", "--arch", "sm70", *SMALL, "-o", "bundle.kgdb")[0] == 0
    _, cache, bundle = sources_for(None, "bundle.kgdb")
    assert bundle is not None
    before = Path("bundle.kgdb").read_bytes()
    target = Target.of(find_arch("sm70"))
    choice = Selector([], target).choice(find_kernel("gelu_gate"), OTHER)
    made = cache.get_or_compile(choice.text, target.arch)
    assert cache.path(made.key).is_relative_to(kerngen.folder / "cache")
    assert Path("bundle.kgdb").read_bytes() == before, "a bundle is not written to"


def test_a_damaged_image_of_a_bundle_is_named_and_left(
    kerngen: Kerngen, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One flipped bit in the machine code of a default costs that default, and all else is served."""
    assert kerngen("compile", "--arch", "sm70", *SMALL, "-o", "bundle.kgdb")[0] == 0
    with closing(sqlite3.connect("file:bundle.kgdb?mode=ro&immutable=1", uri=True)) as connection:
        blob = connection.execute("SELECT blob FROM artifact ORDER BY sha").fetchone()[0]
    data = bytearray(Path("bundle.kgdb").read_bytes())
    data[data.index(blob[-64:]) + 20] ^= 1
    os.chmod("bundle.kgdb", 0o644)
    Path("bundle.kgdb").write_bytes(data)
    _alone(kerngen, monkeypatch)
    bundle = Bundle.open("bundle.kgdb")
    target = Target.of(find_arch("sm70"))
    load = workload(find_model("gemma-4-31b"), target.arch).only(["gelu_gate", "rmsnorm"])
    code = {c.text: c.cubin for _, c in _chosen(load, bundle.sources(), target)}
    assert len(code) > 1
    assert sum(cubin is None for cubin in code.values()) == 1
    assert "does not match" in caplog.text


def test_who_signs(kerngen: Kerngen, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kerngen("db", "keygen", "release.key")[0] == 0
    assert kerngen("compile", "--arch", "sm70", *SMALL, "-o", "b.kgdb", "--key", "release.key")[0] == 0
    with pytest.raises(TrustError, match=r"signed.*no key.*trusted.* [0-9a-f]{16}") as caught:
        Bundle.open("b.kgdb")
    assert f"kerngen db trust --digest {Sealed.open('b.kgdb').digest}" in str(caught.value.hint)
    assert kerngen("db", "trust", "release.key.pub")[0] == 0
    assert Bundle.open("b.kgdb").source.winners() == []
    for args, says in (
        (("--key", "release.key", "--unsigned", "-o", "c.kgdb"), "contradict each other"),
        (("--key", "absent.key", "-o", "c.kgdb"), "absent.key: No such file"),
        (("--unsigned",), "go with a bundle"),
    ):
        code, _, err = kerngen("compile", "--arch", "sm70", *SMALL, *args)
        assert code != 0
        assert says in err
    assert not Path("c.kgdb").exists()
    assert kerngen("compile", "--arch", "sm70", *SMALL, "-o", "none.kgdb", "--unsigned")[0] == 0
    code, out, _ = kerngen("doctor", "--bundle", "none.kgdb")
    assert (code, "none.kgdb is not signed" in out) == (1, True)
    monkeypatch.setenv("KERNGEN_TRUST_UNSIGNED", "1")
    assert Bundle.open("none.kgdb").source.winners() == []


def test_whole_lines_are_kept_and_rows_stay_as_they_are(kerngen: Kerngen) -> None:
    """A length between two tuned points is answered as before, and every id and reason is the one that was there."""
    assert kerngen("compile", "--device", "H200", *SMALL, "-o", "bundle.kgdb")[0] == 0
    here = Target.of(find_device("H200"))
    kernel = find_kernel("rmsnorm")
    with open_bundle("bundle.kgdb", name="bundle") as kept:
        shipped = [s for s in default_stores() if s.name.startswith("prebuilt")]
        theirs = {w.id: w for s in shipped for w in s.winners()}
        assert {w.kernel for w in kept.winners()} == {"gelu_gate", "rmsnorm"}
        for w in kept.winners():
            assert replace(w, source="") == replace(theirs[w.id], source="")
            assert kept.build(w.build_id)
            assert kept.measurements(build_id=w.build_id)
        problem = next(w for w in kept.winners("rmsnorm")).problem
        for tokens in (1, 2, 3, 100, 300, 8192, 9000):
            asked = kernel.problem_type(**{**problem.fields, "num_tokens": tokens})
            was, now = (lookup(stores, kernel, asked, here) for stores in (shipped, [kept]))
            assert (was and (was.config, was.build_id)) == (now and (now.config, now.build_id))
    one = next(w for w in theirs.values() if w.kernel == "rmsnorm" and w.problem.dynamic == 512)
    points = [w for w in theirs.values() if w.problem.cell == one.problem.cell]
    assert len(points) == 14, "its line has as many points"
    assert {w.id for w in points} <= {w.id for w in open_bundle("bundle.kgdb").winners()}
    connection = sqlite3.connect("file:bundle.kgdb?mode=ro&immutable=1", uri=True)
    assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
    connection.close()


def test_two_databases_with_a_winner_for_one_point_make_a_bundle_that_is_complete(
    kerngen: Kerngen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user's prediction and the shipped measurement have one id; what was measured is chosen, and kept."""
    assert kerngen("tune", "--arch", "sm90", "--device", "H200", *SMALL, "--trials", "1")[0] == 0
    out = kerngen.ok("compile", "--device", "H200", *SMALL, "-o", "bundle.kgdb", "--json")
    chosen = {s for b in json.loads(out)["builds"] for s in b["chosen_by"]}
    assert chosen == {"prebuilt H200: exact device (measured)", "default configuration"}, "the latter for images"
    _alone(kerngen, monkeypatch)
    bundle, target = Bundle.open("bundle.kgdb"), Target.of(find_device("H200"))
    load = workload(find_model("gemma-4-31b"), target.arch).only(["gelu_gate", "rmsnorm"])
    for _, choice in _chosen(replace(load, of_towers=()), bundle.sources(), target):
        assert choice.provenance == "measured"
        assert choice.cubin is not None


@pytest.mark.parametrize(("where", "targets", "chosen"), [
    (("--device", "H200"), [["sm90", "H200"]], {"exact device (measured)", "default configuration"}),  # of images
    (("--arch", "sm90", "--device", "H100"), [["sm90", "H100"]], {"default configuration"}),
    (("--arch", "sm80,sm90", "--device", "h200"), [["sm90", "H200"], ["sm80", "A100"]],
     {"exact device (measured)", "default configuration"}),
])  # fmt: skip
def test_the_board_decides_what_is_chosen(
    kerngen: Kerngen, where: tuple[str, ...], targets: list[list[str]], chosen: set[str]
) -> None:
    out = kerngen.ok("compile", *where, "--model", "gemma-4-31b", "--kernel", "rmsnorm", "--jobs", "1", "--json")
    made = json.loads(out)
    assert made["targets"] == targets
    assert {s.removeprefix("prebuilt H200: ") for b in made["builds"] for s in b["chosen_by"]} == chosen


def test_a_bundle_made_anew_forgets_what_was_chosen_before(kerngen: Kerngen) -> None:
    assert kerngen("compile", "--device", "H200", *SMALL, "-o", "bundle.kgdb")[0] == 0
    Path("victim").write_bytes(before := Path("bundle.kgdb").read_bytes())
    Path("bundle.kgdb").unlink()
    Path("bundle.kgdb").symlink_to("victim")
    assert kerngen("compile", "--device", "H200", *SMALL, "--untuned", "-o", "bundle.kgdb")[0] == 0
    with Bundle.open("bundle.kgdb").sources()[0] as store:
        assert store.winners() == []
    assert Path("victim").read_bytes() == before, "what a link leads to stays, and the link is replaced"
    assert {p.name for p in kerngen.folder.iterdir() if "kerngen-" in p.name} == set(), "nothing is left beside it"


def test_a_file_that_is_no_bundle_is_not_overwritten(kerngen: Kerngen) -> None:
    Store.open("mine.db").close()
    os.mkdir("folder")
    before = Path("mine.db").read_bytes()
    for name, says in (
        ("mine.db", "mine.db is there, and is no bundle"),
        ("folder", "folder is a folder, and a bundle is"),
    ):
        code, _, err = kerngen("compile", "--arch", "sm70", *SMALL, "-o", name)
        assert code == 2
        assert says in err
    assert Path("mine.db").read_bytes() == before


def test_what_is_no_bundle_is_said(kerngen: Kerngen) -> None:
    os.mkdir("folder")
    Store.open("mine.db").close()
    Path("torn.kgdb").write_bytes(Path("mine.db").read_bytes())
    os.mkfifo("pipe.kgdb")
    for name, error, says in (
        ("nowhere", UsageError, "nowhere is no bundle: it is not there"),
        ("folder", UsageError, "folder is no bundle: it is a folder"),
        ("mine.db", UsageError, "mine.db is no bundle: it is no sealed file"),
        ("pipe.kgdb", UsageError, "pipe.kgdb is no bundle"),
        ("torn.kgdb", DatabaseError, "torn.kgdb is no sealed database, or was cut short"),
    ):
        with pytest.raises(error, match=says) as caught:
            Bundle.open(name)
        assert caught.value.hint
    with pytest.raises(DatabaseError, match="was cut short"):  # not opened as any other database
        stores_for("torn.kgdb")
