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
from kerngen.tuning_db import Measurement, Store, problem_key
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


# ---- a choice holds for a revision of its body, not for a text


def of_revision(version: int, revision: int = 1) -> Kernel:
    return make_kernel(version=version, revision=revision)


@pytest.fixture
def tuned(path: Path, renders: Renders) -> Iterator[Store]:
    """By version 1 of the kernel: block_n 2 takes 10 us, 1 takes 20."""
    with Store.open(path) as s:
        for n, us in ((1, 20.0), (2, 10.0)):
            record(s, of_revision(1), n, us)
        yield s


def test_a_choice_holds_for_another_source_of_the_revision(tuned: Store) -> None:
    for _ in range(2):  # read as it was chosen for the earlier source, and chosen anew
        found = ask([tuned], of_revision(2))
        assert found is not None
        assert (found.config, found.latency_us, found.stale) == ({"block_n": 2}, 10.0, False)
        assert found.cubin is None, "machine code of another source is not served"
        assert "earlier source" in found.source
        chosen = derive(tuned, of_revision(2))
        assert (chosen.stale, chosen.why["earlier"]) == (False, True)


def test_it_does_not_hold_for_another_revision(tuned: Store) -> None:
    found = ask([tuned], of_revision(2, revision=2))
    assert found is not None
    assert found.stale
    assert derive(tuned, of_revision(2, revision=2)).stale
    record(tuned, of_revision(2, revision=2), 1, 30.0)
    assert derive(tuned, of_revision(2, revision=2)).latency_us == 30.0
    assert ask([tuned], of_revision(1)) != ask([tuned], of_revision(2, revision=2))


def test_what_was_tried_of_todays_source_says_more(tuned: Store) -> None:
    """Whether it is slower than it was or wrong: of that configuration nothing earlier holds."""
    newer = of_revision(2)
    record(tuned, newer, 2, 25.0)
    assert (derive(tuned, newer).config, derive(tuned, newer).latency_us) == ({"block_n": 1}, 20.0)
    record(tuned, newer, 1, 40.0)
    assert (derive(tuned, newer).config, derive(tuned, newer).latency_us) == ({"block_n": 2}, 25.0)


def test_a_wrong_result_of_todays_source_condemns_what_was_right(tuned: Store) -> None:
    newer, key = of_revision(2), problem_key(KERNEL, Problem())
    record(tuned, newer, 2, 1.0)
    (build,) = (b for b in tuned.builds(key.static_key).values() if b.source_sha != right_of(tuned, 2).source_sha
                and b.config == {"block_n": 2})  # fmt: skip
    tuned.add_measurement(Measurement(key, "sm90", H200, {"block_n": 2}, build.id, "wrong_result", "measured",
                                      reason="7 of 9 values differ"))  # fmt: skip
    assert derive(tuned, newer).config == {"block_n": 1}
    assert derive(tuned, of_revision(1)).config == {"block_n": 2}, "the earlier source was right"


def right_of(store: Store, block_n: int) -> Any:
    return store.builds(problem_key(KERNEL, Problem()).static_key)[build_of(store, block_n)]


def test_a_prediction_holds_as_a_measurement_does(path: Path, renders: Renders) -> None:
    with Store.open(path) as store:
        record(store, of_revision(1), 2, 10.0, provenance="predicted")
        assert not derive(store, of_revision(2)).stale
        assert derive(store, of_revision(2, revision=2)).stale
