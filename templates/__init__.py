"""The kernels: one folder each. Adding a folder adds a kernel; deleting it removes it everywhere.

Kernel folders lie here, in the folders that KERNGEN_TEMPLATES names (`kerngen --templates` sets it), and in the
packages that an entry point of the group kerngen.templates names. All are imported as kerngen.templates.NAME, in worker
processes too, so a kernel's own repository needs nothing of this one.
"""

from __future__ import annotations

import logging
import os
import sys
from functools import cache
from importlib import invalidate_caches
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from kerngen.errors import TemplateError, UnknownName, UsageError
from kerngen.templates.contract import load_spec
from kerngen.templates.kernel import ROOT, Case, Cost, Kernel, Launch, Tolerance

__all__ = [
    "TEMPLATES_VARIABLE",
    "Case",
    "Cost",
    "Kernel",
    "Launch",
    "Tolerance",
    "broken_kernels",
    "find_kernel",
    "kernel_names",
    "rescan",
]

log = logging.getLogger(__name__)

TEMPLATES_VARIABLE = "KERNGEN_TEMPLATES"  # folders of kernel folders, separated as PATH's
ENTRY_POINTS = "kerngen.templates"
COMMON = "common"  # what a root's kernels share: no kernel


def kernel_names() -> tuple[str, ...]:
    """Every kernel, sorted. A folder that is not as the contract asks is left out, with one warning."""
    return tuple(sorted(name for name, found in _library().kernels().items() if isinstance(found, Kernel)))


def broken_kernels() -> tuple[TemplateError, ...]:
    """What is wrong with the folders that `kernel_names` leaves out."""
    return tuple(found for found in _library().kernels().values() if isinstance(found, TemplateError))


def find_kernel(name: str) -> Kernel:
    """The kernel called `name`. Raises UnknownName, listing the known ones, or TemplateError if its folder is wrong."""
    library = _library()
    if name not in library.folders:
        raise UnknownName("kernel", name, kernel_names())
    if isinstance(found := library.load(name), TemplateError):
        raise found.with_traceback(None)
    return found


def rescan() -> None:
    """Look for kernel folders anew when one is asked for next: after one was made or removed in this process."""
    global _at_hand
    _at_hand = None
    invalidate_caches()


class _Library:
    """The kernel folders below some roots: found at once, loaded when they are asked for."""

    def __init__(self, roots: tuple[Path, ...]) -> None:
        """Raises UsageError where a root is no folder, or where two of them have a kernel or a shared file alike."""
        self.folders: dict[str, Path] = {}
        self._loaded: dict[str, Kernel | TemplateError] = {}
        self._complained = False
        shared: dict[str, Path] = {}
        for root in roots:
            _require_root(root)
            for spec in sorted(root.glob("[!.]*/spec.py")):
                _add(self.folders, "kernel", spec.parent.name, spec.parent.resolve())
            for path in sorted(p for p in root.glob(f"{COMMON}/**/*") if p.suffix in (".py", ".cuh")):
                _add(shared, "shared file", path.relative_to(root).as_posix(), path)

    def load(self, name: str) -> Kernel | TemplateError:
        if name not in self._loaded:
            try:
                self._loaded[name] = Kernel(name, load_spec(name, self.folders[name]))
            except TemplateError as e:
                self._loaded[name] = e
        return self._loaded[name]

    def kernels(self) -> dict[str, Kernel | TemplateError]:
        found = {name: self.load(name) for name in self.folders}
        if not self._complained:
            self._complained = True
            for error in found.values():
                if isinstance(error, TemplateError):
                    log.warning("%s; left out", error.message)
        return found


def _add(found: dict[str, Path], kind: str, name: str, path: Path) -> None:
    if name in found:
        raise UsageError(f"two folders have a {kind} {name}: {found[name]} and {path}", hint="rename one of them")
    found[name] = path


def _require_root(root: Path) -> None:
    if not root.is_dir():
        raise UsageError(f"{root} is no folder of kernel folders",
                         hint=f"set {TEMPLATES_VARIABLE} or --templates to one that is there")  # fmt: skip
    ours = {COMMON, *(p.stem for p in ROOT.glob("*.py"))}  # found first by an import
    taken = [root / name / "spec.py" for name in ours] + [root / COMMON / "__init__.py"]
    for path in filter(Path.exists, taken):
        raise UsageError(f"{path}: {path.parent.name} is a name of kerngen.templates' own", hint="rename or remove it")


def _roots() -> tuple[Path, ...]:
    """This folder, then KERNGEN_TEMPLATES' in order, then the entry points', each once. They need not exist."""
    named = [Path(p).absolute() for p in os.environ.get(TEMPLATES_VARIABLE, "").split(os.pathsep) if p]
    return tuple(dict.fromkeys(p.resolve() for p in (ROOT, *named, *_announced())))


@cache
def _announced() -> tuple[Path, ...]:
    """Folders of the packages that entry points name. One that cannot be found is left out with a warning."""
    found: list[Path] = []
    for entry in entry_points(group=ENTRY_POINTS):
        try:
            spec = find_spec(entry.module)
        except Exception as e:  # the package above it may fail to import in any way
            log.warning("entry point %s = %s of %s: %s; left out", entry.name, entry.value, ENTRY_POINTS, e)
            continue
        if spec is None or not spec.submodule_search_locations:
            log.warning("entry point %s = %s of %s is no package; left out", entry.name, entry.value, ENTRY_POINTS)
            continue
        found += map(Path, spec.submodule_search_locations)
    return tuple(found)


_at_hand: tuple[str, _Library] | None = None


def _library() -> _Library:
    """The kernels of KERNGEN_TEMPLATES as it is now."""
    global _at_hand
    named = os.environ.get(TEMPLATES_VARIABLE, "")
    if _at_hand is None or _at_hand[0] != named:
        roots = _roots()
        _import_from(roots)
        _at_hand = named, _Library(roots)
    return _at_hand[1]


def _import_from(roots: tuple[Path, ...]) -> None:
    """Let kerngen.templates.NAME be imported from `roots`, and from no other folder that it was imported from."""
    outside = [str(root) for root in roots if root != ROOT]
    if __path__[1:] == outside:
        return
    __path__[1:] = outside
    invalidate_caches()
    for name, module in list(sys.modules.items()):
        if name.startswith(f"{__name__}.") and not _lies_in(module, roots):
            del sys.modules[name]
            globals().pop(name.removeprefix(f"{__name__}."), None)


def _lies_in(module: object, roots: tuple[Path, ...]) -> bool:
    places = [getattr(module, "__file__", None) or "", *getattr(module, "__path__", ())]
    return any(Path(p).resolve().is_relative_to(root) for p in places if p for root in roots)


_import_from(_roots())
