"""Runs one program of a large package without what the rest of the package needs: its own modules as they are, and
stand-ins for those of the package that it only imports.

vLLM's and SGLang's benchmark clients speak HTTP alone, but importing either package loads CUDA libraries and compilers.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any


class _StandIn(ModuleType):
    """A module that has whatever is asked of it: an empty class each."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {})
        setattr(self, name, made)
        return made


class _Finder(MetaPathFinder, Loader):
    """real: modules of `package` that are loaded, with what lies below them. given: by module, what it has."""

    def __init__(self, package: str, real: Sequence[str], given: Mapping[str, Mapping[str, Any]]) -> None:
        spec = PathFinder.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise SystemExit(f"{package} is not installed")
        self._package, self._root = package, Path(next(iter(spec.submodule_search_locations)))
        self._real, self._given = real, given

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != self._package and not name.startswith(f"{self._package}."):
            return None
        if any(name == real or name.startswith(f"{real}.") for real in self._real):
            return PathFinder.find_spec(name, path)
        return importlib.util.spec_from_loader(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = _StandIn(spec.name)
        module.__path__ = [str(self._root.joinpath(*spec.name.split(".")[1:]))]
        vars(module).update(self._given.get(spec.name, {}))
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


def stand_in(package: str, real: Sequence[str], given: Mapping[str, Mapping[str, Any]]) -> None:
    """From here on `package` consists of `real` modules, and of stand-ins that have what `given` says."""
    sys.meta_path.insert(0, _Finder(package, real, given))
