"""The fields that chat and completions share, with their ranges: how tokens are chosen and where a turn stops.

Ranges stand here and nowhere else; docs/api.md repeats them for people. Types are strict: "16" is not 16 and 1.0 is not a
whole number (integers beyond 64 bits arrive as floats from the JSON parser, so they are refused as well).
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from kvalet.api.errors import ApiError
from kvalet.runtime.plan import SamplingParams
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

Number = TypeVar("Number", int, float)

MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 1024
MAX_TOP_LOGPROBS = 20
MAX_INT32 = (1 << 31) - 1
GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing by them overflows, and no sampler can tell them from 0."""


def kind_of(value: Any) -> str:
    """Branch of a union that takes a string or a list."""
    if isinstance(value, str):
        return "text"
    return "list" if isinstance(value, list) else "other"


StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
Stop = Annotated[
    Annotated[StopText, Tag("text")] | Annotated[list[StopText], Field(max_length=MAX_STOPS), Tag("list")],
    Discriminator(
        kind_of,
        custom_error_type="stop_type",
        custom_error_message="must be a string or a list of strings",
    ),
]
TokenId = Annotated[int, Field(ge=0)]
Int64 = Annotated[int, Field(ge=-(1 << 63), le=(1 << 63) - 1)]


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: bool | None = None


class SamplingFields(BaseModel):
    """Base of the request bodies. Unknown fields are ignored: agents send many, and few change what is asked."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    seed: Int64 | None = None
    stop: Stop | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MAX_LOGIT_BIAS)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0.0, le=10.0)] | None = None
    return_token_ids: bool | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None

    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


def check_common(body: SamplingFields, vocab_size: int) -> None:
    """What single fields cannot say. ApiError 400."""
    if body.n is not None and body.n != 1:
        raise ApiError("'n' must be 1: one answer per request.", param="n", code="unsupported_value")
    if body.stream_options is not None and not body.stream:
        raise ApiError("'stream_options' is only allowed when 'stream' is true.", param="stream_options", code="invalid_value")
    check_ids(body.stop_token_ids or (), vocab_size, "stop_token_ids")


def check_ids(ids: list[int] | tuple[int, ...], vocab_size: int, path: str) -> None:
    """Every id below the vocabulary. ApiError 400 names the first that is not."""
    if not ids or (min(ids) >= 0 and max(ids) < vocab_size):
        return
    index = next(index for index, token in enumerate(ids) if not 0 <= token < vocab_size)
    raise ApiError(
        f"'{path}[{index}]' is {ids[index]}: token ids are 0 to {vocab_size - 1}.",
        param=f"{path}[{index}]",
        code="invalid_value",
    )


def logit_bias_pairs(bias: dict[str, float] | None, vocab_size: int) -> tuple[tuple[int, float], ...]:
    """Keys are token ids in decimal. ApiError 400 names a key that is none."""
    pairs = []
    for key, value in (bias or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) < vocab_size):
            raise ApiError(
                f"'logit_bias' has the key {key[:32]!r}: keys are token ids, 0 to {vocab_size - 1}.",
                param="logit_bias",
                code="invalid_value",
            )
        pairs.append((int(key), value))
    return tuple(pairs)


def sampling_params(body: SamplingFields, max_tokens: int | None, logprobs: int | None, vocab_size: int) -> SamplingParams:
    """The frozen values for the engine. ``max_tokens`` None leaves SamplingParams' own default, which the engine replaces by
    what the context leaves; larger than the context is clamped there as well. ApiError 400."""
    check_common(body, vocab_size)
    defaults = SamplingParams()
    if max_tokens is not None and (body.min_tokens or 0) > max_tokens:
        raise ApiError(
            f"'min_tokens' is {body.min_tokens}, more than the {max_tokens} allowed by 'max_tokens'.",
            param="min_tokens",
            code="invalid_value",
        )
    temperature = _or(body.temperature, defaults.temperature)
    return SamplingParams(
        temperature=0.0 if temperature < GREEDY_BELOW else float(temperature),
        top_p=_or(body.top_p, defaults.top_p),
        top_k=max(0, _or(body.top_k, 0)),
        min_p=_or(body.min_p, defaults.min_p),
        seed=body.seed,
        stop=_stops(body.stop),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        min_tokens=min(body.min_tokens or 0, MAX_INT32),
        max_tokens=defaults.max_tokens if max_tokens is None else min(max_tokens, MAX_INT32),
        ignore_eos=bool(body.ignore_eos),
        logit_bias=logit_bias_pairs(body.logit_bias, vocab_size),
        logprobs=logprobs,
        presence_penalty=_or(body.presence_penalty, defaults.presence_penalty),
        frequency_penalty=_or(body.frequency_penalty, defaults.frequency_penalty),
        repetition_penalty=_or(body.repetition_penalty, defaults.repetition_penalty),
    )


def _or(value: Number | None, default: Number) -> Number:
    return default if value is None else value


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) else tuple(stop or ())
