"""Text to tokens and back: tokenizer.json, the chat template, and streaming.

Both files come with the checkpoint and are untrusted: sizes are bounded, and the template runs in Jinja's immutable
sandbox with a bound on what it may write.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from tokenizers import Tokenizer

from kerngen.errors import CheckpointError, UsageError
from kerngen.runtime.fields import read_json, require_content

MAX_TOKENIZER_BYTES = 256 * 1024 * 1024  # Gemma-4's has 33 MB
MAX_TEMPLATE_BYTES = 1024 * 1024
MAX_RENDERED_CHARS = 64 * 1024 * 1024
# Ends a turn of the chat format (id 106); config.json's eos_token_id may leave it out.
END_OF_TURN = "<turn|>"


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
    """A checkpoint's tokenizer and, if it has one, its chat template."""

    def __init__(self, folder: Path, bos_id: int) -> None:
        path = self._path = folder / "tokenizer.json"
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing", hint="the folder needs the model's tokenizer") from None
        if size > MAX_TOKENIZER_BYTES:
            raise CheckpointError(f"{path} is larger than {MAX_TOKENIZER_BYTES:,} B")
        with path.open("rb") as f:
            require_content(path, f.read(64))
        with _blaming(f"{path} is not a tokenizer"):
            self._tokenizer = Tokenizer.from_file(str(path))
        # Left there by whoever trained the tokenizer; the text is encoded as it is, as transformers does.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.bos_id = bos_id
        self.folder = folder

    @property
    def end_of_turn_ids(self) -> tuple[int, ...]:
        token = self._tokenizer.token_to_id(END_OF_TURN)
        return () if token is None else (token,)

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, special tokens recognised, with <bos> in front unless it is there already.

        Raises UsageError for text that is not Unicode (a lone surrogate), CheckpointError where the tokenizer fails.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as e:
            raise UsageError(f"the text is not Unicode: character {e.start} is {text[e.start]!r}") from None
        with _blaming(f"{self._path} cannot encode the text"):
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids if ids[:1] == [self.bos_id] else [self.bos_id, *ids]

    def decode(self, ids: Sequence[int]) -> str:
        with _blaming(f"{self._path} cannot decode the tokens"):
            return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """`messages` ({"role", "content"}) through the chat template, ready for the model's turn.

        Raises CheckpointError where there is no template or it fails.
        """
        source = self._template()
        config = read_json(path) if (path := self.folder / "tokenizer_config.json").is_file() else {}
        special = {name: _token_text(config.get(name)) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
        special["bos_token"] = special["bos_token"] or (self._tokenizer.id_to_token(self.bos_id) or "")
        return render_chat(source, messages=list(messages), add_generation_prompt=True, tools=None, **special)

    def _template(self) -> str:
        path = self.folder / "chat_template.jinja"
        if path.is_file():
            if path.stat().st_size > MAX_TEMPLATE_BYTES:
                raise CheckpointError(f"{path} is larger than {MAX_TEMPLATE_BYTES:,} B")
            try:
                return path.read_text(encoding="utf-8")
            except UnicodeDecodeError as e:
                raise CheckpointError(f"{path} is not UTF-8: {e}") from e
        path = self.folder / "tokenizer_config.json"
        source = read_json(path).get("chat_template") if path.is_file() else None
        if not isinstance(source, str):
            raise CheckpointError(f"{self.folder} has no chat template", hint="--no-chat passes the prompt as it is")
        if len(source) > MAX_TEMPLATE_BYTES:
            raise CheckpointError(f"{path}: chat_template is larger than {MAX_TEMPLATE_BYTES:,} B")
        return source

    def stream(self) -> TextStream:
        return TextStream(self)


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


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, in which an expression cannot ask for unbounded memory by repetition or by a power either."""

    intercepted_binops = frozenset(("*", "**"))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and not (abs(left) <= 1 << 32 and abs(right) <= 64):
            raise SecurityError(f"{left} ** {right} is out of bounds")
        for value, count in ((left, right), (right, left)):
            if isinstance(count, int) and isinstance(value, Sequence) and len(value) * count > MAX_RENDERED_CHARS:
                raise SecurityError(f"a sequence of {len(value)} repeated {count} times is out of bounds")
        return super().call_binop(context, operator, left, right)


def render_chat(source: str, **values: Any) -> str:
    """Render a chat template as transformers does, sandboxed. Raises CheckpointError with Jinja's reason."""
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])

    def fail(message: str) -> None:
        raise TemplateError(message)

    environment.globals["raise_exception"] = fail
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    pieces: list[str] = []
    size = 0
    try:
        for piece in environment.from_string(source).generate(**values):
            size += len(piece)
            if size > MAX_RENDERED_CHARS:
                raise CheckpointError(f"the chat template wrote more than {MAX_RENDERED_CHARS:,} characters")
            pieces.append(piece)
    except CheckpointError:
        raise
    except Exception as e:  # it is a program: it may fail in any way, while it is compiled (SyntaxError) or run
        reason = str(e) or type(e).__name__
        raise CheckpointError(f"the chat template failed: {reason}", hint="--no-chat passes the prompt as it is") from e
    return "".join(pieces)


def _token_text(value: Any) -> str:
    """A special token in tokenizer_config.json: its text, or an object that holds it."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else ""
