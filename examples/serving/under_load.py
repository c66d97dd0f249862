"""Serves a model and puts the server under the loads that a chat and a summary are, with drafts and without.

    python examples/serving/under_load.py gemma-4-31b --generated --out results
    python examples/serving/under_load.py gemma-4-31b --generated --server vllm --sweep 0 --out results
    python examples/serving/under_load.py examples/tiny/gemma-4-tiny-w4a16 --shrink 16 --vocab 1024 --out results

For each, `kerngen serve` is started and `kerngen bench serve` asks it. What that found is printed, and left in OUT as
JSON. With --server vllm it is vLLM that serves, without drafts: a folder as it is, or the same shapes with generated
weights (peer.py).
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Mapping
from itertools import product
from pathlib import Path

import peer

from kerngen.cli.bench_serve import print_runs

# Tokens of prompts, of answers, requests at once.
LOADS = {"chat": (1024, 1024, 80), "summary": (8192, 1024, 32)}
START_S = 900.0


class Server:
    """A server's process, as long as this lasts: it is up when /health answers."""

    def __init__(self, command: list[str], environment: Mapping[str, str]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._began = time.monotonic()
        self._process = subprocess.Popen(
            [*command, "--port", str(port)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=os.environ | dict(environment),
        )  # fmt: skip
        self._said: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        self._said.extend(self._process.stdout)

    def __enter__(self) -> Server:
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() - self._began > START_S:
                self._process.kill()
                self._reader.join(10)
                sys.exit("the server did not start:\n" + "".join(self._said[-200:]))
            time.sleep(0.2)
        print(f"ready after {time.monotonic() - self._began:.0f} s", flush=True)
        return self

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._reader.join(10)
        print(*self._said[-1:], sep="", end="", flush=True)


def _loads(text: str) -> list[str]:
    if unknown := set(names := text.split(",")) - set(LOADS):
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: no such load; there are {', '.join(LOADS)}")
    return names


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("model")
    asked.add_argument("--generated", action="store_true")
    asked.add_argument("--server", choices=("kerngen", "vllm"), default="kerngen")
    asked.add_argument("--python", default=sys.executable, help="of the environment that vLLM is installed in")
    asked.add_argument("--loads", type=_loads, default="chat,summary", help=f"of {', '.join(LOADS)}")
    asked.add_argument("--drafting", choices=("off", "on", "both"), default="both")
    asked.add_argument("--sweep", default="2", help="rates below saturation; 0 for saturation alone")
    asked.add_argument("--waves", type=int, default=2, help="of as many requests as are at work at once, at most")
    asked.add_argument("--seconds", default="30", help="in which the requests of a rate come")
    asked.add_argument("--shrink", type=int, default=1, help="all lengths and numbers are divided by it")
    asked.add_argument("--vocab", default="32000")
    asked.add_argument("--serve", default="", help="further options of the server, as one text: --serve=--max-queue=9")
    asked.add_argument("--out", type=Path, default=Path("under-load"))
    told = asked.parse_args()
    told.out.mkdir(parents=True, exist_ok=True)
    loads = {name: tuple(max(n // told.shrink, 1) for n in LOADS[name]) for name in told.loads}
    draftings = ("off", "on") if told.drafting == "both" else (told.drafting,)
    failed = 0
    with tempfile.TemporaryDirectory(prefix="under-load-") as scratch:
        if told.server == "vllm":
            draftings = ("off",)
            folder = peer.generated(told.model, Path(scratch)) if told.generated else told.model
        for (name, (prompt, answer, count)), drafting in product(loads.items(), draftings):
            length, environment = prompt + answer + 8, {}
            if told.server == "vllm":
                command = peer.command(told.python, folder, length, generated=told.generated)
                environment = peer.environment(Path(scratch))
            else:
                command = [sys.executable, "-m", "kerngen", "serve", told.model, "--context", str(length)]
                command += ["--max-batch", str(count), *(["--generated"] if told.generated else [])]
                command += [] if drafting == "on" else ["--no-draft"]
            command += told.serve.split()
            print("$", *command, flush=True)
            with Server(command, environment) as server:
                print(f"{name}, drafting {drafting}", flush=True)
                asking = [sys.executable, "-m", "kerngen", "bench", "serve", server.url, "--json"]
                numbers = {"prompt-tokens": prompt, "answer-tokens": answer, "concurrency": count, "vocab": told.vocab,
                           "requests": max(told.waves * count, 2), "seconds": told.seconds}  # fmt: skip
                if told.sweep != "0":
                    numbers["sweep"] = told.sweep
                asking += [part for key, value in numbers.items() for part in (f"--{key}", str(value))]
                found = subprocess.run(asking, stdout=subprocess.PIPE, text=True)
                failed += found.returncode != 0
                which = name if told.server == "kerngen" else f"{name}-{told.server}"
                (told.out / f"{which}-draft-{drafting}.json").write_text(found.stdout)
                if found.stdout:
                    print_runs(json.loads(found.stdout)["runs"])
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
