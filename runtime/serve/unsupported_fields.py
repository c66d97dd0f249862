"""Refuses fields that other servers support and this one does not, if they would change the answer.

Sources: OpenAI's API reference for those that it has replaced; vLLM 0.33, `entrypoints/openai`, for the others.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from kerngen.runtime.serve.errors import ApiError
from kerngen.runtime.serve.protocol import ChatCompletion, Completion, StructuredOutputs, Tokenize

_GUIDES = "json, regex, choice and json_object guide an answer"
_ANSWERS = {
    "guided_grammar": "guided_json, guided_regex and guided_choice guide an answer",
    "bad_words": "a logit_bias of -100 keeps a token out",
    "allowed_token_ids": "guided_regex and guided_choice bound what is said",
    "prompt_logprobs": "/v1/completions has them by echo and logprobs",
    "truncate_prompt_tokens": "shorten the prompt; /tokenize counts it",
    "use_beam_search": "tokens are sampled; a temperature of 0 takes the likeliest",
}
_RAW = "/v1/completions with control_tokens: true"
_TURNS = {
    "chat_template": f"the checkpoint's own is used; {_RAW} takes a text of any other",
    "continue_final_message": f"a chat's answer is a turn of its own; {_RAW} goes on with a text",
}
_REFUSED: dict[type[BaseModel], dict[str, str]] = {
    Completion: _ANSWERS,
    ChatCompletion: _ANSWERS | _TURNS | {
        "functions": "tools take their place",
        "function_call": "tool_choice takes its place",
        "add_generation_prompt": f"a chat's answer is a turn of its own; {_RAW} goes on with a text",
        "echo": "/v1/completions repeats its prompt",
        "best_of": "no answers are made but the n that are sent",
    },
    Tokenize: _TURNS,
    StructuredOutputs: {
        "grammar": _GUIDES,
        "structural_tag": f"{_GUIDES}, and tool_choice calls",
        "whitespace_pattern": "between the parts of JSON there is one space at most",
        "disable_any_whitespace": "between the parts of JSON there is one space at most",
        "disable_additional_properties": "say additionalProperties: false in the schema",
    },
}  # fmt: skip
_OFF: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (None, True), "best_of": (None, 0, 1), "function_call": (None, "none", "auto"),
}  # fmt: skip


def require_honoured(body: BaseModel, where: str = "") -> None:
    """Raises ApiError for a field of `body` that asks for what is not there. where: what stands before its name."""
    for name, value in (body.model_extra or {}).items():
        instead = _REFUSED[type(body)].get(name)
        if instead is not None and value not in _OFF.get(name, (None, False, "", [], {})):
            raise ApiError(400, f"{where}{name} is not there: {instead}", param=f"{where}{name}")
