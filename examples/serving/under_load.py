"""Serves a model and puts the server under the loads that a chat and a summary are, with drafts and without.

    python examples/serving/under_load.py gemma-4-31b --generated --out results
    python examples/serving/under_load.py examples/tiny/gemma-4-tiny-w4a16 --shrink 16 --vocab 1024 --out results

For each, `kerngen serve` is started and `kerngen bench serve` asks it. What that found is printed, and left in OUT as
JSON.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import threading
import time
from itertools import product
from pathlib import Path

from kerngen.cli.bench_serve import print_runs

# Tokens of prompts, of answers, requests at once.
LOADS = {"chat": (1024, 1024, 80), "summary": (8192, 1024, 32)}
START_S = 400.0


class Server:
    """`kerngen serve`, as long as this lasts."""

    def __init__(self, *options: str) -> None:
        print("$ kerngen serve", *options, flush=True)
        self.began = time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kerngen", "serve", *options, "--port", "0"], stderr=subprocess.PIPE, text=True
        )
        self._said: list[str] = []
        self._is_up = threading.Event()
        self.url = ""
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._said.append(line)
            if found := re.search(r"http://\S+:\d+", line):
                self.url = found[0]
                self._is_up.set()
        self._is_up.set()

    def __enter__(self) -> Server:
        if not self._is_up.wait(START_S) or not self.url:
            self._process.kill()
            sys.exit("the server did not start:\n" + "".join(self._said))
        print(f"ready after {time.monotonic() - self.began:.0f} s: {self._said[-2].strip()}", flush=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
        print(*self._said[-1:], sep="", end="", flush=True)


def _loads(text: str) -> list[str]:
    if unknown := set(names := text.split(",")) - set(LOADS):
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: no such load; there are {', '.join(LOADS)}")
    return names


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("model")
    asked.add_argument("--generated", action="store_true")
    asked.add_argument("--loads", type=_loads, default="chat,summary", help=f"of {', '.join(LOADS)}")
    asked.add_argument("--drafting", choices=("off", "on", "both"), default="both")
    asked.add_argument("--sweep", default="2", help="rates below saturation; 0 for saturation alone")
    asked.add_argument("--waves", type=int, default=2, help="of as many requests as are at work at once, at most")
    asked.add_argument("--seconds", default="30", help="in which the requests of a rate come")
    asked.add_argument("--shrink", type=int, default=1, help="all lengths and numbers are divided by it")
    asked.add_argument("--vocab", default="32000")
    asked.add_argument("--serve", default="", help="further options of kerngen serve, as one text")
    asked.add_argument("--out", type=Path, default=Path("under-load"))
    told = asked.parse_args()
    told.out.mkdir(parents=True, exist_ok=True)
    loads = {name: tuple(max(n // told.shrink, 1) for n in LOADS[name]) for name in told.loads}
    draftings = ("off", "on") if told.drafting == "both" else (told.drafting,)
    failed = 0
    for (name, (prompt, answer, count)), drafting in product(loads.items(), draftings):
        options = ["--context", str(prompt + answer + 8), "--max-batch", str(count), *told.serve.split()]
        options += [*(["--generated"] if told.generated else []), *([] if drafting == "on" else ["--no-draft"])]
        with Server(told.model, *options) as server:
            print(f"{name}, drafting {drafting}", flush=True)
            command = [sys.executable, "-m", "kerngen", "bench", "serve", server.url, "--json"]
            numbers = {"prompt-tokens": prompt, "answer-tokens": answer, "concurrency": count, "vocab": told.vocab,
                       "requests": max(told.waves * count, 2), "seconds": told.seconds}  # fmt: skip
            if told.sweep != "0":
                numbers["sweep"] = told.sweep
            command += [part for key, value in numbers.items() for part in (f"--{key}", str(value))]
            found = subprocess.run(command, stdout=subprocess.PIPE, text=True)
            failed += found.returncode != 0
            (told.out / f"{name}-draft-{drafting}.json").write_text(found.stdout)
            if found.stdout:
                print_runs(json.loads(found.stdout)["runs"])
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
