"""Structured outputs: reads OpenAI's field and both of vLLM's into one constraint."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kerngen.errors import UsageError
from kerngen.runtime.serve.engine_process import Guiding
from kerngen.runtime.serve.errors import ApiError
from kerngen.runtime.serve.grammars import choice_grammar, regex_grammar
from kerngen.runtime.serve.json_grammar import json_grammar
from kerngen.runtime.serve.lark import Grammar, require_enforced
from kerngen.runtime.serve.protocol import Generation, ResponseFormat
from kerngen.runtime.serve.service import Service, size_of
from kerngen.runtime.serve.unsupported_fields import require_honoured


def guiding_of(
    service: Service,
    body: Generation,
    prompt: Sequence[int],
    *,
    calls: Grammar | None = None,
    may_think: bool = False,
    or_calls: Callable[[Grammar | None], Grammar | None] = lambda content: content,
) -> tuple[Guiding | None, tuple[str, ...]]:
    """By which grammar the answer goes, and what of its schemas that does not enforce: `calls`, which tool_choice asks
    for, or what the fields say. may_think: a thought may come first, as it does where the prompt ends in one. or_calls:
    makes a grammar of the content, if there is one, into one of it or of calls, where the model may make them. Large
    schemas take their time.
    """
    asked = [*([] if calls is None else [calls]), *_grammars(body, is_text=calls is None)]
    if len(asked) > 1:
        raise ApiError(400, "an answer follows one grammar: response_format, tool_choice, or one of structured_outputs "
                            "and guided_*")  # fmt: skip
    found = or_calls(asked[0] if asked else None)
    if found is None:
        return None, ()
    if service.codec.channel_ids is None:
        return Guiding(found.text), found.not_enforced
    is_thinking = service.codec.open_thought(prompt) is not None
    guiding = Guiding(found.text, may_think=may_think and not is_thinking, is_thinking=is_thinking)
    return guiding, found.not_enforced


def size_of_schemas(body: Generation) -> int:
    """As `size_of`, of what `guiding_of` reads."""
    fields = (body.response_format, body.structured_outputs)
    return size_of([body.guided_json, body.guided_choice, *(field and field.model_dump() for field in fields)])


def _grammars(body: Generation, *, is_text: bool) -> Iterator[Grammar]:
    """is_text: not calls, of which response_format says nothing."""
    if is_text and body.response_format is not None and body.response_format.type != "text":
        yield _of_format(body.response_format)
    yield from _of_fields("guided_", body.guided_json, body.guided_regex, body.guided_choice)
    if (wanted := body.structured_outputs) is not None:
        require_honoured(wanted, "structured_outputs.")
        yield from _of_fields("structured_outputs.", wanted.json_, wanted.regex, wanted.choice)
        if wanted.json_object:
            yield json_grammar()


def _of_fields(
    where: str, schema: dict[str, Any] | str | None, pattern: str | None, choices: list[str] | None
) -> Iterator[Grammar]:
    if schema is not None:
        yield json_grammar(_schema(schema, f"{where}json"))
    if pattern is not None:
        yield Grammar(regex_grammar(pattern))
    if choices is not None:
        yield Grammar(choice_grammar(choices))


def _of_format(wanted: ResponseFormat) -> Grammar:
    schema, is_strict = wanted.schema_, False
    if wanted.type == "json_schema":
        if (inner := wanted.json_schema) is not None:
            schema, is_strict = inner.schema_, inner.strict is True
        if schema is None:
            raise ApiError(400, "response_format.json_schema.schema is missing", param="response_format")
    try:
        grammar = json_grammar(schema)
        if is_strict:
            require_enforced(grammar.not_enforced)
    except UsageError as e:
        raise ApiError(400, e.message, param="response_format") from e
    return grammar


def _schema(given: dict[str, Any] | str, field: str) -> Any:
    if not isinstance(given, str):
        return given
    try:
        return json.loads(given)
    except (ValueError, RecursionError) as e:
        raise ApiError(400, f"{field} is not JSON: {e}", param=field) from None
