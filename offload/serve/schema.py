"""Bodies of requests: what is taken, what must keep its neutral value, and nothing else.

A field that nobody knows is an error and not ignored: a misspelt ``max_token`` would otherwise
cost minutes on a model that streams. Fields of OpenAI's that this server does not carry out are
taken at the value that asks for nothing (``n`` 1, no tools, no log probabilities).
Lists end at their first error: pydantic's error takes a kilobyte, and a body has room for a wrong
item in every other byte.
``chat_template_kwargs`` are vLLM's and llama.cpp's; ``reasoning_effort`` is one of them where the
model's chat template reads it, and an error where it does not.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    model_validator,
)

from offload.cli.sampling import Sampling

MOST_STOPS = 16
ALL_TOKENS = 2**31 - 1
"""What ``top_k`` 0 asks for: to leave it out would ask for the checkpoint's own."""


def _text_parts(value: Any) -> Any:
    """Content as a list of text parts is their texts, joined."""
    if not isinstance(value, list):
        return value
    texts = []
    for part in value:
        if isinstance(part, dict) and part.get("type", "text") != "text":
            raise ValueError("only text is understood: no images, audio or files")
        if not (isinstance(part, dict) and part.keys() == {"type", "text"}) or not isinstance(
            part["text"], str
        ):
            raise ValueError("a part of the content is not {'type': 'text', 'text': …}")
        texts.append(part["text"])
    return "".join(texts)


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _prompt(value: Any) -> Any:
    """Text, or token ids, or a list with one of either."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str):
        return _readable(value)
    if isinstance(value, list) and value and all(type(i) is int and i >= 0 for i in value):
        return tuple(value)
    raise ValueError("it is text, or a list of token ids; one prompt per request")


def _readable(text: str) -> str:
    """JSON can escape half of a surrogate pair, which is no character."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"it is not Unicode text (character {error.start})") from None
    return text


Text = Annotated[str, BeforeValidator(_text_parts), AfterValidator(_readable)]
Stops = Annotated[
    list[
        Annotated[str, StringConstraints(min_length=1, max_length=1000), AfterValidator(_readable)]
    ],
    Field(max_length=MOST_STOPS, fail_fast=True),
    BeforeValidator(_as_list),
]
Nothing = Annotated[list[Any], Field(max_length=0)]


def _texts(value: Any) -> Any:
    """Here and not by pydantic, which has an error for each of them."""
    if isinstance(value, dict) and not all(isinstance(text, str) for text in value.values()):
        raise ValueError("its values are texts")
    return value


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _without_unknown_nulls(cls, given: Any) -> Any:
        """Clients send the fields of their own classes, most of them null: that asks for nothing,
        whatever the field. Of the others one is enough to be refused for."""
        if not isinstance(given, dict):
            return given
        unknown = next(
            (k for k, v in given.items() if v is not None and k not in cls.model_fields), None
        )
        return {k: v for k, v in given.items() if k in cls.model_fields or k == unknown}


class StreamOptions(_Strict):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class Format(_Strict):
    type: Literal["text"]


class Body(_Strict):
    """What chat and plain completions share."""

    model: str | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=100)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0)
    min_p: float | None = Field(default=None, ge=0, le=1)
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    stop: Stops | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Literal[1] | None = None
    presence_penalty: Literal[0] | None = None
    frequency_penalty: Literal[0] | None = None
    logit_bias: Annotated[dict[str, Any], Field(max_length=0)] | None = None
    user: str | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        return tuple(self.stop or ())

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def sampling(self, default_temperature: float) -> Sampling:
        """How tokens are chosen; without a temperature, as the checkpoint would.

        Greedy choice ignores the other settings: clients send ``top_p`` and ``seed`` always.
        """
        temp = default_temperature if self.temperature is None else self.temperature
        if temp == 0:
            return Sampling()
        return Sampling(
            temp=temp,
            top_k=ALL_TOKENS if self.top_k == 0 else self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
        )


class Message(_Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: Text
    name: Annotated[str, AfterValidator(_readable)] | None = None
    refusal: None = None
    annotations: Nothing | None = None
    audio: None = None
    function_call: None = None
    tool_calls: Nothing | None = None

    @property
    def said(self) -> dict[str, str]:
        """As the chat template gets it. Some write who speaks, too; the others leave it out."""
        role = "system" if self.role == "developer" else self.role  # OpenAI's newer name for it
        named = {} if self.name is None else {"name": self.name}
        return {"role": role, "content": self.content, **named}


class ChatBody(Body):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: Literal[False] | None = None
    top_logprobs: Literal[0] | None = None
    response_format: Format | None = None
    tools: Nothing | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    modalities: Annotated[list[Literal["text"]], Field(fail_fast=True)] | None = None
    metadata: Annotated[dict[str, Any], BeforeValidator(_texts)] | None = None
    store: Literal[False] | None = None
    verbosity: Literal["medium"] | None = None
    reasoning_effort: Annotated[str, StringConstraints(max_length=100)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    service_tier: Literal["auto", "default"] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None


class CompletionBody(Body):
    """``POST /v1/completions``."""

    prompt: Annotated[Any, BeforeValidator(_prompt)]
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    logprobs: None = None
    suffix: None = None
