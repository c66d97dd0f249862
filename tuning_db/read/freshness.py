"""Whether a stored build is still what the kernel's templates render."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable
from typing import Any

from kerngen.arch import find_arch
from kerngen.compiler.compile import DEFAULT_OPTIONS
from kerngen.errors import KerngenError
from kerngen.templates.kernel import Kernel
from kerngen.tuning_db.read.ids import canonical
from kerngen.tuning_db.read.values import Build


def source_sha(source: str) -> str:
    return hashlib.sha256(source.encode()).hexdigest()


class Freshness:
    """Tells current builds of one static problem from stale ones, and renders no source twice.

    known: ids of builds that are current for certain (Store.rendered); `builds` may be any. Another build of the same
    configuration is judged by their source; only where none of them is known is a source rendered.
    """

    def __init__(self, kernel: Kernel, known: Collection[str], builds: Iterable[Build] = ()) -> None:
        self.kernel = kernel
        self.found: list[str] = []  # builds that are current, and were not known to be
        self._known = set(known)
        self._sources: dict[tuple[str, str], str | None] = {  # of each configuration, what is rendered now
            _what(build): build.source_sha for build in builds if build.id in self._known
        }

    def is_current(self, problem: Any, build: Build) -> bool:
        """True if `problem` with the build's configuration gives the very source that was built, compiled as today."""
        if build.options != DEFAULT_OPTIONS:
            return False
        what = _what(build)
        if build.id in self._known:
            self._sources[what] = build.source_sha
        elif what not in self._sources:
            self._sources[what] = self._rendered(problem, build)
        current = self._sources[what] == build.source_sha
        if current and build.id not in self._known:
            self._known.add(build.id)
            self.found.append(build.id)
        return current

    def _rendered(self, problem: Any, build: Build) -> str | None:
        """The digest of what is rendered now, None where that configuration no longer exists."""
        from kerngen.compiler.render import source_of  # Jinja is for those that must render

        try:
            config = self.kernel.config_type(**build.config)
            return source_sha(source_of(self.kernel, problem, config, find_arch(build.arch)))
        except (KerngenError, TypeError):
            return None


def _what(build: Build) -> tuple[str, str]:
    return build.arch, canonical(build.config)
