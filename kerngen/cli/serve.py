"""`kerngen serve`: a checkpoint behind an OpenAI-compatible server."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click

from kerngen.cli.drafting import draft_weights_option

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
@click.option("--draft", type=click.Path(path_type=Path), default=None,
              help="The drafter, as MODEL. Default: MODEL/assistant or MODEL-assistant, if there is one.")  # fmt: skip
@click.option("--no-draft", is_flag=True, help="Decode without a drafter.")
@draft_weights_option
@click.option("--num-draft-tokens", type=click.IntRange(0, 7), default=None,
              help="Tokens drafted a step. Default: as many as pay, as measured.")  # fmt: skip
@click.option("--backend", type=click.Choice(["auto", "torch", "cuda"]), default="auto", show_default=True,
              help="cuda: kerngen's kernels; torch: eager, on any machine.")  # fmt: skip
@click.option("--dtype", type=click.Choice(["fp32", "bf16", "fp16"]), default=None,
              help="Default: fp32 on a CPU, bf16 from sm80 on, fp16 before.")  # fmt: skip
@click.option("--device", default=None, help="cpu, cuda or cuda:N. Default: the first GPU, else the CPU.")
@click.option("--keep-repacked", is_flag=True,
              help="Keep weights as the kernels want them beside MODEL; later starts read those.")  # fmt: skip
@click.option("--db", "db_url", default=None, help="Tuning database for the cuda backend. Default: the user's.")
@click.option("--bundle", default=None, help="File that `kerngen compile -o` made. Default: $KERNGEN_BUNDLE.")
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
    draft: Path | None,
    no_draft: bool,
    draft_weights: str,
    num_draft_tokens: int | None,
    backend: str,
    dtype: str | None,
    device: str | None,
    keep_repacked: bool,
    db_url: str | None,
    bundle: str | None,
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

    if draft and no_draft:
        raise UsageError("--draft and --no-draft contradict each other")
    if no_draft and draft_weights != "stored":
        raise UsageError(f"--draft-weights {draft_weights} and --no-draft contradict each other")
    given = [key for text in keys for key in text.split(",")]
    if any(not key.strip() for key in given):
        raise UsageError("an API key is empty")
    load: dict[str, Any] = {
        "folder": os.fspath(model), "draft": os.fspath(draft) if draft else not no_draft,
        "draft_weights": draft_weights,
        "device": device, "dtype": dtype, "backend": backend, "db": db_url or None, "bundle": bundle,
        "num_draft_tokens": num_draft_tokens, "keep_repacked": keep_repacked,
    }  # fmt: skip
    limits = Limits(queue=max_queue, body_bytes=max_body_mb * 2**20)
    settings = Settings(load, host, port, names, tuple(given), context, max_batch, limits, drain_s)
    with Reporter("loading weights, MB") as bar:
        code = run(
            settings,
            on_load=lambda done, total: bar.update(done // 10**6, total // 10**6, ""),
            say=lambda line: print(line, file=sys.stderr, flush=True),
        )
    click.get_current_context().exit(code)
