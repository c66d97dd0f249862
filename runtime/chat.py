"""The chat template: messages to the text that a model was trained on, as transformers' apply_chat_template has it."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kerngen.errors import CheckpointError, UsageError
from kerngen.runtime.config_fields import is_gguf, read_file, read_json

MAX_TEMPLATE_BYTES = 1024 * 1024  # Gemma-4's has 12 kB
MAX_RENDER_S = 10.0
# What a template may write: its own text, so many characters for each that it gets, and some besides. Indented JSON of
# a deeply nested tool has a dozen for each.
CHARS_PER_CHAR, FREE_CHARS = 16, 64 * 1024
THINKING = "enable_thinking"  # the variable by which a template turns thinking on
_NO_CHAT = "--no-chat passes the prompt as it is"
# What a tokenizer of Gemma's is called to have where tokenizer_config.json does not say.
_DEFAULT_TOKENS = {f"{name}_token": f"<{name}>" for name in ("bos", "eos", "unk", "pad", "mask")}
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Under which names reasoning comes; templates read the first, gpt-oss's the second.
_REASONING = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """Of the checkpoint in `folder`. known: whether the tokenizer has a token of that text.

    Raises CheckpointError where there is no template, or it is too large.
    """

    def __init__(self, folder: Path, known: Mapping[str, int]) -> None:
        path = folder / "tokenizer_config.json"
        config = read_json(path) if os.path.lexists(path) else {}
        self.source = _source_of_gguf(folder) if is_gguf(folder) else _source(folder, config)
        self._tokens = {name: text for name, text in _DEFAULT_TOKENS.items() if text in known}
        of_model = [config.get(key) for key in ("model_specific_special_tokens", "extra_special_tokens")]
        named = {name: config.get(name) for name in _NAMED_TOKENS}
        for name, value in [
            *named.items(),
            *(item for more in of_model if isinstance(more, dict) for item in more.items()),
        ]:
            if text := _token_text(value):
                self._tokens[name] = text

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        *,
        within_s: float = MAX_RENDER_S,
        max_chars: int | None = None,
    ) -> str:
        """`messages` ({"role", "content"}), ready for the model's turn. variables: what else the template is to see.

        Raises UsageError for messages that are none, CheckpointError where the template fails, takes more memory than
        it may or writes more than `max_chars` or than `messages` account for, and of that TemplateTooSlow where it
        takes longer than `within_s`.
        """
        if isinstance(messages, str | Mapping) or not all(isinstance(m, Mapping) for m in messages) or not messages:
            raise UsageError("chat messages are a list of at least one object with role and content")
        if "messages" in variables:
            raise UsageError("messages is no variable of a chat template: there are messages already")
        values = {
            **self._tokens,
            "messages": [_with_reasoning(message) for message in messages],
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
            **variables,
        }
        return render_chat(self.source, values, within_s=within_s, max_chars=max_chars)


def _source(folder: Path, config: dict[str, Any]) -> str:
    """chat_template.jinja, or what tokenizer_config.json says: a text, or several by name, the default among them."""
    path = folder / "chat_template.jinja"
    if os.path.lexists(path):
        try:
            return read_file(path, MAX_TEMPLATE_BYTES).decode("utf-8")
        except UnicodeDecodeError as e:
            raise CheckpointError(f"{path} is not UTF-8: {e}") from e
    source = config.get("chat_template")
    if isinstance(source, list):
        named = {t.get("name"): t.get("template") for t in source if isinstance(t, dict)}
        source = named.get("default")
    if not isinstance(source, str):
        raise CheckpointError(f"{folder} has no chat template", hint=_NO_CHAT)
    if len(source) > MAX_TEMPLATE_BYTES:
        raise CheckpointError(
            f"{folder / 'tokenizer_config.json'}: chat_template is larger than {MAX_TEMPLATE_BYTES:,} B"
        )
    return source


def _source_of_gguf(place: Path) -> str:
    from kerngen.runtime.gguf.container import open_gguf
    from kerngen.runtime.gguf.tokenizer import template_of

    source = template_of(open_gguf(place))
    if len(source) > MAX_TEMPLATE_BYTES:
        raise CheckpointError(f"{place}: its chat template is larger than {MAX_TEMPLATE_BYTES:,} B")
    return source


def _with_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with its reasoning under the names that templates read."""
    found = next((message[key] for key in _REASONING if message.get(key) is not None), None)
    return dict(message) if found is None else {"thinking": found, **message, "reasoning_content": found}


def _token_text(value: Any) -> str:
    """A special token in tokenizer_config.json: its text, or an object that holds it."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else ""


class TemplateTooSlow(CheckpointError):
    """The time that the template had is over."""


def render_chat(
    source: str, values: Mapping[str, Any], *, within_s: float = MAX_RENDER_S, max_chars: int | None = None
) -> str:
    """Render a chat template, which is not trusted, in a process. Raises CheckpointError with the reason.

    The text has at most `max_chars` characters, and no more than what came in accounts for: nobody could tokenize what
    a template of one line can write.
    """
    try:
        given = json.dumps(values, ensure_ascii=False)
        most = FREE_CHARS + len(source) + CHARS_PER_CHAR * len(given)
        most = most if max_chars is None else min(most, max_chars)
        request = json.dumps({"source": source, "values": values, "max_chars": most})
    except (TypeError, ValueError, RecursionError) as e:
        raise UsageError(f"chat messages must be what JSON can hold: {e}") from e
    answer = _WORKERS.ask(request, within_s, most)
    if answer is None:
        raise TemplateTooSlow(f"the chat template failed: it took more than {within_s:g} s", hint=_NO_CHAT)
    if (text := answer.get("text")) is None:
        raise CheckpointError(f"the chat template failed: {answer['error']}", hint=_NO_CHAT)
    return str(text)


_JSON_CHARS, _ERROR_CHARS = 12, 16 * 1024  # of an answer: of each character, escaped as two surrogates, and around


class _Workers:
    """The processes that render (template_worker.py): as many as threads ask at once, kept for the next request."""

    def __init__(self) -> None:
        self._idle: list[_Worker] = []  # appended to and popped from by any thread

    def ask(self, request: str, within_s: float, max_chars: int) -> dict[str, Any] | None:
        """A worker's answer of a text of at most `max_chars`, {"error"} where it died, None where it had to be killed
        after `within_s`.
        """
        try:
            worker = self._idle.pop()
        except IndexError:
            worker = _Worker()
        try:
            return worker.ask(request, within_s, max_chars)
        finally:
            self._idle.append(worker)

    def stop(self) -> None:
        while self._idle:
            self._idle.pop().stop()


class _Worker:
    """One such process, started when it is first needed and after it was killed. One thread asks at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def ask(self, request: str, within_s: float, max_chars: int) -> dict[str, Any] | None:
        """As _Workers.ask."""
        process = self._process
        if process is None or process.poll() is not None:
            process = self._process = self._start()
        late = threading.Timer(within_s, process.kill)
        late.start()
        try:
            if process.stdin is None or process.stdout is None:
                raise TypeError("the worker has pipes")
            process.stdin.write(request + "\n")
            process.stdin.flush()
            line = process.stdout.readline(_JSON_CHARS * max_chars + _ERROR_CHARS)
        except BrokenPipeError:
            line = ""
        except BaseException:  # Ctrl-C: half an answer may lie in the pipe
            self.stop()
            raise
        finally:
            was_late = not late.is_alive()
            late.cancel()
        if line.endswith("\n"):
            answer: dict[str, Any] = json.loads(line)
            return answer
        self.stop()
        return None if was_late else {"error": "it took more memory than it may"}

    def _start(self) -> subprocess.Popen[str]:
        path = Path(__file__).with_name("template_worker.py")
        try:
            # A group of its own: Ctrl-C stops an answer, and not what the next turn of the chat needs.
            return subprocess.Popen([sys.executable, "-P", str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                    stderr=subprocess.DEVNULL, encoding="utf-8", process_group=0)  # fmt: skip
        except OSError as e:
            raise CheckpointError(f"{path} cannot be run by {sys.executable}: {e.strerror}", hint=_NO_CHAT) from e

    def stop(self) -> None:
        """End the process, if there is one; the next request starts another."""
        if (process := self._process) is not None:
            self._process = None
            process.kill()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
            process.wait()


_WORKERS = _Workers()
atexit.register(_WORKERS.stop)

# ---- what users type -------------------------------------------------------------------------------------------------

# Unicode's private characters, put around a control token in what a user typed, so that it can be told from the
# template's own; removed from the text first.
_OPEN, _CLOSE = "\ue0f0", "\ue0f1"


class ControlTokens:
    """The tokens that mean something in a chat, such as <|turn>: where a user types one, it may be taken as text."""

    def __init__(self, tokens: Sequence[str]) -> None:
        longest_first = "|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or "(?!)"
        self._token = re.compile(longest_first)
        self._marked = re.compile(f"{_OPEN}({longest_first}){_CLOSE}|[{_OPEN}{_CLOSE}]")

    def mark(self, value: Any) -> Any:
        """`value` (a text, or messages) with marks around each control token in its texts, names of members too."""
        if isinstance(value, str):
            return self._token.sub(rf"{_OPEN}\g<0>{_CLOSE}", value.replace(_OPEN, "").replace(_CLOSE, ""))
        if isinstance(value, Mapping):
            return {self.mark(key): self.mark(part) for key, part in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark(part) for part in value]
        return value

    def split(self, text: str) -> list[tuple[str, bool]]:
        """The parts of a rendered text in order, each with whether it is a marked token; the marks are gone."""
        parts = self._marked.split(text)  # text, token or None, text, …
        return [(part, index % 2 == 1) for index, part in enumerate(parts) if part]
