"""W4A16 experts by kerngen's kernels: which method serves vLLM's is a module a release."""

from __future__ import annotations

from importlib import import_module

import vllm

from kerngen.vllm.plugin import release_of


def install() -> None:
    """Have vLLM's choice of a method for experts of compressed-tensors checkpoints begin with this release's."""
    import_module(f"kerngen.vllm.moe_v{release_of(vllm.__version__).replace('.', '_')}").install()
