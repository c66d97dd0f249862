"""The tests of this folder against the Python of each release of vLLM that kerngen.vllm supports: `make test-vllm`.

    python tests/in_vllm/run.py [RELEASE ...]      # 0.26: its last version; all that plugin.PARTS has if none is named

No GPU, and nothing of vLLM is installed: of each wheel the *.py files are kept in build/vllm, and what they import
beside this environment's packages lies there too. A first run downloads 300 MB a release.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BUILD = ROOT / "build" / "vllm"
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
# vLLM is built for Linux with CUDA; which Python its wheels are tagged for does not matter to what is read here.
WHEEL = ["--no-deps", "--only-binary", ":all:", "--python-version", "3.12", "--platform", "manylinux_2_28_x86_64"]


def packages() -> Path:
    """Where the small packages lie, for this Python."""
    wanted = (HERE / "requirements.txt").read_text()
    folder = BUILD / f"packages-{sys.version_info.major}.{sys.version_info.minor}"
    stamp = folder / "requirements.txt"
    if not stamp.is_file() or stamp.read_text() != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([*PIP, "install", "--no-deps", "--no-compile", "--only-binary", ":all:", "--target", folder,
                        "-r", HERE / "requirements.txt"], check=True)  # fmt: skip
        stamp.write_text(wanted)
    return folder


def python_of(release: str) -> Path:
    """Where the Python of that release's last version lies."""
    folder = BUILD / release
    if not folder.is_dir():
        with tempfile.TemporaryDirectory(dir=BUILD) as scratch:
            subprocess.run([*PIP, "download", f"vllm=={release}.*", "-d", scratch, *WHEEL], check=True)
            (wheel,) = Path(scratch).glob("*.whl")
            made = Path(scratch) / "python"
            with zipfile.ZipFile(wheel) as file:
                file.extractall(made, [n for n in file.namelist() if n.endswith(".py") or ".dist-info/" in n])
            made.rename(folder)
    return folder


def main(releases: list[str]) -> int:
    BUILD.mkdir(parents=True, exist_ok=True)
    if not releases:
        sys.path.insert(0, str(ROOT))
        from kerngen.vllm import PARTS

        releases = list(dict.fromkeys(r for part in PARTS.values() for r in part.releases))
    beside, failed = packages(), []
    for release in releases:
        path = os.pathsep.join(map(str, (ROOT, beside, python_of(release))))
        print(f"vLLM {release}", flush=True)
        tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--disable-warnings", str(HERE)]
        done = subprocess.run(tests, cwd=ROOT, env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"})
        failed += [release] if done.returncode else []
    if failed:
        print(f"kerngen.vllm does not work with the Python of vLLM {', '.join(failed)}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
