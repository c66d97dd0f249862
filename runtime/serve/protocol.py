"""Request schemas: OpenAI's fields, and those that vLLM adds. Unknown fields are ignored, as both do; known ones that
are not supported are refused (unsupported_fields.py).

Source: OpenAI's API reference (chat completions, completions); vLLM 0.24, `entrypoints/openai/protocol.py`, for names
and meanings of the others.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

MAX_STOPS, MAX_STOP_CHARS = 64, 4096
MAX_CHOICES = 64
MAX_LOGPROBS = 20

Stop = str | Annotated[list[str], Field(max_length=MAX_STOPS)]
Bias = Annotated[dict[str, float], Field(max_length=1024)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=())


class StreamOptions(_Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class JsonSchema(_Body):
    name: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(_Body):
    """schema: where others than OpenAI have it (llama.cpp, Together), also beside json_object."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")


Choices = Annotated[list[str], Field(max_length=4096)]


class StructuredOutputs(_Body):
    """vLLM's, in place of guided_*."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Choices | None = None
    json_object: bool | None = None


class Generation(_Body):
    """Fields that both kinds of completion have. None: as the model's generation_config.json says, else OpenAI's
    default."""

    model: str | None = None
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)  # 0 and -1 keep every token
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    logit_bias: Bias | None = None
    seed: int | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    max_tokens: int | None = Field(None, ge=1)
    min_tokens: int | None = Field(None, ge=0)
    stop: Stop | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOPS)] | None = None
    ignore_eos: bool = False
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    structured_outputs: StructuredOutputs | None = None
    response_format: ResponseFormat | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None


class Completion(Generation):
    """POST /v1/completions. prompt: a text, tokens, or several of either. add_special_tokens, control_tokens: of a
    text, whether <bos> is put in front, and whether what looks like a control token is one.
    """

    prompt: str | list[str] | list[int] | list[list[int]]
    add_special_tokens: bool = True
    control_tokens: bool | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)


class Function(_Body):
    name: str = Field(min_length=1, max_length=128, pattern=r"^[a-zA-Z0-9_.\-]+$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Body):
    type: Literal["function"]
    function: Function


Tools = Annotated[list[Tool], Field(max_length=256)]


class NamedFunction(_Body):
    name: str


class NamedTool(_Body):
    type: Literal["function"]
    function: NamedFunction


class ChatCompletion(Generation):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    include_reasoning: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None


class Tokenize(_Body):
    """POST /tokenize: a text, or messages with what else the chat template is to see."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    control_tokens: bool | None = None  # of a prompt
    return_token_strs: bool = False
    tools: Tools | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None


class Detokenize(_Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]
