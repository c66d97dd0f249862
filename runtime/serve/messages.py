"""OpenAI's messages and tools as Gemma-4's chat template reads them.

Sources: vLLM's copy (examples/tool_chat_template_gemma4.jinja), llama.cpp's older one (models/templates/gemma4.jinja),
and what is published of the release of 2026-07-09, which refuses arguments that are no mapping.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kerngen.errors import UsageError
from kerngen.runtime.media.options import TEXT_ONLY, MediaSupport
from kerngen.runtime.media.parts import Content, Item, item_of, items_of, require_few, require_place, text_in
from kerngen.runtime.media.prompt import TOLD, behind_tools
from kerngen.runtime.serve.schema import Parts, written_out

_REASONING = ("reasoning_content", "reasoning", "thinking")
_KEPT = ("name", *_REASONING)
INVALID_ARGUMENTS = "invalid_arguments"  # under which name the model sees what it wrote in place of arguments
_TEXT_IN = {"text": "text", "input_text": "text", "refusal": "refusal"}  # where a part has its text, by its type
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


def template_messages(
    messages: Sequence[Mapping[str, Any]],
    reads: Callable[[str], bool] = lambda variable: True,
    media: MediaSupport = TEXT_ONLY,
) -> list[dict[str, Any]]:
    """OpenAI's messages as Gemma-4's chat template reads them.

    It reads role, content, reasoning_content, tool_calls with the arguments as an object (OpenAI's are JSON
    text), and behind them messages of role tool, each with the tool_call_id that it answers. Templates before 2026-05
    read answers in tool_responses of the message with the calls. Messages of the assistant that follow each other are
    one turn, if any of them calls. Arguments that are no JSON, as those of a call that max_tokens cut off, are told as
    text, INVALID_ARGUMENTS. reads: whether the template asks for a variable (TextCodec.template_reads). Content is a
    text, or where the user or a tool sends media (which `media` takes) texts and Items in order; where answers are read
    in tool_responses, which are text, their media come behind them in the user's turn.
    Raises UsageError for what cannot be told to the model: it says which message is wrong, and what would be right.
    """
    told: list[dict[str, Any]] = []
    asked: dict[str, str] = {}  # the calls that tool messages here may answer, with their names
    caller: dict[str, Any] = {}
    before = ""  # the role of the message before
    for at, message in enumerate(messages):
        where = f"messages[{at}]"
        named = message.get("role") if isinstance(message, Mapping) else None
        if not isinstance(named, str) or named not in _ROLES:
            raise UsageError(f"{where} has no role of {', '.join(_ROLES)}")
        role = _ROLES[named]
        before, role_before = role, before
        content = _content(message.get("content"), where, role, media)
        turn: dict[str, Any] = {"role": role, "content": content}
        turn |= {key: message[key] for key in _KEPT if message.get(key) is not None}
        if role == "tool":
            call = message.get("tool_call_id")
            if not isinstance(call, str) or call not in asked:
                raise UsageError(f"{where} answers call {call!r}, which the assistant's turn before it does not make: "
                                 "answers stand right behind the messages that call")  # fmt: skip
            turn |= {"tool_call_id": call, "name": asked[call]}
            if not reads("tool_call_id") and reads("tool_responses"):
                answer = {"name": asked[call], "response": text_in(content)}
                caller.setdefault("tool_responses", []).append(answer)
                if isinstance(content, list):
                    told.append({"role": role, "name": asked[call], "content": content, TOLD: True})
                continue
        if calls := message.get("tool_calls"):
            if role != "assistant" or not isinstance(calls, list | tuple):
                raise UsageError(f"{where}.tool_calls: a list of calls, which the assistant makes")
            if not reads("tool_calls"):
                raise UsageError(f"{where} has tool calls; the chat template of this model knows none")
            turn["tool_calls"] = [_call(call, f"{where}.tool_calls[{n}]") for n, call in enumerate(calls)]
        elif message.get("function_call") is not None:
            raise UsageError(f"{where}.function_call is no longer OpenAI's form", hint="tool_calls")
        if role == role_before == "assistant" and (told[-1].get("tool_calls") or turn.get("tool_calls")):
            told[-1] = turn = _joined(told[-1], turn)
        else:
            told.append(turn)
        if role != "tool":
            asked = {call["id"]: call["function"]["name"] for call in turn.get("tool_calls", [])}
            caller = turn
    if any(TOLD in turn for turn in told):
        told = behind_tools(told)
    require_few(items_of(told), media.options.limits)
    return told


def _joined(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Two messages of the assistant as one turn."""
    turn = {**first, **second, "tool_calls": [*first.get("tool_calls", []), *second.get("tool_calls", [])]}
    for key in ("content", *_REASONING):
        if texts := [message[key] for message in (first, second) if message.get(key)]:
            turn[key] = "\n\n".join(map(str, texts))
    return turn


def _content(content: Any, where: str, role: str, media: MediaSupport) -> Content:
    """Of text, of parts, or of nothing."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise UsageError(f"{where}.content is neither text nor a list of parts")
    parts: list[str | Item] = []
    is_read = any(isinstance(part, Item) for part in content)  # by another API, in its own form
    parts += content if is_read else ()
    for at, part in enumerate(() if is_read else content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get(_TEXT_IN.get(kind, "")) if isinstance(kind, str) else None
        if isinstance(text, str):
            parts.append(text)
        elif isinstance(part, Mapping) and (item := item_of(part, f"{where}.content[{at}]", media)) is not None:
            parts.append(item)
        else:
            raise UsageError(f"{where}.content[{at}] is of type {kind!r:.80}; read here: text, image_url, input_audio, "
                             "audio_url, video_url, video")  # fmt: skip
    if not any(isinstance(part, Item) for part in parts):
        return "".join(map(str, parts))
    require_place(role, where)
    return parts


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UsageError(f"{where} is no call of a function: it has no function.name")
    if not isinstance(call.get("id"), str):
        raise UsageError(f"{where} has no id")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments, parse_constant=_refuse, strict=False) if arguments.strip() else {}
        except (ValueError, RecursionError):
            arguments = {INVALID_ARGUMENTS: arguments}
    if not isinstance(arguments, Mapping | None):
        raise UsageError(f"{where}.function.arguments is no JSON object: {{}} are those of a call without any")
    return {
        "id": call["id"],
        "type": "function",
        "function": {"name": function["name"], "arguments": dict(arguments or {})},
    }


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def template_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """OpenAI's `tools` as the template's variable of that name: functions with name, description and parameters.

    Raises UsageError for what is no function, for two of one name, and for parameters that are too large.
    """
    told: list[dict[str, Any]] = []
    parts = Parts()
    for at, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise UsageError(f"tools[{at}] is no function with a name")
        if function["name"] in [known["function"]["name"] for known in told]:
            raise UsageError(f"tools[{at}]: there are two functions named {function['name']}")
        parameters = function.get("parameters") or {"type": "object", "properties": {}}
        if not isinstance(parameters, Mapping):
            raise UsageError(f"tools[{at}].function.parameters is no JSON schema")
        parameters = written_out(parameters, f"tools[{at}].function.parameters", parts)
        description = function.get("description") or ""
        said = {"name": function["name"], "description": description, "parameters": parameters}
        told.append({"type": "function", "function": said})
    return told
