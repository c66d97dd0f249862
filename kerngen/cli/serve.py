"""`kerngen serve`: a checkpoint behind an OpenAI-compatible server."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import click

from kerngen.cli.model_options import host_option, load_arguments, load_options, media_option
from kerngen.cli.tables import say
from kerngen.cli.vllm_options import ServeCommand
from kerngen.runtime.config import Keeping, require_reproducible

if TYPE_CHECKING:
    from kerngen.runtime.serve.server import Settings

BODY_MB, MEDIA_BODY_MB = 16, 32  # of a request: the largest image is a third larger as text
KEYS_VARIABLE = "KERNGEN_API_KEYS"  # several, with commas between them


@click.command(cls=ServeCommand)
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--host", default="127.0.0.1", show_default=True, help="0.0.0.0 for all of this machine's addresses.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0: any that is free.")
@click.option("--name", "--served-model-name", "names", multiple=True,
              help="What clients call it; repeatable. Default: MODEL's name.")  # fmt: skip
@click.option("--api-key", "keys", multiple=True, envvar=KEYS_VARIABLE, metavar="KEY",
              help=f"Asked of every request; repeatable. Default: ${KEYS_VARIABLE}, with commas.")  # fmt: skip
@click.option("--allow-origin", "origins", multiple=True, metavar="ORIGIN",
              help="Whose pages may ask and read, as https://chat.example; repeatable, * for all.")  # fmt: skip
@click.option("--allow-host", "hosts", multiple=True, metavar="NAME",
              help="By which names it may be asked without a key, besides its own; repeatable, * for all.")  # fmt: skip
@click.option("--context", "--max-model-len", "context", type=click.IntRange(16), default=None,
              help="Tokens of a sequence, prompt and answer. Default: the model's own, 32768 at most.")  # fmt: skip
@click.option("--max-batch", "--max-num-seqs", "max_batch", type=click.IntRange(1), default=64, show_default=True,
              help="Sequences at once, of each replica, where memory takes as many.")  # fmt: skip
@click.option("--replicas", "--data-parallel-size", "replicas", type=click.IntRange(1), default=1, show_default=True,
              help="Engines, each on a GPU of its own: the first ones, or --device cuda:0,cuda:1.")  # fmt: skip
@click.option("--max-queue", type=click.IntRange(1), default=256, show_default=True,
              help="Sequences at work or waiting, of each replica; more get 429.")  # fmt: skip
@click.option("--max-body-mb", type=click.IntRange(1), default=None,
              help=f"Of a request. Default: {BODY_MB}; {MEDIA_BODY_MB} with --media.")  # fmt: skip
@media_option
@host_option
@click.option("--max-media-items", type=click.IntRange(1), default=None,
              help="Images, sounds and frames of videos in a request. Default: 32.")  # fmt: skip
@click.option("--drain", "drain_s", type=click.FloatRange(0), default=60.0, show_default=True,
              help="Seconds that answers have to end after SIGTERM or Ctrl-C.")  # fmt: skip
@click.option("--generated", is_flag=True,
              help="Random weights in the shapes of MODEL, a released model or a folder: for load tests.")  # fmt: skip
@click.option("--reproducible", is_flag=True,
              help="Same tokens in every company, in 16 bits too: small batches pay for it.")  # fmt: skip
@click.option("--control-tokens", is_flag=True,
              help="<bos>, <|turn> and the like are tokens in raw prompts, unless a request says no.")  # fmt: skip
@click.option("--otlp-traces-endpoint", "traces", default=None, metavar="URL",
              help="Where OpenTelemetry's spans go. Default: as $OTEL_EXPORTER_OTLP_ENDPOINT says.")  # fmt: skip
@load_options
def serve(
    model: Path,
    host: str,
    port: int,
    names: tuple[str, ...],
    keys: tuple[str, ...],
    origins: tuple[str, ...],
    hosts: tuple[str, ...],
    context: int | None,
    max_batch: int,
    replicas: int,
    max_queue: int,
    max_body_mb: int | None,
    media: str | None,
    media_hosts: tuple[str, ...],
    max_media_items: int | None,
    drain_s: float,
    generated: bool,
    reproducible: bool,
    control_tokens: bool,
    traces: str | None,
    **where: Any,
) -> None:
    """Serve the Gemma-4 checkpoint MODEL (a folder, a GGUF file, or a name on the hub) to OpenAI's clients.

    Ends with exit code 0 after SIGTERM or Ctrl-C, once the answers that are under way have ended; with 1 where the
    engine has died. With --generated the weights are random, its drafter's too, and so is what it says.

    Example: kerngen serve ./gemma-4-31b-it-qat-w4a16-ct --port 8000
    """
    from kerngen.errors import UsageError
    from kerngen.runtime.serve.engine_start import begun
    from kerngen.system.progress import Reporter

    are_several = replicas > 1 or where["tensor_parallel"] > 1 or "," in (where["device"] or "")
    asks_shipped = not (
        where["db_url"] or where["bundle"] or "KERNGEN_BUNDLE" in os.environ or where["backend"] == "torch"
    )
    engine = None if are_several else click.get_current_context().with_resource(begun(prepares=asks_shipped))
    try:
        from kerngen.runtime.serve.server import Settings, run
    except ImportError as e:
        raise UsageError(f"the server is not installed: {e}", hint="pip install 'kerngen[serve]'") from e
    from kerngen.runtime.media.limits import MediaLimits
    from kerngen.runtime.media.options import MediaOptions
    from kerngen.runtime.serve.replicas import device_groups
    from kerngen.runtime.serve.service import Limits

    media_limits = MediaLimits(hosts=media_hosts, **({"items": max_media_items} if max_media_items else {}))
    chosen = MediaOptions.parse(media or "none", media_limits)
    arguments = {**load_arguments(model, **where), "media": chosen}
    given = [key for text in keys for key in text.split(",")]
    if any(not key.strip() for key in given):
        raise UsageError("an API key is empty")
    if any(not name.strip() for name in names):
        raise UsageError("a --name is empty")
    if reproducible and arguments["num_draft_tokens"] is None and arguments["draft"]:
        raise UsageError("--reproducible takes a fixed number of drafts: one that adapts depends on time",
                         hint="one drafter with --num-draft-tokens 3, or --no-draft")  # fmt: skip
    if reproducible:
        require_reproducible(Keeping.of(arguments).sparse)
    each = arguments["tensor_parallel"]
    groups = device_groups(replicas, arguments["device"], arguments["backend"], each) if are_several else ()
    body_mb = max_body_mb or (MEDIA_BODY_MB if chosen.parts else BODY_MB)
    limits = Limits(queue=max_queue * replicas, body_bytes=body_mb * 2**20)
    settings = Settings(arguments, host, port, names, tuple(given), context, max_batch, limits, drain_s, traces,
                        reproducible=reproducible, control_tokens=control_tokens, origins=origins,
                        hosts=hosts, replicas=groups, begun=engine)  # fmt: skip
    with _weights(settings, model, generated) as settings, Reporter("starting") as bar:
        bar.note(f"starting {names[0] if names else model.name}: weights, then kernels; the port answers after that")

        def told(done: int, total: int, kernel: str) -> None:
            if kernel:
                bar.update(done, total, f"kernels, building {kernel}")
            else:
                bar.update_bytes(done, total)

        def tell(line: str) -> None:
            bar.end()  # what is told first is that it serves, or why not
            say(line, err=True)

        code = run(settings, on_load=told, say=tell)
    click.get_current_context().exit(code)


@contextmanager
def _weights(settings: Settings, model: Path, generated: bool) -> Iterator[Settings]:
    """`settings` that load MODEL, or what stands for it as long as this lasts, where its weights are generated."""
    from kerngen.errors import UsageError
    from kerngen.workload.workload import MODELS

    name = os.fspath(model)
    if not generated:
        if name in MODELS:
            raise UsageError(f"{name} is a released model's name: it stands for shapes, not for weights",
                             hint="name a checkpoint's folder, or take random weights: --generated")  # fmt: skip
        yield settings
        return
    if settings.load["keep_repacked"]:
        raise UsageError("--keep-repacked keeps a checkpoint's weights, and --generated has none")
    from kerngen.workload.generated_session import load_generated, write_checkpoint

    with TemporaryDirectory(prefix="kerngen-generated-") as folder:
        load = settings.load
        text = write_checkpoint(name, Path(folder), draft=load["draft"], kept=Keeping.of(load))
        say(f"weights are generated: what it says means nothing; {text}", err=True)
        yield replace(settings, load={**load, "folder": folder, "name": name}, opens=load_generated,
                      names=settings.names or (f"{model.name}-generated",))  # fmt: skip
