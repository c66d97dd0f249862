"""Gemma-4's MLP and norms by kerngen's kernels: which class serves vLLM's Gemma-4 is a module a release."""

from __future__ import annotations

import vllm
from vllm import ModelRegistry

from kerngen.vllm.plugin import release_of

NAME = "Gemma4ForCausalLM"  # the conditional classes have vLLM's registry make their text model by this name too


def install() -> None:
    """Have vLLM make its Gemma-4 by this release's class. vLLM imports that class when a model asks for it."""
    release = release_of(vllm.__version__).replace(".", "_")
    ModelRegistry.register_model(NAME, f"kerngen.vllm.model_v{release}:{NAME}")
