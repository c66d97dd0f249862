"""A chat's messages, checked before a template sees them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kerngen.runtime.serve.errors import ApiError

ROLES = ("system", "developer", "user", "assistant", "tool")


def checked_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages as the template reads them: `content` one text, `developer` as the system. Raises ApiError."""
    found = []
    for i, message in enumerate(messages):
        where = f"messages.{i}"
        role = message.get("role")
        if role not in ROLES:
            raise ApiError(400, f"{where}.role is {role!r:.40}, not one of: {', '.join(ROLES)}", param=f"{where}.role")
        content = _text(message.get("content"), f"{where}.content")
        if content is None and not (role == "assistant" and message.get("tool_calls")):
            raise ApiError(400, f"{where} has no content", param=f"{where}.content")
        found.append({**message, "role": "system" if role == "developer" else role, "content": content or ""})
    return found


def _text(content: Any, where: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(400, f"{where} is neither a text nor a list of parts", param=where)
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in ("text", "input_text") or not isinstance(part.get("text"), str):
            raise ApiError(400, f"{where}.{i} is of type {kind!r:.40}; kerngen reads text alone", param=where)
        texts.append(part["text"])
    return "".join(texts)
