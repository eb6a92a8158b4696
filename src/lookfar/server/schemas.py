"""The bodies of requests, checked strictly: an unknown field or a wrong type is an error that names the field."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

MAX_TOKEN_ID = (1 << 31) - 1
Seed = Annotated[int, Field(ge=-(1 << 63), lt=(1 << 63) - 1024)]  # room for the answers of one request
TokenIds = Annotated[list[Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]], Field(min_length=1)]


def _sendable(value: dict[str, Any]) -> dict[str, Any]:
    """Check that a value can be sent back: JSON has neither NaN nor half a character."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        raise PydanticCustomError("not_json", "Input should hold neither NaN nor half a character") from None
    return value


Metadata = Annotated[dict[str, Any], AfterValidator(_sendable)]


class ApiModel(BaseModel):
    """A part of a request."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(ApiModel):
    include_usage: bool = False


class LookfarOptions(ApiModel):
    """How lookfar decodes a request. None of these changes the text."""

    strategy: Annotated[str, Field(max_length=100)] | None = None
    budget: Annotated[int, Field(ge=1)] | Literal["auto"] | None = None
    remember: bool = True
    trace: bool = False  # every chunk of a stream carries its steps with their draft trees


class JsonSchemaFormat(ApiModel):
    name: Annotated[str, Field(max_length=64)] = "answer"
    description: str | None = None
    json_schema: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(ApiModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(ApiModel):
    """vLLM's way to constrain an answer: one of these."""

    json_schema: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=256)] | None = None
    grammar: str | None = None


class GenerationBody(ApiModel):
    """The fields that completions and chat completions share."""

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Seed | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]] | None = None
    ignore_eos: bool = False
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Annotated[int, Field(ge=-100, le=100)] = 0  # lower is earlier
    lookfar: LookfarOptions | None = None
    # Known to clients, without a meaning here.
    user: str | None = None


class CompletionBody(GenerationBody):
    """POST /v1/completions"""

    prompt: str | TokenIds | Annotated[list[str], Field(min_length=1)] | Annotated[list[TokenIds], Field(min_length=1)]
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0)] | None = None
    suffix: None = None
    best_of: Literal[1] | None = None


class TextPart(ApiModel):
    type: Literal["text", "input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class ImageUrl(ApiModel):
    url: str
    detail: str | None = None


class ImagePart(ApiModel):
    type: Literal["image_url"]
    image_url: ImageUrl | str


class FunctionCall(ApiModel):
    name: str
    arguments: str


class ToolCall(ApiModel):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class Message(ApiModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart | ImagePart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    # A client that sends an answer back as it came includes these.
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None


class Function(ApiModel):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(ApiModel):
    type: Literal["function"]
    function: Function


class NamedFunction(ApiModel):
    name: str


class NamedTool(ApiModel):
    type: Literal["function"]
    function: NamedFunction


class ChatBody(GenerationBody):
    """POST /v1/chat/completions"""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, str | bool | int | float | None] | None = None
    # Known to clients, without a meaning here.
    metadata: Metadata | None = None
    store: Literal[False] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class ResponseTextFormat(ApiModel):
    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Field(max_length=64)] | None = None
    description: str | None = None
    json_schema: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseText(ApiModel):
    format: ResponseTextFormat | None = None


class InputMessage(ApiModel):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    id: str | None = None
    status: str | None = None


class ResponsesBody(ApiModel):
    """POST /v1/responses"""

    model: str | None = None
    input: str | Annotated[list[InputMessage], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    text: ResponseText | None = None
    stream: bool | None = None
    priority: Annotated[int, Field(ge=-100, le=100)] = 0
    seed: Seed | None = None
    lookfar: LookfarOptions | None = None
    # Known to clients, without a meaning here.
    metadata: Metadata | None = None
    store: Literal[False] | None = None
    user: str | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    truncation: Literal["disabled"] | None = None


class TokenizeBody(ApiModel):
    """POST /tokenize: a text, or messages in the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False


class DetokenizeBody(ApiModel):
    """POST /detokenize"""

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]]
