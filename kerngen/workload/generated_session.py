"""A session without a checkpoint: a model's shapes with generated weights, a tokenizer for any vocabulary and a plain
chat template. It is served and put under load where there is no checkpoint; what it says means nothing.

The tokenizer has Gemma's control tokens at their released ids, the 256 bytes, and a word for every other id, so that
all that random weights say is text, and text of such words is as many tokens as it has words.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from kerngen.errors import UsageError
from kerngen.runtime.backend import explaining_memory, open_backend
from kerngen.runtime.config import Keeping
from kerngen.runtime.config_fields import read_config
from kerngen.runtime.engine import require_draft_tokens
from kerngen.runtime.executors.collectives import Collectives
from kerngen.runtime.footprint import tower_bytes
from kerngen.runtime.gguf.place import place_of_model
from kerngen.runtime.media.opening import open_input, open_support
from kerngen.runtime.media.options import MediaOptions
from kerngen.runtime.session import Session, open_divided, stop_ids_of
from kerngen.runtime.text import (
    CALL,
    CHANNEL,
    END_OF_CALL,
    END_OF_CHANNEL,
    END_OF_TURN,
    MEDIA_TOKENS,
    QUOTE,
    TOOL_ANSWER,
    TextCodec,
)
from kerngen.runtime.weights.synthetic import synthetic_towers
from kerngen.workload.generated import generated_model
from kerngen.workload.workload import MODELS, RELEASED, find_model

CONTROL = {
    0: "<pad>", 1: "<eos>", 2: "<bos>", 3: "<unk>", 4: "<mask>", 46: "<|tool>", 47: "<tool|>", 48: CALL,
    49: END_OF_CALL, 50: TOOL_ANSWER, 51: "<tool_response|>", 52: QUOTE, 98: "<|think|>", 100: CHANNEL,
    101: END_OF_CHANNEL, 105: "<|turn>", 106: END_OF_TURN,
}  # fmt: skip
FIRST_BYTE = 238  # the id of byte 0; as in Gemma's tokenizer
LEAST_VOCAB = FIRST_BYTE + 256
SPACE = "\u2581"  # as SentencePiece spells it
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{{ p.text if p.type == 'text' else '<|' + p.type + '|>' }}{% endfor %}{% endif %}<turn|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn>model\n{% endif %}"
)
_SYLLABLES = tuple(a + b for a, b in product("bdfghjklmnprstvwz", "aeiou"))
_OF_TEXT = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def generated_tokenizer(vocab_size: int) -> Tokenizer:
    """A tokenizer of `vocab_size` tokens, each of which has a text. Raises UsageError for fewer than LEAST_VOCAB."""
    if vocab_size < LEAST_VOCAB:
        raise UsageError(
            f"a vocabulary of {vocab_size} has no room for control tokens and bytes: it takes {LEAST_VOCAB}"
        )
    words = (SPACE + "".join(w) for length in range(1, 9) for w in product(_SYLLABLES, repeat=length))
    control = CONTROL | (MEDIA_TOKENS if vocab_size > max(MEDIA_TOKENS) else {})
    vocab = {text: i for i, text in control.items()}
    vocab |= {f"<0x{i:02X}>": FIRST_BYTE + i for i in range(256)}
    taken = set(vocab.values())
    free = [i for i in range(vocab_size) if i not in taken]
    vocab |= dict(zip(islice(words, len(free)), free, strict=True))
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True, ignore_merges=True))
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    # A word with the space before it; then the rest, which no word is.
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(f"{SPACE}[a-z]+"), "isolated")
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Replace(SPACE, " ")])
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in control.values()])
    return tokenizer


def write_checkpoint(name: str, folder: Path, *, draft: bool | Sequence[str], kept: Keeping) -> str:
    """All of a checkpoint but its weights, in `folder`: the configuration of the model `name`, a tokenizer and a
    template, its own where `name` is a folder that has them. Returns in words where the text comes from.

    draft: as `load_generated`. Raises UnknownName, CheckpointError, and UsageError where there is no
    drafter to be had.
    """
    found = find_model(name, _named(draft), kept)
    if draft and found.drafter is None:
        raise UsageError(f"{name} is a folder, and no drafter goes with its shapes by itself",
                         hint="name one with --draft, or leave drafting out with --no-draft")  # fmt: skip
    source = RELEASED / name if name in MODELS else place_of_model(Path(name))
    (folder / "config.json").write_text(json.dumps(read_config(source)))
    if (source / "tokenizer.json").is_file():
        for file in _OF_TEXT:
            if (source / file).is_file():
                shutil.copyfile(source / file, folder / file)
        return f"the tokenizer of {name}"
    generated_tokenizer(found.target.vocab_size).save(str(folder / "tokenizer.json"), pretty=False)
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<bos>", "eos_token": "<eos>"}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return "a tokenizer of made-up words"


def _named(draft: bool | Sequence[str]) -> str | None:
    """The folder of the drafter that is asked for, if one is named. Raises UsageError for several."""
    if isinstance(draft, bool) or not draft:
        return None
    if len(draft) > 1:
        raise UsageError("generated weights take one drafter", hint="name one --draft")
    return draft[0]


def load_generated(
    folder: str | os.PathLike[str],
    *,
    name: str,
    draft: bool | Sequence[str],
    draft_weights: str,
    kv_cache_dtype: str,
    kv_cache_layout: str,
    sparse_prefill: float | None,
    num_draft_tokens: int | None,
    backend: str,
    dtype: str | None,
    device: str | None,
    db: str | None,
    bundle: str | None,
    seed: int = 0,
    media: MediaOptions | None = None,
    advance: Callable[[int, int], None] | None = None,
    tensor_parallel: int = 1,
    **others: Any,
) -> Session:
    """As `kerngen.load`, of the model `name`, whose text `write_checkpoint` left in `folder`; weights from `seed`.

    draft: True for a released model's own drafter, which is generated too; the one folder with the configuration of
    another.
    Raises as `load` does.
    """
    kept = Keeping(draft_weights, kv_cache_dtype, kv_cache_layout, sparse_prefill)
    opens = partial(
        _generated_part, folder, name=name, draft=draft, kept=kept, num_draft_tokens=num_draft_tokens,
        backend=backend, dtype=dtype, db=db, bundle=bundle, seed=seed, media=media or MediaOptions(),
    )  # fmt: skip
    if tensor_parallel == 1:
        return opens(None, device, advance)
    found = find_model(name, _named(draft), kept)
    return open_divided(tensor_parallel, found.target, opens, device, backend=backend)


def _generated_part(
    folder: str | os.PathLike[str], collectives: Collectives | None, device: str | None, advance: Any, *, name: str,
    draft: bool | Sequence[str], kept: Keeping, num_draft_tokens: int | None, backend: str, dtype: str | None,
    db: str | None, bundle: str | None, seed: int, media: MediaOptions,
) -> Session:  # fmt: skip
    """What the rank of `collectives` has of the model; all of it for None."""
    began = time.perf_counter()
    named = _named(draft)
    ops = open_backend(backend, device=device, dtype=dtype, db_url=db, bundle=bundle, collectives=collectives)
    found = find_model(name, named, kept).divided(ops.collectives.world)
    place, drafter_config = Path(folder), found.drafter if draft else None
    if drafter_config is not None:
        require_draft_tokens(num_draft_tokens, drafter_config.policy)
    codec, support = TextCodec(place, found.target.bos_id), open_support(place, media)
    with explaining_memory(ops.device):
        # Tied to a random embedding, a head would say the same token for ever.
        seen = open_input(support, lambda asked: synthetic_towers(asked, ops, seed + 3),
                          partial(tower_bytes, dtype=ops.dtype))  # fmt: skip
        model, drafter = generated_model(name, found.target, drafter_config, ops, seed, own_head=True, media=seen)
    return Session(
        folder=place,
        config=found.target,
        codec=codec,
        model=model,
        drafter=drafter,
        stop_ids=stop_ids_of(place, found.target, codec),
        load_s=time.perf_counter() - began,
        num_draft_tokens=num_draft_tokens,
        media=support,
        drafter_folders=() if drafter is None else (Path(named or f"{Path(name).name}-assistant"),),
    )
