"""A checkpoint folder, opened, and the text that comes out of it: `kerngen.load`, and what `kerngen run` shows."""

from __future__ import annotations

import hashlib
import os
import re
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kerngen.errors import CheckpointError, UsageError
from kerngen.runtime.backend import explaining_memory, open_backend
from kerngen.runtime.completion import Answer, Completion, CompletionStream
from kerngen.runtime.config import (
    AS_STORED,
    NO_DRAFTER,
    DrafterConfig,
    DraftPolicy,
    Keeping,
    ModelConfig,
    in_int4,
    read_drafter_config,
    read_eos_ids,
    read_model_config,
    read_suppressed_ids,
)
from kerngen.runtime.config_fields import config_path, is_gguf, require_folder
from kerngen.runtime.dflash_config import DflashConfig
from kerngen.runtime.drafters import AnyDrafter, Drafters, drafter_for, each, together
from kerngen.runtime.engine import MEDIA_CACHE_BYTES, CacheShape, Engine, Request, TokenMask, require_draft_tokens
from kerngen.runtime.engine.sizing import usual_step
from kerngen.runtime.footprint import tower_bytes
from kerngen.runtime.hub import HubName, find_cached, find_checkpoint, hub_name
from kerngen.runtime.media.given import require_list, said_with, with_items
from kerngen.runtime.media.opening import open_input, open_support
from kerngen.runtime.media.options import LOCAL, TEXT_ONLY, MediaOptions, MediaSupport
from kerngen.runtime.media.parts import Message, items_of, require_few
from kerngen.runtime.media.parts import max_soft_tokens as checked_tokens
from kerngen.runtime.media.prompt import EncodedPrompt, encode_chat, place, prepared
from kerngen.runtime.model import Gemma4
from kerngen.runtime.ops import Ops
from kerngen.runtime.sampling import Sampling
from kerngen.runtime.text import TextCodec
from kerngen.runtime.weights.kv_scales import with_kv_scales
from kerngen.runtime.weights.loader import load_drafter, load_model
from kerngen.runtime.weights.opened import open_tensors
from kerngen.runtime.weights.towers import load_towers
from kerngen.runtime.world import World
from kerngen.templates.common.rows.torch_rows import DTYPE_NAME

if TYPE_CHECKING:
    from kerngen.runtime.engine.ranks import Part, Ranks
    from kerngen.runtime.executors.collectives import Collectives

ASSISTANT = "assistant"
_GGUF_SUFFIX = re.compile(
    r"(([-.](qat|ud))*[-.](i?q\d\w*|bf16|f16|f32|mxfp4\w*))?(-\d{5}-of-\d{5})?\.gguf$", re.IGNORECASE
)
QUANT_SUFFIXES = ("", "-w4a16", "-w4a16-ct", "-qat-w4a16", "-qat-w4a16-ct")  # a quantized target shares its drafter
MAX_NEW_TOKENS = 256
MAX_BATCH = 64
# Of the memory that is free when an engine is made, for its cache: the rest is for activations, workspaces and graphs.
CACHE_SHARE = 0.85

Prompt = str | Sequence[Mapping[str, Any]]


@dataclass(slots=True, eq=False, repr=False, weakref_slot=True)
class Session:
    """A model that is ready to generate, for one prompt or many at once. One thread at a time may use it, streams that
    it began included: threads that share one hold a lock of their own around each call.

    num_draft_tokens: drafted a step, where there is a drafter; None for as many as pay, by what was accepted and what
    steps took. max_len: tokens that the cache holds, prompt and answer
    together; None for as many as a call needs, which makes a longer call allocate (and on a GPU capture) anew.
    max_batch: prompts that `generate_many` works on at once, where memory takes as many.
    drafter_folders: where the drafters came from. load_s: seconds that reading and repacking the
    weights took. control_tokens: what looks like one in what users say (<turn|>) is one, as transformers has it; else
    it is text. reproducible, media_cache_bytes: as the engine's. ranks: the other ranks of a divided model, None where
    it is whole; they end with the session, at the latest with this process. media: which images and sounds are read.
    """

    folder: Path
    config: ModelConfig
    codec: TextCodec
    model: Gemma4
    drafter: AnyDrafter | Drafters | None
    stop_ids: tuple[int, ...]
    load_s: float
    num_draft_tokens: int | None = None
    max_len: int | None = None
    max_batch: int = MAX_BATCH
    drafter_folders: tuple[Path, ...] = ()
    control_tokens: bool = False
    reproducible: bool = False
    media_cache_bytes: int = MEDIA_CACHE_BYTES
    ranks: Ranks | None = None
    media: MediaSupport = TEXT_ONLY
    _engine: Engine | None = field(default=None, init=False)

    def __repr__(self) -> str:
        count = "" if self.num_draft_tokens is None else f" {self.num_draft_tokens} tokens"
        drafting = f", drafting{count}{in_int4(self.draft_weights)}" if self.drafter else ""
        return f"<kerngen.Session {self.folder.name}: {self.where}{drafting}>"

    @property
    def ops(self) -> Ops:
        return self.model.ops

    @property
    def where(self) -> str:
        """What computes, in words: "cuda on cuda:0, bfloat16", and among how many ranks the model is divided."""
        ops, size = self.ops, self.ops.collectives.world.size
        among = f", divided among {size} ranks" if size > 1 else ""
        return f"{ops.name} on {ops.device}, {str(ops.dtype).removeprefix('torch.')}{among}"

    @property
    def draft_weights(self) -> str | None:
        """What the drafters' matrices are kept as, "stored" or, of all of them, "int4"; None without one."""
        kept = {drafter.config.weights for drafter in each(self.drafter) if isinstance(drafter, AnyDrafter)}
        return kept.pop() if len(kept) == 1 else "stored" if kept else None

    @property
    def drafter_names(self) -> str | None:
        """What the drafters' folders are called, in words; None without one."""
        return " and ".join(folder.name for folder in self.drafter_folders) or None

    def encode(self, prompt: Prompt, *, chat: bool = True, **variables: Any) -> list[int]:
        """Token ids of a text or of chat messages ({"role", "content"}), <bos> included.

        chat: a text is what the user says, and goes through the chat template; False takes it as it is. variables: what
        else the template is to see (enable_thinking).
        Raises UsageError for messages without the template, CheckpointError where there is none or it fails.
        """
        return list(self.encode_media(prompt, chat=chat, **variables).ids)

    def encode_media(
        self,
        prompt: Prompt,
        *,
        images: Sequence[Any] = (),
        audio: Sequence[Any] = (),
        max_soft_tokens: int | None = None,
        chat: bool = True,
        **variables: Any,
    ) -> EncodedPrompt:
        """As `encode`, with the images and sounds that stand in the prompt: parts of messages, or `images` and `audio`
        before what the user says (media/given.py: paths, bytes, URLs, Pillow's images, arrays). Without the template
        they take the places of <|image|> and <|audio|> in the text, where control_tokens says that these are tokens.
        max_soft_tokens: of each image, 70, 140, 280, 560 or 1120; None for the model's own or what its part says.

        Raises also UsageError for media that are not read, and PlaceholderMismatch where they have no place.
        """
        plain, config = not self.control_tokens, self.media.config
        num_tokens = checked_tokens(None if max_soft_tokens is None else {"max_soft_tokens": max_soft_tokens})
        asked_for: list[Message] = []
        require_list("images", images)
        require_list("audio", audio)
        if images or audio:
            if not isinstance(prompt, str):
                raise UsageError("images and audio are for a prompt of text: messages have them among their parts")
            asked_for = said_with(prompt, {"image": images, "audio": audio}, self.media)
        if not chat:
            if not isinstance(prompt, str):
                raise UsageError("messages need the chat template", hint="leave chat=False out, or give one text")
            ids = self.codec.encode(prompt, plain=plain)
        else:
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            asked_for = asked_for or with_items(messages, self.media)
            most = self.codec.most_chars(self.config.max_positions)
            encode = partial(encode_chat, self.codec, variables=variables, config=config, plain=plain, max_chars=most)
            ids = encode(asked_for)
        if config is None or not (items := items_of(asked_for)):
            return EncodedPrompt(self._text_only(ids))
        require_few(items, self.media.options.limits)
        told, media = prepared(asked_for, num_tokens, self.media)
        if told != asked_for:  # the times of a video file's frames are text of the prompt
            ids = encode(told)
        return place(ids, media, config)

    def _text_only(self, ids: list[int]) -> list[int]:
        """`ids`, if none of them stands for an image or the like. Raises UsageError."""
        if found := next((i for i in ids if i in self.media.placeholders.values()), None):
            token = self.codec.token(found)
            raise UsageError(
                f"the prompt holds a placeholder for an image, a video or a sound ({token!r}, token {found}), "
                "and there is none",
                hint="leave it out; without --control-tokens (session.control_tokens) it is text",
            )
        return ids

    def generate(
        self,
        prompt: Prompt,
        *,
        images: Sequence[Any] = (),
        audio: Sequence[Any] = (),
        max_soft_tokens: int | None = None,
        max_new_tokens: int = MAX_NEW_TOKENS,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        chat: bool = True,
        logprobs: int | None = None,
        mask: TokenMask | None = None,
    ) -> Completion:
        """The model's answer to `prompt` (see `encode`), with `images` and `audio` before it, each image with
        `max_soft_tokens` at most (see `encode_media`).

        temperature 0 is greedy; top_k 0 and top_p 1 keep every token; the same seed draws the same tokens. sampling: in
        place of these four, with penalties and more. stop: texts before which the answer ends. logprobs, mask: as in
        `Request`; a mask is this call's alone. Raises UsageError for a request that cannot be right, NumericsError
        where the model computes NaN, DeviceError where memory runs out.
        """
        stream = self.stream(prompt, images=images, audio=audio, max_soft_tokens=max_soft_tokens,
                             max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p,
                             seed=seed, sampling=sampling, stop=stop, chat=chat, logprobs=logprobs,
                             mask=mask)  # fmt: skip
        for _ in stream:
            pass
        return stream.completion

    def stream(
        self,
        prompt: Prompt,
        *,
        images: Sequence[Any] = (),
        audio: Sequence[Any] = (),
        max_soft_tokens: int | None = None,
        max_new_tokens: int = MAX_NEW_TOKENS,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        chat: bool = True,
        logprobs: int | None = None,
        mask: TokenMask | None = None,
    ) -> CompletionStream:
        """As `generate`, in pieces. Other generations may run meanwhile; `close` ends it before its end."""
        answer = Answer(self.codec, stop)
        said = self.encode_media(prompt, images=images, audio=audio, max_soft_tokens=max_soft_tokens, chat=chat)
        request = Request(said.ids, max_new_tokens,
                          _sampling(sampling, temperature, top_k, top_p, seed), self.stop_ids, answer.ends_with,
                          logprobs=logprobs, mask=mask, media=said.media)  # fmt: skip
        with explaining_memory(self.ops.device):
            engine = self.reserve(len(request.prompt) + max(max_new_tokens, 1))
            return CompletionStream(self, answer, engine.follow(request))

    def generate_many(
        self,
        prompts: Sequence[Prompt],
        *,
        max_new_tokens: int = MAX_NEW_TOKENS,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        chat: bool = True,
        logprobs: int | None = None,
        on_done: Callable[[int, Completion], None] | None = None,
    ) -> list[Completion]:
        """The answers to `prompts`, in order, made beside each other, as many at once as memory takes.

        Each is what `generate` gives for that prompt alone, as far as rounding allows. on_done: told the number of a
        prompt and its answer, as soon as that is complete. The rest as in `generate`.
        """
        sampling = _sampling(sampling, temperature, top_k, top_p, seed)
        answers = [Answer(self.codec, stop) for _ in prompts]
        requests = [
            Request(said.ids, max_new_tokens, sampling, self.stop_ids, answer.ends_with, logprobs=logprobs,
                    media=said.media)
            for said, answer in zip((self.encode_media(p, chat=chat) for p in prompts), answers, strict=True)
        ]  # fmt: skip
        made: dict[int, Completion] = {}
        with explaining_memory(self.ops.device):
            longest = max((len(r.prompt) for r in requests), default=1) + max(max_new_tokens, 1)
            engine = self.reserve(longest, min(max(len(requests), 1), self.max_batch))
            for i, generation in engine.finished(requests):
                made[i] = answers[i].finish(generation)[1]
                if on_done is not None:
                    on_done(i, made[i])
        return [made[i] for i in range(len(prompts))]

    @property
    def cache_shape(self) -> CacheShape:
        """What decides how much cache its sequences take, the drafter's own layers included."""
        policy = NO_DRAFTER if self.drafter is None else self.drafter.policy
        longest = 0 if self.model.media is None else self.model.media.longest_block
        return CacheShape(self.config, self.ops.dtype, step=usual_step(policy), drafter=policy,
                          longest_block=longest)  # fmt: skip

    @property
    def cache_budget(self) -> int:
        """Bytes that are free on the GPU for a cache of K and V, beside the embeddings of media, and what makes them
        where that is loaded later.
        """
        free, media = torch.cuda.mem_get_info(self.ops.device)[0], self.model.media
        if media is None:
            return int(CACHE_SHARE * free)
        return max(int(CACHE_SHARE * (free - media.unloaded_bytes())) - self.media_cache_bytes, 0)

    @property
    def prefill_density(self) -> dict[int, float]:
        """Of each layer whose prompts choose the keys that they read (sparse_prefill), the share of tiles of keys that
        those of the engine at hand have read.
        """
        return {} if self._engine is None else self._engine.load.density

    def reserve(self, length: int, batch: int = 1) -> Engine:
        """The engine at hand if it runs `batch` sequences of `length` tokens, or max_len fixes it, else one that does.

        On a GPU fewer of them run at once where the memory that is free does not suffice: the others wait.
        """
        held = self._engine
        if held is not None and held.max_batch >= batch and (self.max_len is not None or held.max_len >= length):
            return held
        self._engine = None  # its cache goes before the new one comes
        grown = 0 if held is None else min(2 * held.max_len, self.config.max_positions)  # and not again at each turn
        max_len = self.max_len or max(length, grown)
        batch = max(batch, 1 if held is None else held.max_batch)
        del held
        batch, pages = self._room_of_all(batch, max_len)
        self._engine = Engine(
            self.model,
            self.drafter,
            max_len=max_len,
            max_batch=batch,
            num_draft_tokens=self.num_draft_tokens,
            num_pages=pages,
            reproducible=self.reproducible,
            media_cache_bytes=self.media_cache_bytes,
            ranks=self.ranks,
        )
        return self._engine

    def room(self, batch: int, max_len: int) -> tuple[int, dict[str, int] | None]:
        """How many of `batch` sequences of max_len run at once in the memory that is free, and the pages of each kind;
        None for those that they take.
        """
        if self.ops.device.type == "cuda":
            shape = self.cache_shape
            budget = self.cache_budget
            if shape.num_bytes(shape.pages(batch, max_len)) > budget:
                return shape.split(budget, batch, max_len)
        return batch, None

    def _room_of_all(self, batch: int, max_len: int) -> tuple[int, dict[str, int] | None]:
        """As `room`, of the rank that has the least."""
        mine = self.room(batch, max_len)
        if self.ranks is None:
            return mine
        found = [mine, *self.ranks.room(batch, max_len)]
        fewest = min(count for count, _ in found)
        if fewest < max(count for count, _ in found):  # what is left on the others goes to longer sequences
            found = [self.room(fewest, max_len), *self.ranks.room(fewest, max_len)]
        if all(pages is None for _, pages in found):
            return fewest, None
        every = [pages or self.cache_shape.pages(fewest, max_len) for _, pages in found]
        return fewest, {kind: min(pages[kind] for pages in every) for kind in every[0]}


def _sampling(given: Sampling | None, temperature: float, top_k: int, top_p: float, seed: int) -> Sampling:
    """`given`, or what the four say. Raises UsageError for both."""
    single = Sampling(temperature, top_k, top_p, seed)
    if given is not None and single != Sampling():
        raise UsageError("sampling and one of temperature, top_k, top_p and seed contradict each other",
                         hint="say all of it in sampling")  # fmt: skip
    return single if given is None else given


def load(
    folder: str | os.PathLike[str],
    *,
    draft: str | os.PathLike[str] | bool | Sequence[str | os.PathLike[str]] = True,
    draft_weights: str = "stored",
    kv_cache_dtype: str = "auto",
    kv_cache_layout: str = "apart",
    sparse_prefill: float | None = None,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    backend: str = "auto",
    db: str | os.PathLike[str] | None = None,
    bundle: str | os.PathLike[str] | None = None,
    num_draft_tokens: int | None = None,
    max_len: int | None = None,
    advance: Callable[[int, int], None] | None = None,
    keep_repacked: bool = False,
    tensor_parallel: int = 1,
    media: str | MediaOptions = "auto",
    media_cache_bytes: int = MEDIA_CACHE_BYTES,
) -> Session:
    """Open a Gemma-4 checkpoint in Hugging Face format (bf16 or W4A16), or a GGUF file, and make it ready to generate.

    folder: or a GGUF file, a folder with one, or a name on the Hugging Face hub, from where what is needed is
    downloaded (hub.py). draft: the folder or name of an assistant, or of a DFlash drafter, or both, of which each step
    takes what pays; True for the assistant that belongs to the model, if there is one (`find_drafter`), False for none.
    draft_weights: "int4" makes the drafter's
    matrices int4 as they are loaded, "stored" leaves them; the output is the same, only how many drafts are accepted
    may differ. kv_cache_dtype: of keys and values, "auto" for dtype, "int8", "int4" or "int3" for that in
    full-attention layers and int8 in sliding ones, or "fp8" for e4m3 by the checkpoint's scales. kv_cache_layout:
    "shared" for one pool of layers whose K is V. sparse_prefill: in full-attention layers queries of long prompts read
    the keys that are estimated to weigh at least so many times the heaviest (0.1, say); None, and 1 or more, for all
    keys.
    device: "cpu", "cuda", "cuda:1"; None for the first GPU, else the CPU. dtype: "fp32", "bf16" or "fp16"; None for
    fp32 on a CPU, bf16 from sm80 on, fp16 before. backend: "cuda" (kerngen's kernels), "torch" (eager, on any machine)
    or "auto". db: tuning database, a path or a URL; None for the usual ones. bundle: a file that `kerngen compile -o`
    wrote. num_draft_tokens, max_len, media_cache_bytes: see `Session`. advance: is told, while weights load, how many
    bytes of how many are there. keep_repacked: keep weights as the backend wants them in a file beside the model, which
    any later call with this backend and dtype reads in place of the checkpoint's. tensor_parallel: ranks that the model
    is divided among, on as many GPUs from `device` on, each a process of its own; they are started here, or by
    torchrun. In those that torchrun makes other ranks than 0 this does not return: they end when rank 0 does. media:
    what is loaded to read images and sound: "images", "audio", "images,audio"; "auto" for what the model has, when it
    is first needed; "none". With limits of their own, MediaOptions.
    Warns of what a checkpoint lacks that has a default. Raises UsageError for a request that cannot be right,
    CheckpointError for a folder that is incomplete or damaged, DeviceError where there is no such device or memory.
    """
    place = find_checkpoint(folder)
    require_folder(place)
    chosen = MediaOptions.parse(media, LOCAL) if isinstance(media, str) else media
    drafts = _drafters_of(folder, place, draft)
    kept = Keeping(draft_weights, kv_cache_dtype, kv_cache_layout, sparse_prefill)
    if not drafts and not kept.drafts_as_stored:
        raise UsageError(f"draft weights {draft_weights!r} need a drafter, and {place} has none beside it or is to run "
                         "without", hint="name one: --draft FOLDER, in Python draft=FOLDER")  # fmt: skip
    where = None if device is None else str(device)
    opens = partial(
        _open_part, place, drafts, kept=kept, num_draft_tokens=num_draft_tokens, backend=backend,
        dtype=DTYPE_NAME.get(dtype, str(dtype)) if isinstance(dtype, torch.dtype) else dtype,
        db=None if db is None else os.fspath(db), bundle=None if bundle is None else os.fspath(bundle),
        keep_repacked=keep_repacked, media=chosen, media_cache_bytes=media_cache_bytes,
    )  # fmt: skip
    if tensor_parallel == 1:
        session = opens(None, where, advance)
    else:
        config = read_model_config(place)
        for drafter in _drafter_configs(drafts, config, num_draft_tokens) if tensor_parallel > 1 else ():
            drafter.divided(config.divided(World(0, tensor_parallel)))  # before a process is started
        session = open_divided(tensor_parallel, config, opens, where,
                               partial(_digest, place, *drafts), advance, backend=backend)  # fmt: skip
    with explaining_memory(session.ops.device):
        session.max_len = max_len
        if max_len is not None:
            session.reserve(max_len)
    return session


def open_divided(
    size: int,
    config: ModelConfig,
    opens: Callable[..., Part],
    device: str | None,
    digest: Callable[[], str] | None = None,
    advance: Callable[[int, int], None] | None = None,
    *,
    backend: str = "auto",
) -> Part:
    """The part of the model `config` that rank 0 of `size` has, which `opens` gives as on the others (Ranks.load).
    device: of rank 0; None for what `backend` runs on. digest: of what is opened, equal on all ranks. The other ranks
    end with what is returned.

    Raises UsageError where the model does not divide, before a process is started; RankFailed where a rank ends.
    """
    from kerngen.runtime.engine.ranks import Ranks, torchrun_world

    if size < 1:
        raise UsageError(f"a model is divided among 1 rank or more, not {size}")
    device = "cpu" if device is None and backend == "torch" else device
    world = torchrun_world()
    if world is not None and world.rank:
        from kerngen.runtime.engine.rank_worker import follow_torchrun

        follow_torchrun(world, device)
    config.divided(World(0, size))
    ranks = Ranks(size, device)
    try:
        session = ranks.load(opens, digest, advance)
    except BaseException:
        ranks.close()
        raise
    weakref.finalize(session, ranks.close)
    return session


def _open_part(
    place: Path, drafts: Sequence[Path], collectives: Collectives | None, device: str | None,
    advance: Callable[[int, int], None] | None, *, kept: Keeping, num_draft_tokens: int | None, backend: str,
    dtype: str | None, db: str | None, bundle: str | None, keep_repacked: bool, media: MediaOptions,
    media_cache_bytes: int,
) -> Session:  # fmt: skip
    """What the rank of `collectives` has of the model in `place`; all of it for None."""
    ops = open_backend(backend, device=device, dtype=dtype, db_url=db, bundle=bundle, collectives=collectives)
    with explaining_memory(ops.device):
        session = open_checkpoint(place, ops, drafts=drafts, kept=kept, advance=advance, keep_repacked=keep_repacked,
                                  media=media, num_draft_tokens=num_draft_tokens)  # fmt: skip
    session.media_cache_bytes = media_cache_bytes
    return session


def _digest(*folders: Path) -> str:
    """Of what ranks must have in common: configurations, and the names, shapes and places of all weights."""
    digest = hashlib.sha256()
    for folder in folders:
        tensors = open_tensors(folder)
        digest.update(tensors.config_digest.encode())
        for file in sorted(tensors.files, key=lambda file: file.path.name):
            digest.update(f"{file.path.name} {file.stat.st_size} {file.digest}".encode())
    return digest.hexdigest()


def _drafters_of(
    model: str | os.PathLike[str], folder: Path, draft: str | os.PathLike[str] | bool | Sequence[str | os.PathLike[str]]
) -> tuple[Path, ...]:
    """The folders of those that `load` is to draft with."""
    if not draft:
        return ()
    if draft is True:
        found = _find_assistant(model, folder)
        return () if found is None else (found,)
    named = [draft] if isinstance(draft, (str, os.PathLike)) else draft
    return tuple(map(find_checkpoint, named))


def _drafter_configs(
    drafts: Sequence[Path], config: ModelConfig, num_draft_tokens: int | None
) -> list[DrafterConfig | DflashConfig]:
    """Of the drafters in `drafts` of the whole `config`. Raises UsageError where they do not go together, or do not
    draft so many tokens.
    """
    found = [read_drafter_config(draft, config) for draft in drafts]
    if found:
        require_draft_tokens(num_draft_tokens, DraftPolicy.joint([drafter.policy for drafter in found]))
    return found


def _find_assistant(model: str | os.PathLike[str], folder: Path) -> Path | None:
    """The drafter of a model that lies in `folder`. Of one on the hub, only if it was downloaded before."""
    if (name := hub_name(model)) is None:
        return find_drafter(folder)
    repo = name.repo if name.file is None else gguf_stem(f"{re.sub('-gguf$', '', name.repo, flags=re.IGNORECASE)}.gguf")
    cached = (find_cached(HubName(f"{stem}-{ASSISTANT}", None)) for stem in _stems(repo))
    return next((found for found in cached if found is not None and (found / "config.json").is_file()), None)


def _stems(name: str) -> list[str]:
    """What a model may be called without what says how it is quantized."""
    return [name.removesuffix(suffix) for suffix in QUANT_SUFFIXES if name.endswith(suffix)]


def find_drafter(folder: Path) -> Path | None:
    """The drafter that belongs to the model in `folder`, if there is one.

    Looked for in MODEL/assistant, then beside it as the releases name them: gemma-4-31b-it-assistant serves
    gemma-4-31b-it and gemma-4-31b-it-qat-w4a16-ct. Of a GGUF file in its folder: the same serves
    gemma-4-31b-it-qat-q4_0.gguf.
    """
    place = folder.absolute()
    name, inside = (gguf_stem(place.name), place.parent) if is_gguf(folder) else (place.name, folder)
    beside = [place.with_name(f"{stem}-{ASSISTANT}") for stem in _stems(name) if stem]
    return next((d for d in (inside / ASSISTANT, *beside) if (d / "config.json").is_file()), None)


def gguf_stem(name: str) -> str:
    """What a GGUF file's model is called, without what says how it is stored: gemma-4-26B-A4B-it of
    gemma-4-26B-A4B-it-UD-Q4_K_XL.gguf and gemma-4-26B-A4B-it-BF16-00001-of-00002.gguf.
    """
    return _GGUF_SUFFIX.sub("", name)


def stop_ids_of(folder: Path, config: ModelConfig, codec: TextCodec) -> tuple[int, ...]:
    """The tokens that end an answer of the model in `folder`, each once."""
    return tuple(dict.fromkeys((*read_eos_ids(folder, config), *codec.end_of_turn_ids)))


def open_checkpoint(
    folder: Path,
    ops: Ops,
    *,
    drafts: Sequence[Path] = (),
    kept: Keeping = AS_STORED,
    advance: Callable[[int, int], None] | None = None,
    keep_repacked: bool = False,
    media: MediaOptions | None = None,
    num_draft_tokens: int | None = None,
) -> Session:
    """Load `folder`, and the drafters in `drafts`, kept as `kept` says; what the rank has of them where
    `ops` are those of one. Configurations and tokenizer are checked before any weights. media: None for text alone.
    num_draft_tokens: as the session's.

    Raises UsageError or CheckpointError.
    """
    began = time.perf_counter()
    config = with_kv_scales(read_model_config(folder).keeping(kept), folder)
    drafter_configs = _drafter_configs(drafts, config, num_draft_tokens)
    config = config.divided(ops.collectives.world)
    drafters = [(f, c.keeping(kept).divided(config)) for f, c in zip(drafts, drafter_configs, strict=True)]
    support = open_support(folder, media or MediaOptions())
    codec = TextCodec(folder, config.bos_id)
    if codec.vocab_size > config.vocab_size:
        raise CheckpointError(
            f"{codec.path} has {codec.vocab_size} tokens; {config_path(folder)} says vocab_size {config.vocab_size}"
        )
    if ops.name != "torch":
        from kerngen.runtime.served_shapes import require_served

        require_served(folder, config, ops, drafters)
    weights = load_model(folder, config, ops, advance=advance, keep_repacked=keep_repacked)
    seen = open_input(support, lambda asked: load_towers(folder, asked, ops, advance=advance),
                      partial(tower_bytes, dtype=ops.dtype))  # fmt: skip
    # Of media that are not loaded, too: nothing would stand behind them in the next turn.
    never = (*read_suppressed_ids(folder), *(() if seen is None else support.placeholders.values()))
    model = Gemma4(config, weights, ops, suppressed_ids=never, media=seen)
    loaded = [drafter_for(c, load_drafter(draft, c, ops, advance=advance), model) for draft, c in drafters]
    return Session(
        folder=folder,
        config=config,
        codec=codec,
        model=model,
        drafter=together(loaded),
        stop_ids=stop_ids_of(folder, config, codec),
        load_s=time.perf_counter() - began,
        num_draft_tokens=num_draft_tokens,
        drafter_folders=tuple(drafts),
        media=support,
    )
