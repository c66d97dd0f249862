"""Writes a bundle (`kerngen compile --model NAME -o FILE`): the chosen winners, and all machine code that will run."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kerngen.compiler.builds import Build, Built
from kerngen.compiler.compile import Cubin, nvrtc_version
from kerngen.compiler.source_digest import source_digest_of
from kerngen.errors import UsageError
from kerngen.system.files import require_place
from kerngen.templates.kernel import fields_of, static_fields
from kerngen.tuning_db.dist.export import Shipment, shipment
from kerngen.tuning_db.read.freshness import notes_of
from kerngen.tuning_db.read.sealed import SUFFIX, is_sealed_file

if TYPE_CHECKING:
    from kerngen.arch import Target
    from kerngen.runtime.selection import Choice
    from kerngen.tuning_db import Store, Winner
    from kerngen.tuning_db.dist.keys import SecretKey


def require_free(path: Path) -> None:
    """Raises UsageError where something lies at `path` that is no bundle, KerngenError where nothing can be written."""
    if path.is_dir():
        raise UsageError(f"{path} is a folder, and a bundle is one file", hint=f"-o {path / ('bundle' + SUFFIX)}")
    if os.path.lexists(path) and not is_sealed_file(path):
        raise UsageError(f"{path} is there, and is no bundle", hint="name another file with -o")
    require_place(path)


def write_bundle(
    out: Path,
    models: Sequence[str],
    targets: Sequence[Target],
    found: tuple[Sequence[Store], Sequence[Choice], Sequence[Built]],
    anew: Callable[[list[Store]], list[Build]],
    build_all: Callable[[list[Build]], list[Built]],
    keys: Sequence[SecretKey],
) -> list[Built]:
    """Seal in `out` all that runs `models` on `targets`: what had to be built besides. Nothing is written where a build
    has failed (see is_whole): a run would find that out where it cannot compile.

    found: the databases that answered, what they chose, and what was built of it. anew: what other databases would have
    built. Raises OSError.
    """
    stores, chosen, built = found
    if not is_whole(built):
        return []
    with shipment() as made:
        _collect(made, stores, chosen)
        # Where two databases have a winner for one board and problem, the bundle has one: perhaps one not built yet.
        known = {(b.build.source, b.build.target.arch.name) for b in built}
        lacking = [b for b in anew([made.store]) if (b.source, b.target.arch.name) not in known]
        more = build_all(lacking) if lacking else []
        if not is_whole(more):
            return more
        _keep(made.store, [*built, *more])
        about: dict[str, Any] = {
            "boards": [[t.arch.name, t.device.name, t.device.num_sms] for t in targets],
            "models": list(models),
            "nvrtc": list(nvrtc_version()),
        }
        made.seal(out, {"contents": made.contents() | about}, keys)
    return more


def is_whole(built: Sequence[Built]) -> bool:
    """Whether all of it was built."""
    return all(b.image is not None for b in built)


def _collect(made: Shipment, stores: Sequence[Store], chosen: Sequence[Choice]) -> None:
    """The winners that were chosen, with all points of their lines: so a length between two is answered as before. And
    those of near problems that were chosen for others: a run then chooses them again.
    """
    lines: list[dict[str, Winner]] = [{} for _ in stores]
    for winner in (c.winner for c in chosen if c.winner is not None):
        if any((w := line.get(winner.id)) is not None and w.build_id == winner.build_id for line in lines):
            continue
        for store, line in zip(stores, lines, strict=True):
            around = store.winners(winner.kernel, arch=winner.arch, device=winner.device, cell=winner.problem.cell)
            alike = [w for w in around if w.provenance == winner.provenance]
            if any((w.id, w.build_id) == (winner.id, winner.build_id) for w in alike):
                line |= {w.id: w for w in alike}
                break
    for winner in (c.neighbour for c in chosen if c.neighbour is not None):
        for store, line in zip(stores, lines, strict=True):
            there = store.winners(winner.kernel, arch=winner.arch, device=winner.device, cell=winner.problem.cell)
            if same := [w for w in there if (w.id, w.build_id) == (winner.id, winner.build_id)]:
                line.setdefault(winner.id, same[0])
                break
    for store, line in zip(stores, lines, strict=True):
        made.add(store, list(line.values()))
    made.settle()


def _keep(store: Store, built: Sequence[Built]) -> None:
    """The machine code that no winner brought along: of default configurations, and of winners of an older source."""
    with store.transaction():
        for b in built:
            if isinstance(b.image, Cubin) and (b.build.stored is None or store.find_cubin(b.image.key) is None):
                kernel = b.build.kernel
                config = fields_of(b.build.config)
                store.add_build(b.image, kernel.name, b.build.source, config, static_fields(b.build.problem),
                                notes=notes_of(source_digest_of(kernel), kernel, config, b.image.arch))  # fmt: skip
