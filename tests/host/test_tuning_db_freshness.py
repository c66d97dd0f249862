"""Whether a build is current: known by the closure that rendered it, rendered once where that is not known."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from test_tuning_db import H200, damage
from test_tuning_db_lookup import Problem, ask, fake_render, make_kernel, record

from kerngen.arch import Target
from kerngen.templates.kernel import Kernel
from kerngen.tuning_db import Store, problem_key
from kerngen.tuning_db.dist.export import Selection, export
from kerngen.tuning_db.store.bundles import open_bundle

KERNEL = make_kernel()


class Renders:
    """Counts what is rendered. closure: of the files as they are now."""

    def __init__(self) -> None:
        self.count, self.closure = 0, "first"

    def __call__(self, *args: Any) -> str:
        self.count += 1
        return fake_render(*args)


@pytest.fixture
def renders(monkeypatch: pytest.MonkeyPatch) -> Renders:
    counting = Renders()
    monkeypatch.setattr("kerngen.compiler.render.source_of", counting)
    monkeypatch.setattr(
        "kerngen.compiler.source_digest.source_digest_of", lambda kernel: f"{counting.closure} {kernel.spec.version}"
    )
    return counting


@pytest.fixture
def store(path: Path, renders: Renders) -> Iterator[Store]:
    """Two trials of a problem, the second the winner; both judged when the winner was chosen."""
    with Store.open(path) as s:
        for n, us in ((1, 20.0), (2, 10.0)):
            record(s, KERNEL, n, us)
        renders.count = 0
        yield s


def derive(store: Store, kernel: Kernel = KERNEL) -> Any:
    (winner,) = store.recompute_winners(kernel, problem_key(kernel, Problem()).static_key, Target.of(H200))
    return winner


def test_what_was_judged_once_is_not_rendered_again(store: Store, renders: Renders, path: Path) -> None:
    found = ask([store], KERNEL)
    assert found.cubin is not None
    assert derive(store).config == {"block_n": 2}
    with Store.open(path, read_only=True) as again:
        assert ask([again], KERNEL) == found
    assert renders.count == 0


def test_another_closure_that_renders_the_same_is_adopted(store: Store, renders: Renders) -> None:
    """A comment in a file of the kernel's that is not in the source, say."""
    renders.closure = "second"
    for _ in range(2):
        found = ask([store], KERNEL)
        assert not found.stale
    assert renders.count == 2, "a lookup reads, and notes nothing"
    assert not derive(store).stale
    renders.count = 0
    found = ask([store], KERNEL)
    assert found.cubin is not None
    derive(store)
    assert renders.count == 0


def test_of_one_configuration_one_source_is_current(store: Store, renders: Renders) -> None:
    """A build of another source is stale, and need not be rendered to be found so."""
    newer = make_kernel(version=2)
    record(store, newer, 2, 15.0)
    renders.count = 0
    winner = derive(store, newer)
    assert (winner.latency_us, winner.config, winner.stale) == (15.0, {"block_n": 2}, False)
    assert renders.count == 1, "of the other configuration, which nobody built since"
    for kernel, us in ((newer, 15.0), (KERNEL, 10.0)):
        found = ask([store], kernel)
        assert (found.latency_us, found.stale) == (us, False), "each version of the kernel is served its own"


def test_a_build_with_other_options_than_todays_is_stale(store: Store, renders: Renders) -> None:
    record(store, KERNEL, 3, 5.0, options=("-std=c++17", "-G"))
    assert derive(store).config == {"block_n": 2}
    for block_n in (1, 2):
        store.revoke(build_of(store, block_n), "leave the other alone")
    assert derive(store).stale
    found = ask([store], KERNEL)
    assert (found.config, found.stale, found.cubin) == ({"block_n": 3}, True, None)


def build_of(store: Store, block_n: int) -> str:
    builds = store.builds(problem_key(KERNEL, Problem()).static_key)
    return next(id for id, build in builds.items() if build.config == {"block_n": block_n})


def test_an_altered_note_is_not_believed(
    store: Store, renders: Renders, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    newer = make_kernel(version=2)
    damage(path, "UPDATE rendered SET closure = 'first 2'")
    found = ask([store], newer)
    assert found.stale
    assert found.cubin is None
    assert "does not match its own seal" in caplog.text


def test_what_is_taken_along_is_known_there_too(store: Store, renders: Renders, tmp_path: Path) -> None:
    found = ask([store], KERNEL)
    assert found is not None
    export([store], Selection(), tmp_path / "part.kgdb")
    with open_bundle(tmp_path / "part.kgdb", allow_unsigned=True) as part:
        taken = ask([part], KERNEL)
    assert taken.cubin is not None
    assert renders.count == 0


def test_nothing_is_rendered_while_others_wait_to_write(
    store: Store, renders: Renders, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    renders.closure = "second"

    def render(*args: Any) -> str:
        with closing(sqlite3.connect(path, timeout=0)) as other:
            other.execute("BEGIN IMMEDIATE")  # raises where somebody holds the write lock
        return renders(*args)

    monkeypatch.setattr("kerngen.compiler.render.source_of", render)
    assert derive(store).config == {"block_n": 2}
    assert renders.count > 0


def test_what_others_write_while_one_renders_counts(
    store: Store, renders: Renders, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The faster trial that came in between wins, and nobody starves."""
    renders.closure = "second"
    left = [3, 4, 5, 6, 7]

    def render(*args: Any) -> str:
        if left:
            n = left.pop(0)
            with Store.open(path) as other, pytest.MonkeyPatch.context() as m:
                m.setattr(other, "recompute_winners", lambda *args: [])
                record(other, KERNEL, n, 10.0 - n)
        return renders(*args)

    monkeypatch.setattr("kerngen.compiler.render.source_of", render)
    winner = derive(store)
    assert winner.config == {"block_n": 7 - len(left)}
    assert len(store.measurements("toy")) == 2 + 5 - len(left)
