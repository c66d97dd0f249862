"""`kerngen run`: text from a checkpoint, for one prompt; prompts.py answers a file of them, chat.py a person."""

from __future__ import annotations

import json
import sys
import warnings
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kerngen.cli.keeping_options import density_lines
from kerngen.cli.model_options import chosen_lines, host_option, load_arguments, load_options, media_option
from kerngen.cli.tables import say
from kerngen.cli.utf8 import require_utf8
from kerngen.runtime.config import Keeping, in_int4
from kerngen.runtime.config_fields import is_gguf

if TYPE_CHECKING:
    from kerngen.runtime.media.values import Kind
    from kerngen.runtime.sampling import Sampling
    from kerngen.runtime.session import Completion, CompletionStream, Prompt, Session

_FILE = click.Path(path_type=Path)


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.argument("said", metavar="[PROMPT]", required=False)
@click.option("--prompt", "-p", default=None,
              help="What to say, as PROMPT; - for standard input. Default: that; on a terminal, a chat.")  # fmt: skip
@click.option("--prompts", default=None, metavar="FILE",
              help="Prompts as JSON lines, - for standard input; answers as JSON lines in their order.")  # fmt: skip
@click.option("--image", "images", multiple=True, type=_FILE, metavar="FILE",
              help="Before what is said: a PNG, JPEG, WebP or GIF; repeatable.")  # fmt: skip
@click.option("--video", "videos", multiple=True, type=_FILE, metavar="FILE",
              help="Before what is said: an mp4, mov, webm or mkv; repeatable.")  # fmt: skip
@click.option("--audio", multiple=True, type=_FILE, metavar="FILE",
              help="Before what is said: a WAV, MP3, FLAC or Ogg; repeatable.")  # fmt: skip
@click.option("--image-tokens", type=click.Choice(["70", "140", "280", "560", "1120"]), default=None,
              help="Of each image, at most: more of them see finer. Default: the model's own, 280.")  # fmt: skip
@media_option
@host_option
@click.option("--system", default=None, help="What the model is told before everything else.")
@load_options
@click.option("--max-new-tokens", "-n", type=click.IntRange(1), default=None,
              help="Default: 256; in a chat as many as its context holds.")  # fmt: skip
@click.option("--temperature", type=click.FloatRange(0), default=None,
              help="0 is greedy. Default: as generation_config.json says, else 0.")  # fmt: skip
@click.option("--top-k", type=click.IntRange(0), default=None,
              help="0 keeps every token. Default: as generation_config.json says, else 0.")  # fmt: skip
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), default=None,
              help="Default: as generation_config.json says, else 1.")  # fmt: skip
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--stop", multiple=True, help="End the answer before this text; may be given several times.")
@click.option("--no-chat", is_flag=True, help="Pass the prompt as it is, without the chat template.")
@click.option("--context", type=click.IntRange(1), default=None,
              help="Tokens that a chat may hold. Default: what memory takes, 32768 at most.")  # fmt: skip
@click.option("--think", is_flag=True, help="In a chat: let the model think before it answers.")
@click.option("--hide-thinking", is_flag=True, help="In a chat: do not show what it thinks.")
@click.option("--no-history", is_flag=True, envvar="KERNGEN_NO_HISTORY",
              help="In a chat: keep nothing of what is typed on disk. Default: $KERNGEN_NO_HISTORY.")  # fmt: skip
@click.option("--control-tokens", is_flag=True,
              help="Take what looks like a control token in the prompt (<turn|>) for one, not text.")  # fmt: skip
@click.option("--plan", is_flag=True,
              help="Print what MODEL takes and what fits on GPUs of 16 to 141 GB, and no more; with a board's name as "
              "--device also what its steps are predicted to take there.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end instead of streaming.")
def run(
    model: Path,
    said: str | None,
    prompt: str | None,
    prompts: str | None,
    images: tuple[Path, ...],
    videos: tuple[Path, ...],
    audio: tuple[Path, ...],
    image_tokens: str | None,
    media: str | None,
    media_hosts: tuple[str, ...],
    system: str | None,
    max_new_tokens: int | None,
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    seed: int,
    stop: tuple[str, ...],
    no_chat: bool,
    context: int | None,
    think: bool,
    hide_thinking: bool,
    no_history: bool,
    control_tokens: bool,
    plan: bool,
    as_json: bool,
    draft: tuple[Path, ...],
    kept: Keeping,
    **where: Any,
) -> None:
    """Generate text with the Gemma-4 checkpoint MODEL: a folder, a GGUF file, or a name on the Hugging Face hub.

    Example: kerngen run ./gemma-4-31b-it-qat-w4a16-ct --prompt "Why is the sky blue?"
    """
    from kerngen.errors import UsageError
    from kerngen.runtime.config import read_sampling
    from kerngen.runtime.media.given import said_with
    from kerngen.runtime.media.options import LOCAL, MediaOptions
    from kerngen.runtime.sampling import Sampling
    from kerngen.runtime.session import MAX_NEW_TOKENS, load
    from kerngen.system.progress import Reporter

    if plan:
        from kerngen.cli.plan import print_plan

        if len(draft) > 1:
            raise UsageError("--plan is for one drafter", hint="plan with each --draft by itself")
        print_plan(str(model), str(draft[0]) if draft else None, kept, where["tensor_parallel"],
                   where["device"], as_json=as_json, which=MediaOptions.parse(media or "none").parts)  # fmt: skip
        return
    has_files = bool(images or videos or audio)
    if has_files and (media is not None or no_chat):
        raise UsageError("--image, --video and --audio say what is loaded, and take the chat template",
                         hint="leave --media and --no-chat out")  # fmt: skip
    if missing := next((path for path in (*images, *videos, *audio) if not path.is_file()), None):
        raise UsageError(f"there is no file {missing}")
    max_soft_tokens = int(image_tokens) if image_tokens else None
    needed = ",".join(name for name, files in (("images", images or videos), ("audio", audio)) if files)
    chosen = MediaOptions.parse(needed or media or "auto", replace(LOCAL, hosts=media_hosts))
    arguments = {**load_arguments(model, draft=draft, kept=kept, **where), "media": chosen}
    if said is not None and prompt is not None:
        raise UsageError("PROMPT and --prompt are two things to say", hint="quote a prompt of several words")
    prompt = said if prompt is None else prompt
    if prompt is not None and prompts is not None:
        raise UsageError("a prompt and --prompts contradict each other")
    if system is not None and no_chat:
        raise UsageError("--system needs the chat template, and --no-chat leaves it out")
    if "" in stop:
        raise UsageError("--stop is empty: it would stop everything")
    options: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    given = {name: value for name, value in options.items() if value is not None}
    Sampling(**given)  # refused before anything is loaded
    is_chat = prompt is None and prompts is None and not (as_json or no_chat) and _is_terminal()
    if not is_chat and (context or think or hide_thinking):
        raise UsageError("--context, --think and --hide-thinking are for a chat",
                         hint="a chat is what runs on a terminal without --prompt and --prompts")  # fmt: skip
    if image_tokens and prompts is not None:
        raise UsageError("--image-tokens is for --image, or a chat", hint='parts of images in FILE have "detail"')
    if has_files and (is_chat or prompts is not None):
        raise UsageError("--image, --video and --audio go with a prompt",
                         hint='give --prompt "…"; in a chat /image, /video and /audio FILE add them')  # fmt: skip
    if prompts is None:
        text = "" if is_chat else _read_prompt(prompt, model)
    else:
        from kerngen.cli.prompts import checked_lines, opened

        lines = checked_lines(click.get_current_context().with_resource(opened(prompts)), chat=not no_chat)
    with warnings.catch_warnings(record=True, action="always") as caught, Reporter("weights") as bar:
        session = load(**arguments, advance=bar.update_bytes)
    session.control_tokens = control_tokens
    for warning in caught:
        click.echo(f"warning: {warning.message}", err=True)
    suggested: dict[str, Any] = {
        name: value for name, value in read_sampling(session.folder).items() if name not in given
    }
    sampling = Sampling(**(suggested | given))
    if is_chat:
        from kerngen.cli.chat import chat
        from kerngen.cli.chat_history import HistoryFile, history_path
        from kerngen.runtime.conversation import Conversation

        if not sampling.is_greedy:
            say(_sampling(sampling, suggested), err=True)
        chat(
            Conversation(session, system=system, sampling=sampling, max_new_tokens=max_new_tokens, stop=stop,
                         context=context, think=think, max_soft_tokens=max_soft_tokens),
            hide_thinking=hide_thinking,
            history=None if no_history else HistoryFile(history_path()),
        )  # fmt: skip
        return
    if prompts is not None:
        from kerngen.cli.prompts import Defaults, run_lines

        defaults = Defaults(max_new_tokens or MAX_NEW_TOKENS, asdict(sampling), stop, not no_chat, system)
        code = run_lines(session, *lines, defaults)
        shares = density_lines(session.prefill_density)
        for line in (_where(session), *shares, *chosen_lines(session.ops.sources(), session.ops.outside())):
            say(line, err=True)
    else:
        asked: Prompt = text
        if system is not None or has_files:
            before = [] if system is None else [{"role": "system", "content": system}]
            files: dict[Kind, tuple[Path, ...]] = {"image": images, "video": videos, "audio": audio}
            asked = [*before, *said_with(text, files, session.media)]
        stream = session.stream(asked, max_soft_tokens=max_soft_tokens,
                                max_new_tokens=max_new_tokens or MAX_NEW_TOKENS, sampling=sampling, stop=stop,
                                chat=not no_chat)  # fmt: skip
        code = _show(stream, session, sampling, as_json)
    if not sampling.is_greedy and not (as_json and prompts is None):
        say(_sampling(sampling, suggested), err=True)
    click.get_current_context().exit(code)


def _show(stream: CompletionStream, session: Session, sampling: Sampling, as_json: bool) -> int:
    """The text as it is made, or one object at the end. Returns the exit code."""
    for piece in stream:
        if not as_json:
            sys.stdout.write(piece)
            sys.stdout.flush()
    if as_json:
        click.echo(json.dumps(_report(stream.completion, session, sampling)))
    else:
        click.echo()
        for line in _summary(stream.completion, session):
            say(line, err=True)
    return 0


def _is_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def _read_prompt(prompt: str | None, model: Path) -> str:
    from kerngen.errors import UsageError
    from kerngen.runtime.hub import require_checkpoint

    if prompt is None and sys.stdin.isatty():
        raise UsageError("no prompt", hint='give --prompt "…", or pipe the text in')
    if prompt is None or prompt == "-":
        try:
            prompt = sys.stdin.buffer.read().decode("utf-8").rstrip("\n")
        except UnicodeDecodeError as e:
            raise UsageError(f"standard input is not UTF-8: {e}") from e
    if not prompt:
        require_checkpoint(model)  # who has neither learns first that the model is not there
        raise UsageError("the prompt is empty")
    return require_utf8("the prompt", prompt)


def _sampling(sampling: Sampling, suggested: dict[str, float]) -> str:
    """How tokens were drawn, and which of that nobody asked for."""
    words = {"temperature": f"temperature {sampling.temperature:g}"}
    if sampling.top_k:
        words["top_k"] = f"top-k {sampling.top_k}"
    if sampling.top_p < 1:
        words["top_p"] = f"top-p {sampling.top_p:g}"
    said = [f"{text} (generation_config.json)" if name in suggested else text for name, text in words.items()]
    return f"sampled: {', '.join(said)}, seed {sampling.seed}"


def _report(result: Completion, session: Session, sampling: Sampling) -> dict[str, Any]:
    from kerngen.cli.prompts import SAMPLING

    stats, ops = result.stats, session.ops
    return {
        "text": result.text,
        "tokens": result.tokens,
        "stop_reason": result.stop_reason,
        "sampling": {name: getattr(sampling, name) for name in SAMPLING},
        "num_prompt_tokens": stats.num_prompt_tokens,
        "num_tokens": stats.num_tokens,
        "load_s": session.load_s,
        "prefill_s": stats.prefill_s,
        "decode_s": stats.decode_s,
        "tokens_per_s": stats.tokens_per_s,
        "num_steps": stats.num_steps,
        "num_draft_tokens": stats.num_draft_tokens,
        "acceptance_length": stats.acceptance_length,
        "acceptance_by_position": list(stats.acceptance_by_position),
        "num_cached_tokens": stats.num_cached_tokens,
        "backend": ops.name,
        "device": str(ops.device),
        "tensor_parallel": ops.collectives.world.size,
        "dtype": str(ops.dtype).removeprefix("torch."),
        "drafter": _drafter_folders(session) or None,
        "draft_weights": session.draft_weights,
        "tokenizer": str(session.codec.path),
        "prefill_density": session.prefill_density,
        "configurations": ops.sources(),
        "outside": ops.outside(),
    }


def _where(session: Session) -> str:
    tokenizer = f"; tokenizer of {session.codec.path.name}" if is_gguf(session.folder) else ""
    return f"{session.where}; loaded in {session.load_s:.2f} s{tokenizer}"


def _drafter_folders(session: Session) -> str:
    return " and ".join(map(str, session.drafter_folders))


def _summary(result: Completion, session: Session) -> list[str]:
    stats, ops = result.stats, session.ops
    lines = [
        _where(session),
        f"prompt {stats.num_prompt_tokens} tokens in {stats.prefill_s:.3f} s ({stats.prefill_tokens_per_s:.1f}/s); "
        f"{stats.num_tokens} new, {stats.tokens_per_s:.1f}/s, ended by {result.stop_reason}",
    ]
    if session.drafter_folders:
        most = "" if session.num_draft_tokens is not None else "up to "
        drafts = "drafts" if len(session.drafter_folders) == 1 else "draft"
        lines.append(
            f"{_drafter_folders(session)}{in_int4(session.draft_weights)} {drafts} "
            f"{most}{stats.num_draft_tokens} a step: "
            f"{stats.acceptance_length:.2f} tokens accepted a step "
            f"({stats.num_steps} steps; by position {_shares(stats.acceptance_by_position)})"
        )
    return [*lines, *density_lines(session.prefill_density), *chosen_lines(ops.sources(), ops.outside())]


def _shares(shares: tuple[float, ...]) -> str:
    return " ".join(f"{share:.0%}" for share in shares) or "none"
