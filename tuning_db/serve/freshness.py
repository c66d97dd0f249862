"""Whether a stored build is still what the kernel's templates render."""

from __future__ import annotations

import hashlib
from typing import Any

from kerngen.arch import find_arch
from kerngen.errors import KerngenError
from kerngen.render import source_of
from kerngen.templates.kernel import Kernel
from kerngen.tuning_db.serve.values import Build


def source_sha(source: str) -> str:
    return hashlib.sha256(source.encode()).hexdigest()


def is_current(kernel: Kernel, problem: Any, build: Build) -> bool:
    """True if rendering `problem` with the build's configuration gives the very source that was built.

    False too where that configuration no longer exists.
    """
    try:
        config = kernel.config_type(**build.config)
        return source_sha(source_of(kernel, problem, config, find_arch(build.arch))) == build.source_sha
    except (KerngenError, TypeError):
        return False
