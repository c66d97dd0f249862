"""Tries clients that everyone has against `kerngen serve` of tiny checkpoints, on the CPU: each as it is installed.

    python examples/serving/clients/run.py                        # all of them
    python examples/serving/clients/run.py langchain litellm      # some
    python examples/serving/clients/run.py --keep ~/.cache/kerngen-clients

Each client gets a virtual environment of its own, with the versions of requirements/NAME*.txt: they come from PyPI and
take gigabytes. The environments are removed unless they are kept. Exit code 1 where a client had not all that it needs.
Clients that send images and sound send them to a second server, of the checkpoint that sees and hears.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
TINY = ROOT / "examples" / "tiny"
SEEING = ("openai", "anthropic", "langchain", "litellm")
CLIENTS = (*SEEING, "guidellm", "aiperf", "vllm_bench", "sglang_bench")
KEY = "secret"
CLIENT_S = 900


def main() -> int:
    parser = argparse.ArgumentParser(description="Tries clients against `kerngen serve` of the tiny checkpoint.")
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=f"of {', '.join(CLIENTS)}; default: all")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="where environments are kept, and found again")
    asked = parser.parse_args()
    if unknown := set(asked.clients) - set(CLIENTS):
        parser.error(f"{', '.join(sorted(unknown))}: there is {', '.join(CLIENTS)}")
    failed = []
    with ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="kerngen-clients-"))
        model = _with_tools(Path(scratch))
        drafting = ("--draft", TINY / "gemma-4-tiny-assistant", "--max-batch", "8", "--max-queue", "48")
        url = stack.enter_context(_served(model, *drafting))
        seeing = stack.enter_context(_served(TINY / "gemma-4-tiny-media", "--media", "images,audio"))
        for name in asked.clients or CLIENTS:
            print(f"-- {name}", flush=True)
            began = time.monotonic()
            try:
                python = _environment(name, asked.keep or Path(scratch))
                env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
                more = [f"{seeing}/v1"] if name in SEEING else [model]
                subprocess.run([python, HERE / f"with_{name}.py", f"{url}/v1", KEY, *more], check=True,
                               timeout=CLIENT_S, env=env)  # fmt: skip
            except (subprocess.SubprocessError, OSError) as e:
                print(f"{name}: {e}", file=sys.stderr)
                failed.append(name)
            print(f"-- {name}: {'FAILED' if name in failed else 'ok'}, {time.monotonic() - began:.0f} s", flush=True)
    return 1 if failed else 0


def _with_tools(scratch: Path) -> Path:
    """The folder of the tiny checkpoint, with a template that knows tools."""
    model = scratch / "gemma-4-tiny-w4a16"
    model.mkdir()
    for file in (TINY / "gemma-4-tiny-w4a16").iterdir():
        (model / file.name).symlink_to(file if file.name != "chat_template.jinja" else HERE / "tools.jinja")
    return model


@contextmanager
def _served(model: Path, *options: str | Path) -> Iterator[str]:
    """A server's address."""
    process = subprocess.Popen(
        [sys.executable, "-m", "kerngen", "serve", model, "--port", "0", "--backend", "torch", "--context", "1024",
         "--api-key", KEY, *options],
        cwd=ROOT, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if found := re.search(r"at (http://\S+?:\d+)", line):
                yield found[1]
                return
            print(line, end="")
        raise SystemExit("the server did not start")
    finally:
        process.terminate()
        process.wait()


def _environment(name: str, folder: Path) -> Path:
    """The Python of an environment that has all of requirements/NAME*.txt, and nothing else."""
    python = folder / name / "bin" / "python"
    if not python.exists():
        venv.create(folder / name, with_pip=True)
    for wanted in sorted((HERE / "requirements").glob(f"{name}*.txt")):
        subprocess.run([python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps", "-r", wanted],
                       check=True)  # fmt: skip
    return python


if __name__ == "__main__":
    sys.exit(main())
