"""kerngen's kernels inside vLLM: an out-of-tree plug-in, which vLLM finds by its entry point (docs/vllm.md).

Nothing here is imported by the rest of kerngen, and nothing here imports vLLM before vLLM calls `register`.
"""

from kerngen.vllm.plugin import PARTS, register

__all__ = ["PARTS", "register"]
