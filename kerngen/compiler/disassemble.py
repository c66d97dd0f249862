"""Machine code back to instructions, with the nvdisasm that is at hand."""

from __future__ import annotations

import subprocess
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from tempfile import TemporaryDirectory

from kerngen.compiler.compile import Cubin
from kerngen.errors import ToolchainError

# CUDA 13.1's and newer disassemble sm75 and newer; sm70 needs one of CUDA 12, which PyPI does not have by itself.
HINT = "install it: pip install nvidia-cuda-nvdisasm (sm75 and newer), or CUDA 12's: conda install cuda-nvdisasm=12.9"


def find_tools() -> list[str]:
    """Every nvdisasm here: on PATH, in NVIDIA's wheels, and in Triton, which torch with CUDA brings."""
    found = [which("nvdisasm")]
    for package, pattern in (("nvidia", "*/bin/nvdisasm"), ("triton", "backends/nvidia/bin/nvdisasm")):
        spec = find_spec(package)
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            found += map(str, sorted(Path(folder).glob(pattern), reverse=True))
    return list(dict.fromkeys(filter(None, found)))


def disassemble(cubin: Cubin) -> str:
    """The instructions of every entry (SASS), with their labels. Raises ToolchainError where no nvdisasm can do it."""
    reasons = []
    with TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin.image)
        for tool in find_tools():
            try:
                done = subprocess.run([tool, "--print-code", str(path)], capture_output=True, text=True, check=False)
            except OSError as e:
                reasons.append(f"{tool}: {e.strerror or e}")
                continue
            if done.returncode == 0:
                return done.stdout
            reasons.append(f"{tool}: {done.stderr.strip().splitlines()[-1] if done.stderr.strip() else 'failed'}")
    if not reasons:
        raise ToolchainError("SASS needs nvdisasm, and there is none on PATH or in a wheel", hint=HINT)
    raise ToolchainError(f"no nvdisasm here reads {cubin.arch} code: {'; '.join(reasons)}", hint=HINT)
