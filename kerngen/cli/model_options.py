"""What commands that load a checkpoint share: options (which drafter, where, whose kernels), and words for what ran."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import click

from kerngen.cli.keeping_options import keeping_options
from kerngen.cli.option_groups import with_options
from kerngen.errors import UsageError
from kerngen.runtime.config import Keeping

_F = TypeVar("_F", bound=Callable[..., Any])
BACKEND_OPTIONS = (
    click.option("--backend", type=click.Choice(["auto", "torch", "cuda"]), default="auto", show_default=True,
                 help="cuda: kerngen's kernels; torch: eager, on any machine."),
    click.option("--dtype", type=click.Choice(["fp32", "bf16", "fp16"]), default=None,
                 help="Default: fp32 on a CPU, bf16 from sm80 on, fp16 before."),
    click.option("--device", default=None, help="cpu, cuda or cuda:N. Default: the first GPU, else the CPU."),
    click.option("--db", "db_url", default=None, help="Tuning database for the cuda backend. Default: the user's."),
    click.option("--bundle", default=None, help="File that `kerngen compile -o` made. Default: $KERNGEN_BUNDLE."),
)  # fmt: skip
media_option = click.option(
    "--media", "media", default=None, metavar="WHAT",
    help="What is read beside text: images, audio, images,audio or none; auto loads what the model has at its first "
    "use. Default: auto; of a server none.",
)  # fmt: skip
host_option = click.option(
    "--allow-media-host", "media_hosts", multiple=True, metavar="HOST",
    help="Whose http(s) URLs of images and sounds are fetched, as images.example.com; repeatable.",
)  # fmt: skip
tensor_parallel_option = click.option(
    "--tensor-parallel", "--tensor-parallel-size", type=click.IntRange(1), default=1, show_default=True, metavar="N",
    help="Divide the model among N GPUs of this host, from --device on.",
)  # fmt: skip
draft_option = click.option(
    "--draft", default=None,
    help="The drafter: of a released model assistant (the default) or dflash, of a folder its own folder.",
)  # fmt: skip
engine_option = click.option(
    "--engine", type=click.Choice(["kerngen", "vllm"]), default="kerngen", show_default=True,
    help="What runs the model: vllm for what it asks of kerngen.vllm, of each part.",
)  # fmt: skip
_OPTIONS = (
    click.option("--draft", type=click.Path(path_type=Path), multiple=True,
                 help="The drafter, as MODEL; an assistant and a DFlash drafter may be named both. Default: "
                 "MODEL/assistant or MODEL-assistant, if there is one."),
    click.option("--no-draft", is_flag=True, help="Decode without a drafter."),
    keeping_options,
    click.option("--num-draft-tokens", type=click.IntRange(0, 15), default=None,
                 help="Tokens drafted a step. Default: as many as pay, as measured."),
    *BACKEND_OPTIONS,
    tensor_parallel_option,
    click.option("--keep-repacked", is_flag=True,
                 help="Keep weights as the kernels want them beside MODEL; later starts read those."),
)  # fmt: skip


def load_options(command: _F) -> _F:
    """Gives `command` them all, as arguments of `load_arguments`."""
    return with_options(_OPTIONS)(command)


def load_arguments(
    model: Path,
    *,
    draft: tuple[Path, ...],
    no_draft: bool,
    kept: Keeping,
    num_draft_tokens: int | None,
    backend: str,
    dtype: str | None,
    device: str | None,
    keep_repacked: bool,
    db_url: str | None,
    bundle: str | None,
    tensor_parallel: int,
) -> dict[str, Any]:
    """Arguments of `kerngen.runtime.session.load`. Raises UsageError where options contradict each other."""
    if draft and no_draft:
        raise UsageError("--draft and --no-draft contradict each other")
    if no_draft and not kept.drafts_as_stored:
        raise UsageError(f"--draft-weights {kept.draft_weights} and --no-draft contradict each other")
    if tensor_parallel > 1 and keep_repacked:
        raise UsageError("--keep-repacked keeps the weights of a whole model, and --tensor-parallel divides it")
    return {
        "folder": os.fspath(model), "draft": tuple(map(os.fspath, draft)) or not no_draft,
        **asdict(kept), "num_draft_tokens": num_draft_tokens, "backend": backend, "dtype": dtype,
        "device": device, "keep_repacked": keep_repacked, "db": db_url or None, "bundle": bundle,
        "tensor_parallel": tensor_parallel,
    }  # fmt: skip


def chosen_lines(sources: dict[str, int], outside: dict[str, str]) -> list[str]:
    """Who chose what ran, and what ran that is no kernel of ours, for people."""
    if "everything" in outside:
        return ["computed by PyTorch, as on any machine without a GPU (the torch backend)"]
    lines = [f"outside our kernels: {name} ({why})" for name, why in outside.items()]
    if sources:
        lines.append("configurations: " + ", ".join(f"{count} {source}" for source, count in sources.items()))
    return lines
