"""Renders chat templates in a process of its own: a template is a program of whoever made the checkpoint.

Jinja's immutable sandbox keeps it from the outside. That it ends, and what memory it takes, only a process can bound:
this one may have so much and no more, and is killed when it takes too long (chat.py). It is run as a file, and knows of
nothing but Jinja. A line of JSON in, {"source", "values", "max_chars"}, is a line out, {"text"} or {"error"}.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Callable
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY_BYTES = 1 << 30  # of address space, for Python, Jinja, the messages and what is written
ALARM_S = 60  # after which this ends by itself, where whoever waits for it is gone


class GenerationBlock(Extension):
    """{% generation %} … {% endgeneration %}: what the assistant said, marked for training. Here it is only written."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_write"), [], [], body).set_lineno(line)

    def _write(self, caller: Callable[[], str]) -> str:
        return caller()


def render(source: str, values: dict[str, Any], max_chars: int) -> str:
    """The text of a template with `values`, as transformers' apply_chat_template renders it. Raises anything.

    Raises MemoryError for a text of more than `max_chars` characters.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, "jinja2.ext.loopcontrols"]
    )

    def fail(message: str) -> None:
        raise TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: Any = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        """Jinja's own escapes HTML and sorts keys."""
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = fail
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    pieces, size = [], 0
    for piece in environment.from_string(source).generate(values):
        size += len(piece)
        if size > max_chars:
            why = "more than the context holds, or than the messages account for"
            raise MemoryError(f"it wrote more than {max_chars:,} characters: {why}")
        pieces.append(piece)
    return "".join(pieces)


def main() -> None:
    alarm = getattr(signal, "alarm", lambda seconds: None)  # whose default is death, in the midst of anything
    with contextlib.suppress(ImportError, ValueError, OSError):  # where there are no such limits, time remains
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin.buffer:
        alarm(ALARM_S)
        try:
            request = json.loads(line)
            answer = {"text": render(request["source"], request["values"], request["max_chars"])}
            text = json.dumps(answer)
        except Exception as e:  # in any way that a program can fail, while it is compiled (SyntaxError) or run
            text = json.dumps({"error": f"{type(e).__name__}: {e}"[:1000] if str(e) else type(e).__name__})
        alarm(0)
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
