"""Whether a stored build is still what the kernel's templates render, and whether what was measured of it still holds.

Two questions. Machine code may run only where the build is current: today's templates render the very source. A choice
holds longer: as long as the body of its configuration has the revision (`Body.revision`) that it had then.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from kerngen.arch import find_arch
from kerngen.compiler.compile import DEFAULT_OPTIONS
from kerngen.compiler.source import source_digest
from kerngen.errors import KerngenError
from kerngen.templates.kernel import Kernel
from kerngen.tuning_db.read.ids import canonical
from kerngen.tuning_db.read.values import Build

# Ends the digest of a source as it is filed: the digest is of the source's normal form (kerngen/identity.py). One that
# does not end so was filed by an older kerngen, and is of the text with its comments.
_OF_NORMAL_FORM = ".2"


def source_sha(source: str) -> str:
    """What a build of `source` is filed by: the same for two texts that differ in comments and white space."""
    return source_digest(source) + _OF_NORMAL_FORM


def is_filed_by(source: str, sha: str) -> bool:
    """Whether `sha`, or the first digits of one, was filed for `source`: by this kerngen, or by an older one."""
    return source_sha(source).startswith(sha) or hashlib.sha256(source.encode()).hexdigest().startswith(sha)


def revision_of(kernel: Kernel, config: Mapping[str, Any], arch: str) -> str | None:
    """What is noted of a build for the revision of its body; None where the kernel has no such configuration.

    The body follows from the build's configuration and arch, so its revision alone is noted.
    """
    try:
        return f"revision {kernel.body(kernel.config_type(**config), find_arch(arch)).revision}"
    except (KerngenError, TypeError):
        return None


def notes_of(closure: str, kernel: Kernel, config: Mapping[str, Any], arch: str) -> tuple[str, ...]:
    """What is noted of a build whose source kernel code with this closure renders (Store.add_build)."""
    revision = revision_of(kernel, config, arch)
    return (closure,) if revision is None else (closure, revision)


def revision_noted(notes: Iterable[str]) -> int:
    """The newest revision among what was noted of a build; 0 where none was."""
    numbers = (note.removeprefix("revision ") for note in notes if note.startswith("revision "))
    return max((int(n) for n in numbers if n.isdecimal()), default=0)


class Freshness:
    """Tells current builds of one static problem from stale ones, and renders no source twice.

    here: the closure of the kernel's code. digests: build id -> what gives its source (Store.digests). `builds` may be
    any: those that `here` gives are current for certain, and another build of the same configuration is judged by their
    source. Only where none of them is known is a source rendered.
    """

    def __init__(
        self, kernel: Kernel, here: str, digests: Mapping[str, Collection[str]], builds: Iterable[Build] = ()
    ) -> None:
        self.kernel = kernel
        self.found: list[tuple[str, str]] = []  # (build, what gives its source) of what is current, and was not known
        self._here, self._digests = here, digests
        self._known = {id for id, given in digests.items() if here in given}
        # Of each configuration, what its source is filed by now: of the normal form, and of the text where it is known.
        self._sources: dict[tuple[str, str], set[str]] = {}
        self._rendered: set[tuple[str, str]] = set()
        for build in builds:
            if build.id in self._known:
                self._sources.setdefault(_what(build), set()).update(self._names(build))

    def is_current(self, problem: Any, build: Build) -> bool:
        """True if `problem` with the build's configuration gives the very source that was built, compiled as today."""
        if build.options != DEFAULT_OPTIONS:
            return False
        what, names = _what(build), self._names(build)
        sources = self._sources.setdefault(what, set())
        if build.id in self._known:
            sources.update(names)
            return True
        is_told = bool(_of_normal_form(sources) and _of_normal_form(names))  # the normal forms of both are known
        if sources.isdisjoint(names) and what not in self._rendered and not is_told:
            self._rendered.add(what)
            sources.update(self._render(problem, build))
        if sources.isdisjoint(names):
            return False
        self._known.add(build.id)
        self.found.append((build.id, self._here))
        if not build.source_sha.endswith(_OF_NORMAL_FORM):
            self.found += [(build.id, sha) for sha in _of_normal_form(sources) - names]
        return True

    def holds(self, build: Build) -> bool:
        """True if the build was current when its body had the revision that it has today, and is compiled as today."""
        noted = revision_of(self.kernel, build.config, build.arch) in self._digests.get(build.id, ())
        return noted and build.options == DEFAULT_OPTIONS

    def notes(self, builds: Iterable[Build]) -> Iterator[tuple[str, str]]:
        """(build, what to note of it) of those that turned out to be current. builds: all there are, any of which may
        have been current before anybody noted revisions.
        """
        yield from self.found
        for build in builds:
            if build.id in self._known and build.options == DEFAULT_OPTIONS:
                revision = revision_of(self.kernel, build.config, build.arch)
                if revision is not None and revision not in self._digests.get(build.id, ()):
                    yield build.id, revision

    def _names(self, build: Build) -> set[str]:
        """All that the build's source is known to be filed by."""
        return {build.source_sha, *_of_normal_form(self._digests.get(build.id, ()))}

    def _render(self, problem: Any, build: Build) -> set[str]:
        """What the source that is rendered now is filed by, nothing where that configuration no longer exists."""
        from kerngen.compiler.render import source_of  # Jinja is for those that must render

        try:
            config = self.kernel.config_type(**build.config)
            source = source_of(self.kernel, problem, config, find_arch(build.arch))
        except (KerngenError, TypeError):
            return set()
        return {source_sha(source), hashlib.sha256(source.encode()).hexdigest()}


def _of_normal_form(shas: Iterable[str]) -> set[str]:
    return {sha for sha in shas if sha.endswith(_OF_NORMAL_FORM)}


def _what(build: Build) -> tuple[str, str]:
    return build.arch, canonical(build.config)
