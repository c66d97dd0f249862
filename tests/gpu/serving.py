"""A server on the GPUs of this machine, in processes of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def serving(model: str, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Its process and its URL, once it is ready. Left without an error, it must end in order on SIGTERM."""
    with subprocess.Popen(
        [sys.executable, "-m", "kerngen", "serve", model, "--port", "0", *options], stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stderr is not None
            said = []
            for line in process.stderr:
                said.append(line)
                if "http://" in line:
                    break
            url = next((word for line in said for word in line.split() if word.startswith("http://")), None)
            assert url is not None, said
            yield process, url
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()
