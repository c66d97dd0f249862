"""Text to tokens and back: tokenizer.json, and streaming. It comes with the checkpoint and is not trusted."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from kerngen.errors import CheckpointError, UsageError
from kerngen.runtime.chat import MAX_RENDER_S, ChatTemplate, ControlTokens
from kerngen.runtime.config_fields import is_gguf, nothing_there, read_file

MAX_TOKENIZER_BYTES = 256 * 1024 * 1024  # Gemma-4's has 33 MB
# From so many characters or tokens on, Python's other threads go on meanwhile: the library lets them only of a batch.
_LONG = 4096
LEAST_CHARS = 1 << 20  # of a text that are taken whatever the tokenizer and the context
# Ends a turn of the chat format (id 106); config.json's eos_token_id may leave it out.
END_OF_TURN = "<turn|>"
CHANNEL, END_OF_CHANNEL = "<|channel>", "<channel|>"  # around what the model thinks (ids 100 and 101)
THOUGHT = "thought\n"  # a thought's channel, its first line, which is no part of it
CALL, END_OF_CALL, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'  # a call, and its strings (ids 48, 49 and 52)
# What stands for an image, a sound and a video's frame, and around them; by Gemma-4's ids.
MEDIA_TOKENS = {255_999: "<|image>", 258_880: "<|image|>", 258_882: "<image|>", 258_884: "<|video|>",
                256_000: "<|audio>", 258_881: "<|audio|>", 258_883: "<audio|>"}  # fmt: skip
TOOL_ANSWER = "<|tool_response>"  # behind its calls the model waits for answers, which begin so (id 50)


@contextmanager
def _blaming(what: str) -> Iterator[None]:
    """Turns what the tokenizers library raises into a CheckpointError that starts with `what`.

    It raises bare Exception on a malformed file. On one that its Rust code did not expect it panics, which pyo3 makes a
    BaseException of a type that cannot be imported.
    """
    try:
        yield
    except BaseException as e:
        if not isinstance(e, Exception) and type(e).__name__ != "PanicException":
            raise
        raise CheckpointError(f"{what}: {e}") from e


class TextCodec:
    """A checkpoint's tokenizer and, if it has one, its chat template. Any number of threads may use it at once."""

    def __init__(self, folder: Path, bos_id: int) -> None:
        self._path, self._tokenizer = _open_tokenizer(folder)
        # Left there by whoever trained the tokenizer; the text is encoded as it is, as transformers does.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.bos_id = bos_id
        self.folder = folder

    @property
    def path(self) -> Path:
        """Of the file that the tokenizer comes from."""
        return self._path

    @property
    def end_of_turn_ids(self) -> tuple[int, ...]:
        token = self._tokenizer.token_to_id(END_OF_TURN)
        return () if token is None else (token,)

    @property
    def channel_ids(self) -> tuple[int, int] | None:
        """The tokens that begin and end a thought, None where the tokenizer has none."""
        first, last = (self._tokenizer.token_to_id(token) for token in (CHANNEL, END_OF_CHANNEL))
        return None if first is None or last is None else (first, last)

    @property
    def call_ids(self) -> tuple[int, int, int] | None:
        """The tokens that begin and end a tool call and quote its strings, None where the tokenizer has none."""
        first, last, quote = (self._tokenizer.token_to_id(token) for token in (CALL, END_OF_CALL, QUOTE))
        return None if first is None or last is None or quote is None else (first, last, quote)

    @property
    def end_of_calls_ids(self) -> tuple[int, ...]:
        """What ends a turn that calls tools: were it no stop token, the model would make up the answers."""
        token = self._tokenizer.token_to_id(TOOL_ANSWER)
        return () if token is None else (token,)

    def to_json(self) -> str:
        """tokenizer.json as it is used: for libraries that read it themselves."""
        return str(self._tokenizer.to_str())

    def open_thought(self, ids: Sequence[int]) -> int | None:
        """Where in `ids` the text of a thought begins that they do not end; None where there is none."""
        first, last = self.channel_ids or (-1, -1)
        at = next((at for at in reversed(range(len(ids))) if ids[at] in (first, last)), None)
        return None if at is None or ids[at] == last else at + 1

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.get_vocab_size()

    def prepare(self) -> None:
        """Do now what else the first text that is asked for would wait for: a second, for 262,144 tokens."""
        self.encode("", plain=True)
        self.longest_token  # noqa: B018

    def most_chars(self, max_tokens: int) -> int:
        """Characters of a text that `max_tokens` may hold; a longer one need not be counted."""
        return max(LEAST_CHARS, max_tokens * self.longest_token)

    @cached_property
    def longest_token(self) -> int:
        """Characters of it: a text has at least its length divided by that in tokens, unknown characters aside."""
        return max(map(len, self._tokenizer.get_vocab()), default=1)

    def encode(self, text: str, *, plain: bool = False, with_bos: bool = True) -> list[int]:
        """Token ids of `text`, special tokens recognised, with <bos> in front unless it is there already.

        plain: what looks like a control token is text. with_bos: False adds no <bos>.
        Raises UsageError for text that is not Unicode (a lone surrogate), CheckpointError where the tokenizer fails.
        """
        require_unicode(text)
        ids = self._encode_marked(self._control.mark(text)) if plain else self._encode(text)
        return ids if not with_bos or ids[:1] == [self.bos_id] else [self.bos_id, *ids]

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any] | None = None,
        *,
        plain: bool = False,
        within_s: float = MAX_RENDER_S,
        max_chars: int | None = None,
        in_place_of: Mapping[str, Sequence[str]] | None = None,
    ) -> list[int]:
        """Token ids of `messages` through the chat template, <bos> in front. variables, within_s, max_chars: see
        `chat`.

        plain: control tokens in the messages and in the variables (the description of a tool) are text, so that nobody
        can end a turn by typing <turn|>; by default, as in transformers, they are what they look like. in_place_of:
        control tokens, and what is written in place of the first, second, … of them that the template writes.
        """
        replaced = _Replacements(in_place_of or {})
        if not plain:
            return self.encode(replaced.of(self.chat(messages, variables, within_s=within_s, max_chars=max_chars)))
        try:
            messages, variables = self._control.mark([messages, variables or {}])
        except RecursionError:
            raise UsageError("chat messages, or what comes with them, are nested too deep") from None
        ids = self._encode_marked(self.chat(messages, variables, within_s=within_s, max_chars=max_chars), replaced)
        return ids if ids[:1] == [self.bos_id] else [self.bos_id, *ids]

    def _encode(self, text: str, tokenizer: Tokenizer | None = None) -> list[int]:
        require_unicode(text)
        tokenizer = self._tokenizer if tokenizer is None else tokenizer
        with _blaming(f"{self._path} cannot encode the text"):
            if len(text) < _LONG:
                ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
            else:
                ids = tokenizer.encode_batch([text], add_special_tokens=False)[0].ids
        return ids

    def _encode_marked(self, text: str, replaced: _Replacements | None = None) -> list[int]:
        """Of a text with marks around what is not to be a control token. Each part is encoded by itself."""
        ids: list[int] = []
        typed: dict[str, list[int]] = {}  # the few that there are may stand there a million times
        for part, is_text in self._control.split(text):
            if not is_text:
                ids += self._encode(part if replaced is None else replaced.of(part))
                continue
            if part not in typed:
                typed[part] = self._encode(part, self._plain)
                if self._tokenizer.token_to_id(part) in typed[part]:
                    raise CheckpointError(
                        f"{self._path} makes a control token of {part!r} even where it is told not to"
                    )
            ids += typed[part]
        return ids

    @cached_property
    def _plain(self) -> Tokenizer:
        """To which all is text. One of its own: what it takes for text is a state of it."""
        plain = Tokenizer.from_str(self.to_json())
        plain.encode_special_tokens = True
        return plain

    @cached_property
    def _control(self) -> ControlTokens:
        """Added tokens that are special, that the template writes, or that stand for media."""
        added = self._tokenizer.get_added_tokens_decoder().values()
        source = self._template.source if self.has_template else ""
        of_media = frozenset(MEDIA_TOKENS.values())
        return ControlTokens([
            t.content for t in added
            if t.special or t.content in of_media or (t.content in source and not t.content.isspace())
        ])  # fmt: skip

    def token(self, index: int) -> str:
        """The token's own text, "" where there is none."""
        return self._tokenizer.id_to_token(index) or ""

    def token_text(self, index: int) -> str:
        """What the token alone is as text, a special one its name; a replacement character for a part of one."""
        with _blaming(f"{self._path} cannot decode the token {index}"):
            return str(self._tokenizer.decode([index], skip_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        try:  # no `with`: it would take longer than to decode the few tokens of a stream, twice for each that comes
            if len(ids) < _LONG:
                return str(self._tokenizer.decode(ids, skip_special_tokens=True))
            return str(self._tokenizer.decode_batch([list(ids)], skip_special_tokens=True)[0])
        except BaseException as e:
            with _blaming(f"{self._path} cannot decode the tokens"):
                raise e

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any] | None = None,
        *,
        within_s: float = MAX_RENDER_S,
        max_chars: int | None = None,
    ) -> str:
        """`messages` ({"role", "content"}) through the chat template, ready for the model's turn.

        variables: what else the template is to see (enable_thinking, tools). Raises UsageError for messages that are
        none, CheckpointError where there is no template, it fails, or it writes more than `max_chars` or than what came
        in accounts for, and of that TemplateTooSlow where it takes longer than `within_s`.
        """
        return self._template.render(messages, variables or {}, within_s=within_s, max_chars=max_chars)

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate(self.folder, self._tokenizer.get_vocab())

    @property
    def has_template(self) -> bool:
        try:
            return bool(self._template.source)
        except CheckpointError:
            return False

    def template_reads(self, variable: str) -> bool:
        """Whether the chat template asks for `variable`."""
        return self.has_template and variable in self._template.source

    def stream(self) -> TextStream:
        return TextStream(self)


def _open_tokenizer(folder: Path) -> tuple[Path, Tokenizer]:
    """The file that the tokenizer of the checkpoint in `folder` comes from, and the tokenizer. A GGUF file has one; a
    tokenizer.json beside it is read in its place, if it has the same tokens. Raises CheckpointError.
    """
    path = (folder.parent if is_gguf(folder) else folder) / "tokenizer.json"
    if path.exists():
        data = read_file(path, MAX_TOKENIZER_BYTES)
        with _blaming(f"{path} is not a tokenizer"):
            found = Tokenizer.from_buffer(data)
        if not is_gguf(folder) or _has_tokens_of(found, path, folder):
            return path, found
    if is_gguf(folder):
        from kerngen.runtime.gguf.container import open_gguf
        from kerngen.runtime.gguf.tokenizer import tokenizer_json

        text = tokenizer_json(open_gguf(folder))
        with _blaming(f"{folder} has no tokenizer"):
            return folder, Tokenizer.from_str(text)
    if not any(folder.glob("*.safetensors")):  # then it is no checkpoint, and a tokenizer would not help
        raise nothing_there(folder, f"no {path.name} and no safetensors")
    raise CheckpointError(f"{path} is missing", hint="the folder needs the model's tokenizer")


def _has_tokens_of(tokenizer: Tokenizer, path: Path, place: Path) -> bool:
    """Whether `tokenizer`, from `path`, has the tokens of the GGUF file at `place`; warns where it has not."""
    from kerngen.runtime.gguf.container import open_gguf
    from kerngen.runtime.gguf.tokenizer import tokens_of

    if (ours := tokens_of(open_gguf(place))) is None:
        return True
    theirs = tokenizer.get_vocab()
    wrong = next((token for token, i in theirs.items() if i < len(ours) and ours.get(token) != i), None)
    if wrong is not None:
        warnings.warn(f"{path} is not used: it has {wrong!r} as token {theirs[wrong]}, and {place.name} as "
                      f"{ours.get(wrong, 'none')}; its own tokenizer is used", stacklevel=4)  # fmt: skip
    return wrong is None


class _Replacements:
    """Texts that take the place of tokens in parts of a text that come in order. A token for which none is left, or
    was given, stays.
    """

    def __init__(self, texts: Mapping[str, Sequence[str]]) -> None:
        self._left = {token: iter(those) for token, those in texts.items()}
        self._token = re.compile("|".join(map(re.escape, texts)) or "(?!)")

    def of(self, part: str) -> str:
        return self._token.sub(lambda found: next(self._left[found[0]], found[0]), part)


class TextStream:
    """Turns tokens into text as they come. A character that is split over tokens waits for its last one."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._ids: list[int] = []
        self._start = 0  # the window that is decoded again at each step
        self._seen = 0  # tokens whose text was returned

    def push(self, ids: Sequence[int]) -> str:
        """The text that `ids` complete."""
        self._ids += ids
        before = self._codec.decode(self._ids[self._start : self._seen])
        text = self._codec.decode(self._ids[self._start :])
        if text.endswith("\ufffd"):  # an unfinished UTF-8 sequence of byte tokens
            return ""
        self._start, self._seen = self._seen, len(self._ids)
        return text[len(before) :]

    def finish(self) -> str:
        """What is left, replacement characters included."""
        before = self._codec.decode(self._ids[self._start : self._seen])
        rest = self._codec.decode(self._ids[self._start :])[len(before) :]
        self._start = self._seen = len(self._ids)
        return rest


def require_unicode(text: str) -> None:
    """Raises UsageError for text with a lone surrogate."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as e:
        raise UsageError(f"the text is not Unicode: character {e.start} is {text[e.start]!r}") from None
