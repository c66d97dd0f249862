"""A bundle: one folder with everything that a model's kernels need on a host that must not, or cannot, compile.

    bundle.json      who made it, for which model and boards, and the NVRTC that its cubins are filed under
    tuning.sqlite    the winners that were chosen, with their machine code (see tuning_db/ship/extract.py)
    v1/…             a compile cache (cache.py) with whatever that database keeps no machine code of

`kerngen compile --model NAME -o FOLDER` makes one. `--bundle FOLDER`, or $KERNGEN_BUNDLE, has it answer in place of the
user's and the shipped databases: what was chosen there is what runs here. It is read and never written to.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kerngen import __version__
from kerngen.arch import Arch, Target
from kerngen.cache import CompileCache, compiling_is_forbidden
from kerngen.compile import DEFAULT_OPTIONS, Cubin, cache_key
from kerngen.errors import CacheError, TuningMiss, UsageError
from kerngen.files import open_regular, publish

if TYPE_CHECKING:
    from kerngen.tuning_db import Source, Store, Winner

DATABASE, FACTS = "tuning.sqlite", "bundle.json"
VERSION = 1
_MADE_BY = "kerngen compile --arch ARCH --model NAME -o FOLDER makes one"


@dataclass(frozen=True, slots=True)
class Bundle:
    """One that was opened. nvrtc: of the keys that its cubins are filed under. targets: (arch, board), by name."""

    folder: Path
    model: str
    nvrtc: tuple[int, int]
    targets: tuple[tuple[str, str], ...]

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> Bundle:
        """The bundle in `folder`. Raises UsageError where there is none, CacheError where it cannot be read."""
        path = Path(folder) / FACTS
        try:
            with open_regular(path) as f:
                facts: dict[str, Any] = json.loads(f.read())
            version = facts["bundle"]
        except (FileNotFoundError, NotADirectoryError):
            raise UsageError(f"{folder} is no bundle: there is no {FACTS} in it", hint=_MADE_BY) from None
        except OSError as e:
            raise CacheError(f"{path}: {e.strerror or e}") from e
        except (ValueError, TypeError, KeyError, RecursionError) as e:
            raise CacheError(f"{path} is damaged: {type(e).__name__}: {e}", hint=_MADE_BY) from e
        if version != VERSION:
            raise CacheError(f"{path} is a bundle of version {version}; this kerngen reads {VERSION}", hint=_MADE_BY)
        try:
            major, minor = facts["nvrtc"]
            targets = tuple((str(arch), str(board)) for arch, board in facts["targets"])
            return cls(Path(folder), str(facts["model"]), (int(major), int(minor)), targets)
        except (ValueError, TypeError, KeyError) as e:
            raise CacheError(f"{path} is damaged: {type(e).__name__}: {e}", hint=_MADE_BY) from e

    def sources(self) -> list[Source]:
        """Its database alone. Raises DatabaseError where that is not whole, or another user may have written it."""
        from kerngen.tuning_db import open_source

        return [open_source(self.folder / DATABASE, name="bundle")]

    def require(self, arch: Arch) -> None:
        """Raises UsageError unless it was made for `arch`."""
        arches = dict.fromkeys(a for a, _ in self.targets)
        if arch.name not in arches:
            raise UsageError(
                f"the bundle {self.folder} was made for {', '.join(arches)}, not for {arch}",
                hint=f"make one: kerngen compile --arch {arch} --model {self.model} -o FOLDER",
            )


class BundleCache(CompileCache):
    """A bundle's cubins, whatever NVRTC is here or none; behind them the user's cache, unless compiling is forbidden.

    Where it is, only what the bundle holds is served: so it is shown to be complete.
    """

    def __init__(self, bundle: Bundle) -> None:
        super().__init__()
        self._bundle = bundle
        self.shipped = CompileCache(bundle.folder, sealed=True)

    def get_or_compile(self, source: str, arch: Arch, options: tuple[str, ...] = DEFAULT_OPTIONS) -> Cubin:
        if (found := self.find(source, arch, options)) is not None:
            return found
        if compiling_is_forbidden():
            key = cache_key(source, arch.nvrtc_target, options, self._bundle.nvrtc)
            raise TuningMiss(
                f"{key[:16]} for {arch} is not in the bundle {self._bundle.folder}, and KERNGEN_NO_COMPILE forbids "
                "compiling it",
                hint=f"say what it lacks: kerngen doctor --model {self._bundle.model} --bundle {self._bundle.folder}",
            )
        return super().get_or_compile(source, arch, options)

    def find(self, source: str, arch: Arch, options: tuple[str, ...] = DEFAULT_OPTIONS) -> Cubin | None:
        """What the bundle holds; without KERNGEN_NO_COMPILE, or what the user's cache holds."""
        shipped = self.shipped.get(cache_key(source, arch.nvrtc_target, options, self._bundle.nvrtc))
        return shipped if shipped is not None or compiling_is_forbidden() else super().find(source, arch, options)


def sources_for(db_url: str | None, folder: str | None) -> tuple[list[Source], CompileCache, Bundle | None]:
    """Where winners and machine code come from: (databases, cache, the bundle if it is one).

    db_url: --db. folder: --bundle. With neither, $KERNGEN_BUNDLE counts, and then what `default_sources` finds. Raises
    UsageError where both are given, and as `Bundle.open` and `tuning_db.sources_for`.
    """
    from kerngen import tuning_db

    if db_url and folder:
        raise UsageError("--db and --bundle both say which configurations to run", hint="give one of them")
    if not db_url and (named := folder or os.environ.get("KERNGEN_BUNDLE")):
        bundle = Bundle.open(named)
        return bundle.sources(), BundleCache(bundle), bundle
    return tuning_db.sources_for(db_url or None), CompileCache(), None


def write_database(folder: Path, stores: Sequence[Store], winners: Iterable[Winner]) -> int:
    """Make `folder`'s database of `winners` of `stores`, in place of one that is there: how many it holds.

    Raises UsageError where a database is in the way that is not a bundle's, OSError.
    """
    from kerngen.tuning_db.ship.extract import extract

    if (folder / DATABASE).exists() and not (folder / FACTS).exists():
        raise UsageError(f"{folder / DATABASE} is there, and belongs to no bundle", hint="name another folder with -o")
    with tempfile.TemporaryDirectory(prefix="kerngen-bundle-") as scratch:
        made = Path(scratch) / DATABASE
        count = extract(stores, winners, made)
        publish(made.read_bytes(), folder / DATABASE)
    return count


def write_facts(folder: Path, model: str, nvrtc: tuple[int, int], targets: Iterable[Target]) -> None:
    """Make `folder` a bundle: to be written last. Raises OSError."""
    facts = {"bundle": VERSION, "kerngen": __version__, "model": model, "nvrtc": list(nvrtc),
             "targets": [[t.arch.name, t.device.name] for t in targets]}  # fmt: skip
    publish(json.dumps(facts, indent=1).encode(), folder / FACTS)
