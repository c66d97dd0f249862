"""Gemma-4's attention by kerngen's kernels: which classes serve vLLM's layers is a module a release."""

from __future__ import annotations

from importlib import import_module

import vllm

from kerngen.vllm.plugin import release_of


def install() -> None:
    """Have vLLM know this release's backend as CUSTOM, and take it for Gemma-4 where no other one is named."""
    release = release_of(vllm.__version__).replace(".", "_")
    import_module(f"kerngen.vllm.attention_v{release}").install()
