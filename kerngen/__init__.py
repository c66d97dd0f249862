"""kerngen: write a GPU kernel once, compile it anywhere, tune it, and run Gemma-4 with the winners.

    import kerngen

    cubin = kerngen.compile_kernel("rmsnorm", {"hidden": 5376}, target="sm90")     # no GPU needed
    winner = kerngen.find_winner("rmsnorm", {"hidden": 5376}, target="H200")       # what a tune found, or None
    y = kerngen.ops.rmsnorm(x, weight, 1e-6, x.dtype)                              # on torch tensors
    answer = kerngen.load("gemma-4-31b-it").generate("Why is the sky blue?").text

A name is imported when it is first used: `import kerngen` loads neither torch nor CuPy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kerngen import ops
    from kerngen.api import compile_kernel, find_winner
    from kerngen.compiler.compile import Cubin
    from kerngen.errors import (
        CacheError,
        CheckpointError,
        CompileCancelled,
        CompileError,
        ConfigRefused,
        CorruptRecord,
        DatabaseError,
        DeviceError,
        KerngenError,
        LaunchError,
        NumericsError,
        PageError,
        ProblemError,
        RankFailed,
        RecordingError,
        SchemaTooNew,
        TemplateError,
        ToolchainError,
        TrustError,
        TuningMiss,
        UnknownName,
        UsageError,
    )
    from kerngen.runtime.session import Completion, CompletionStream, Session, load
    from kerngen.tuning_db import Winner

__version__ = "0.2.0"
__all__ = [
    "CacheError",
    "CheckpointError",
    "CompileCancelled",
    "CompileError",
    "Completion",
    "CompletionStream",
    "ConfigRefused",
    "CorruptRecord",
    "Cubin",
    "DatabaseError",
    "DeviceError",
    "KerngenError",
    "LaunchError",
    "NumericsError",
    "PageError",
    "ProblemError",
    "RankFailed",
    "RecordingError",
    "SchemaTooNew",
    "Session",
    "TemplateError",
    "ToolchainError",
    "TrustError",
    "TuningMiss",
    "UnknownName",
    "UsageError",
    "Winner",
    "__version__",
    "compile_kernel",
    "find_winner",
    "load",
    "ops",
]
_HOME = {
    "Completion": "runtime.session",
    "CompletionStream": "runtime.session",
    "Cubin": "compiler.compile",
    "Session": "runtime.session",
    "Winner": "tuning_db",
    "compile_kernel": "api",
    "find_winner": "api",
    "load": "runtime.session",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "ops":
        return import_module(f"{__name__}.ops")
    return getattr(import_module(f"{__name__}.{_HOME.get(name, 'errors')}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
