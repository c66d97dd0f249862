"""`kerngen serve`: a checkpoint behind an OpenAI-compatible server."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from kerngen.cli.loading import load_arguments, load_options

KEYS_VARIABLE = "KERNGEN_API_KEYS"  # several, with commas between them


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--host", default="127.0.0.1", show_default=True, help="0.0.0.0 for all of this machine's addresses.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0: any that is free.")
@click.option("--name", "names", multiple=True, help="What clients call it; repeatable. Default: MODEL's name.")
@click.option("--api-key", "keys", multiple=True, envvar=KEYS_VARIABLE, metavar="KEY",
              help=f"Asked of every request; repeatable. Default: ${KEYS_VARIABLE}, with commas.")  # fmt: skip
@click.option("--context", type=click.IntRange(16), default=None,
              help="Tokens of a sequence, prompt and answer. Default: the model's own, 32768 at most.")  # fmt: skip
@click.option("--max-batch", type=click.IntRange(1), default=64, show_default=True,
              help="Sequences at once, where memory takes as many.")  # fmt: skip
@click.option("--max-queue", type=click.IntRange(1), default=256, show_default=True,
              help="Sequences at work or waiting; more get 429.")  # fmt: skip
@click.option("--max-body-mb", type=click.IntRange(1), default=16, show_default=True, help="Of a request.")
@click.option("--drain", "drain_s", type=click.FloatRange(0), default=60.0, show_default=True,
              help="Seconds that answers have to end after SIGTERM or Ctrl-C.")  # fmt: skip
@click.option("--otlp-traces-endpoint", "traces", default=None, metavar="URL",
              help="Where OpenTelemetry's spans go. Default: as $OTEL_EXPORTER_OTLP_ENDPOINT says.")  # fmt: skip
@load_options
def serve(
    model: Path,
    host: str,
    port: int,
    names: tuple[str, ...],
    keys: tuple[str, ...],
    context: int | None,
    max_batch: int,
    max_queue: int,
    max_body_mb: int,
    drain_s: float,
    traces: str | None,
    **where: Any,
) -> None:
    """Serve the Gemma-4 checkpoint MODEL (a folder, or a name on the Hugging Face hub) to OpenAI's clients.

    Ends with exit code 0 after SIGTERM or Ctrl-C, once the answers that are under way have ended; with 1 where the
    engine has died.

    Example: kerngen serve ./gemma-4-31b-it-qat-w4a16-ct --port 8000
    """
    from kerngen.errors import UsageError
    from kerngen.progress import Reporter

    try:
        from kerngen.runtime.serve.server import Settings, run
    except ImportError as e:
        raise UsageError(f"the server is not installed: {e}", hint="pip install 'kerngen[serve]'") from e
    from kerngen.runtime.serve.service import Limits

    arguments = load_arguments(model, **where)
    given = [key for text in keys for key in text.split(",")]
    if any(not key.strip() for key in given):
        raise UsageError("an API key is empty")
    limits = Limits(queue=max_queue, body_bytes=max_body_mb * 2**20)
    settings = Settings(arguments, host, port, names, tuple(given), context, max_batch, limits, drain_s, traces)
    with Reporter("loading weights, MB") as bar:
        code = run(
            settings,
            on_load=lambda done, total: bar.update(done // 10**6, total // 10**6, ""),
            say=lambda line: print(line, file=sys.stderr, flush=True),
        )
    click.get_current_context().exit(code)
