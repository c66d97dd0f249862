"""A checkpoint folder, opened, and the text that comes out of it: `kerngen.load`, and what `kerngen run` shows."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kerngen.errors import CheckpointError, UsageError
from kerngen.runtime.backend import explaining_memory, open_backend
from kerngen.runtime.config import (
    ModelConfig,
    read_drafter_config,
    read_eos_ids,
    read_model_config,
    read_suppressed_ids,
)
from kerngen.runtime.drafting import Drafter
from kerngen.runtime.engine import Engine, Generation, Stats, require_draft_tokens
from kerngen.runtime.fields import require_folder
from kerngen.runtime.hub import HubName, find_cached, find_checkpoint, hub_name
from kerngen.runtime.model import Gemma4
from kerngen.runtime.ops import Ops
from kerngen.runtime.sampling import Sampling
from kerngen.runtime.text import TextCodec
from kerngen.runtime.weights.loader import load_drafter, load_model
from kerngen.templates.common.row_torch import DTYPE_NAME

ASSISTANT = "assistant"
QUANT_SUFFIXES = ("", "-w4a16", "-w4a16-ct", "-qat-w4a16", "-qat-w4a16-ct")  # a quantized target shares its drafter
NUM_DRAFT_TOKENS = 3
MAX_NEW_TOKENS = 256

Prompt = str | Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Completion:
    """text: without special tokens. tokens: as generated, a stop token included. stop_reason: "stop" or "length"."""

    text: str
    tokens: list[int]
    stop_reason: str
    stats: Stats


class CompletionStream(Iterator[str]):
    """The text of a generation in pieces, as they are made; then `completion` is all of it."""

    def __init__(self, session: Session, steps: Generator[list[int], None, Generation]) -> None:
        self._completion: Completion | None = None
        self._pieces = self._read(session, steps)

    def __next__(self) -> str:
        return next(self._pieces)

    @property
    def completion(self) -> Completion:
        """Raises UsageError before the last piece came."""
        if self._completion is None:
            raise UsageError("the stream has not ended", hint="iterate over it to its end first")
        return self._completion

    def _read(self, session: Session, steps: Generator[list[int], None, Generation]) -> Iterator[str]:
        decoder = session.codec.stream()
        while True:
            try:
                with explaining_memory(session.ops.device):
                    tokens = next(steps)
            except StopIteration as end:
                made: Generation = end.value
                break
            if piece := decoder.push(tokens):
                yield piece
        text = session.codec.decode(made.tokens)
        self._completion = Completion(text, made.tokens, made.stop_reason, made.stats)
        if rest := decoder.finish():
            yield rest


@dataclass(slots=True, eq=False, repr=False)
class Session:
    """A model that is ready to generate, one sequence at a time.

    num_draft_tokens: drafted a step, where there is a drafter. max_len: tokens that the cache holds, prompt and answer
    together; None for as many as a call needs, which makes a longer call allocate (and on a GPU capture) anew.
    drafter_folder: where the drafter came from, None without one. load_s: seconds that reading and repacking the
    weights took. plain_text: control tokens in what users say (<turn|>) are text; as in transformers, they are not.
    """

    folder: Path
    config: ModelConfig
    codec: TextCodec
    model: Gemma4
    drafter: Drafter | None
    stop_ids: tuple[int, ...]
    suppressed_ids: tuple[int, ...]
    load_s: float
    num_draft_tokens: int = NUM_DRAFT_TOKENS
    max_len: int | None = None
    drafter_folder: Path | None = None
    plain_text: bool = False
    _engine: Engine | None = field(default=None, init=False)

    def __repr__(self) -> str:
        ops, dtype = self.ops, str(self.ops.dtype).removeprefix("torch.")
        drafting = f", drafting {self.num_draft_tokens} tokens" if self.drafter else ""
        return f"<kerngen.Session {self.folder.name}: {ops.name} on {ops.device}, {dtype}{drafting}>"

    @property
    def ops(self) -> Ops:
        return self.model.ops

    def encode(self, prompt: Prompt, *, chat: bool = True) -> list[int]:
        """Token ids of a text or of chat messages ({"role", "content"}), <bos> included.

        chat: a text is what the user says, and goes through the chat template; False takes it as it is.
        Raises UsageError for messages without the template, CheckpointError where there is none or it fails.
        """
        if not chat:
            if not isinstance(prompt, str):
                raise UsageError("messages need the chat template", hint="leave chat=False out, or give one text")
            return self._text_only(self.codec.encode(prompt, plain=self.plain_text))
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return self._text_only(self.codec.encode_chat(messages, plain=self.plain_text))

    def _text_only(self, ids: list[int]) -> list[int]:
        """`ids`, if none of them stands for an image or the like. Raises UsageError."""
        if found := next((i for i in ids if i in self.config.placeholder_ids), None):
            token = self.codec.token(found)
            raise UsageError(
                f"the prompt holds a placeholder for an image, a video or a sound ({token!r}, token {found}), "
                "and kerngen reads text alone",
                hint="leave it out; --plain-text (session.plain_text = True) takes it for text",
            )
        return ids

    def generate(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = MAX_NEW_TOKENS,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        chat: bool = True,
    ) -> Completion:
        """The model's answer to `prompt` (see `encode`).

        temperature 0 is greedy; top_k 0 and top_p 1 keep every token; the same seed draws the same tokens.
        Raises UsageError for a request that cannot be right, NumericsError where the model computes NaN, DeviceError
        where memory runs out.
        """
        stream = self.stream(prompt, max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p,
                             seed=seed, chat=chat)  # fmt: skip
        for _ in stream:
            pass
        return stream.completion

    def stream(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = MAX_NEW_TOKENS,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        chat: bool = True,
    ) -> CompletionStream:
        """As `generate`, in pieces. Another generation of this session ends a stream that has not ended: its next
        piece raises UsageError."""
        sampling = Sampling(temperature, top_k, top_p, seed)
        ids = self.encode(prompt, chat=chat)
        with explaining_memory(self.ops.device):
            engine = self.reserve(len(ids) + max(max_new_tokens, 1))
            steps = engine.stream(ids, max_new_tokens=max_new_tokens, sampling=sampling, stop_ids=self.stop_ids)
        return CompletionStream(self, steps)

    def reserve(self, length: int) -> Engine:
        """The engine at hand if it holds `length` tokens or max_len fixes its size, else a new one that does."""
        if self._engine is None or (self.max_len is None and self._engine.max_len < length):
            self._engine = None  # its cache goes before the new one comes
            self._engine = Engine(
                self.model,
                self.drafter,
                max_len=self.max_len or length,
                num_draft_tokens=self.num_draft_tokens,
                suppressed_ids=self.suppressed_ids,
            )
        return self._engine


def load(
    folder: str | os.PathLike[str],
    *,
    draft: str | os.PathLike[str] | bool = True,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    backend: str = "auto",
    db: str | os.PathLike[str] | None = None,
    bundle: str | os.PathLike[str] | None = None,
    num_draft_tokens: int = NUM_DRAFT_TOKENS,
    max_len: int | None = None,
    advance: Callable[[int, int], None] | None = None,
    keep_repacked: bool = False,
) -> Session:
    """Open a Gemma-4 checkpoint in Hugging Face format (bf16 or W4A16) and make it ready to generate.

    folder: or a name on the Hugging Face hub, from where what is needed is downloaded (hub.py). draft: the drafter's
    folder or name; True for the one that belongs to the model, if there is one (`find_drafter`), False for none.
    device: "cpu", "cuda", "cuda:1"; None for the first GPU, else the CPU. dtype: "fp32", "bf16" or "fp16"; None for
    fp32 on a CPU, bf16 from sm80 on, fp16 before. backend: "cuda" (kerngen's kernels), "torch" (eager, on any machine)
    or "auto". db: tuning database, a path or a URL; None for the usual ones. bundle: a folder that `kerngen compile -o`
    wrote. num_draft_tokens, max_len: see `Session`. advance: is told, while weights load, how many bytes of how many
    are there. keep_repacked: keep weights as the backend wants them in a file beside the model, which any later call
    with this backend and dtype reads in place of the checkpoint's.
    Warns of what a checkpoint lacks that has a default. Raises UsageError for a request that cannot be right,
    CheckpointError for a folder that is incomplete or damaged, DeviceError where there is no such device or memory.
    """
    place = find_checkpoint(folder)
    require_folder(place)
    assistant = _find_assistant(folder, place) if draft is True else find_checkpoint(draft) if draft else None
    ops = open_backend(
        backend,
        device=None if device is None else str(device),
        dtype=DTYPE_NAME.get(dtype, str(dtype)) if isinstance(dtype, torch.dtype) else dtype,
        db_url=None if db is None else os.fspath(db),
        bundle=None if bundle is None else os.fspath(bundle),
    )
    if assistant is not None:
        require_draft_tokens(num_draft_tokens, ops)
    with explaining_memory(ops.device):
        session = open_checkpoint(place, ops, draft=assistant, advance=advance, keep_repacked=keep_repacked)
        session.num_draft_tokens, session.max_len = num_draft_tokens, max_len
        if max_len is not None:
            session.reserve(max_len)
    return session


def _find_assistant(model: str | os.PathLike[str], folder: Path) -> Path | None:
    """The drafter of a model that lies in `folder`. Of one on the hub, only if it was downloaded before."""
    if (name := hub_name(model)) is None:
        return find_drafter(folder)
    cached = (find_cached(HubName(f"{stem}-{ASSISTANT}", None)) for stem in _stems(name.repo))
    return next((found for found in cached if found is not None and (found / "config.json").is_file()), None)


def _stems(name: str) -> list[str]:
    """What a model may be called without what says how it is quantized."""
    return [name.removesuffix(suffix) for suffix in QUANT_SUFFIXES if name.endswith(suffix)]


def find_drafter(folder: Path) -> Path | None:
    """The drafter that belongs to the model in `folder`, if there is one.

    Looked for in MODEL/assistant, then beside it as the releases name them: gemma-4-31b-it-assistant serves
    gemma-4-31b-it and gemma-4-31b-it-qat-w4a16-ct.
    """
    place = folder.absolute()
    beside = [place.with_name(f"{stem}-{ASSISTANT}") for stem in _stems(place.name) if stem]
    return next((d for d in (folder / ASSISTANT, *beside) if (d / "config.json").is_file()), None)


def open_checkpoint(
    folder: Path,
    ops: Ops,
    *,
    draft: Path | None = None,
    advance: Callable[[int, int], None] | None = None,
    keep_repacked: bool = False,
) -> Session:
    """Load `folder`, and `draft` if it is given. Configurations and tokenizer are checked before any weights.

    Raises UsageError or CheckpointError.
    """
    began = time.perf_counter()
    config = read_model_config(folder)
    drafter_config = read_drafter_config(draft, config) if draft else None
    codec = TextCodec(folder, config.bos_id)
    if codec.vocab_size > config.vocab_size:
        raise CheckpointError(
            f"{folder}: tokenizer.json has {codec.vocab_size} tokens, config.json says vocab_size {config.vocab_size}"
        )
    model = Gemma4(config, load_model(folder, config, ops, advance=advance, keep_repacked=keep_repacked), ops)
    drafter = None
    if draft and drafter_config:
        drafter = Drafter(drafter_config, load_drafter(draft, drafter_config, ops, advance=advance), model)
    stops = dict.fromkeys((*read_eos_ids(folder, config), *codec.end_of_turn_ids))
    return Session(
        folder=folder,
        config=config,
        codec=codec,
        model=model,
        drafter=drafter,
        stop_ids=tuple(stops),
        suppressed_ids=read_suppressed_ids(folder),
        load_s=time.perf_counter() - began,
        drafter_folder=draft,
    )
