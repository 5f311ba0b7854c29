"""A request -> what the scheduler takes: prompt ids, sampling parameters, and how the answer is to be read.

Everything here grows with the request (templates, tokenising, compiling schemas), so it runs on worker threads, never on the
event loop: ``Prompts`` is thread-safe and knows no asyncio.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime
from threading import Lock
from typing import Protocol

from kvalet.api.call_memory import CallMemory
from kvalet.api.errors import ApiError
from kvalet.api.normalise import PastCall, clean_text, native_messages, normalise
from kvalet.api.requests import ChatRequest, CompletionRequest
from kvalet.api.response_format import response_schema
from kvalet.api.schema_bounds import string_bound
from kvalet.api.schema_check import check_schema
from kvalet.api.template import ChatTemplate
from kvalet.api.tool_format import own_messages
from kvalet.api.tool_grammar import CallRules, grammar_for, rules_for
from kvalet.api.tools import allowed_tools, parse_tools
from kvalet.runtime.grammar import GrammarError
from kvalet.runtime.plan import GrammarSpec, SamplingParams

MAX_KNOWN_SCHEMAS = 4096
MAX_KNOWN_GRAMMARS = 256
MAX_SESSION_DAYS = 10_000


class TextTools(Protocol):
    """What is needed of ``runtime.tokenizer.Tokenizer``."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def bos_id(self) -> int | None: ...

    def encode(self, text: str, *, allow_special: bool) -> list[int]: ...

    def encode_parts(self, parts: Sequence[tuple[str, bool]]) -> list[int]: ...


class Grammars(Protocol):
    """What is needed of ``runtime.grammar.GrammarCache``."""

    def compile(self, spec: GrammarSpec) -> None: ...


@dataclass(frozen=True, slots=True)
class Prepared:
    """``choice``: the tool choice that decides the finish reason; "none" also where no tool may be called, and then the
    answer is text whatever it looks like. ``names``: of the tools that may be called."""

    ids: tuple[int, ...]
    params: SamplingParams
    choice: str = "none"
    names: tuple[str, ...] = ()


class Prompts:
    """``context_tokens``: the model's limit for prompt and answer together. ``default_max_tokens`` 0: what the context
    leaves. ``template`` None: the model has none, chats are refused. ``ids_only``: it has no tokenizer either, and prompts are
    lists of ids."""

    def __init__(
        self,
        tokenizer: TextTools,
        grammars: Grammars | None,
        template: ChatTemplate | None,
        *,
        context_tokens: int,
        default_max_tokens: int = 0,
        calls: CallMemory | None = None,
        ids_only: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._grammars = grammars
        self._template = template
        self._context_tokens = context_tokens
        self._default_max_tokens = default_max_tokens
        self._ids_only = ids_only
        self.calls = calls if calls is not None else CallMemory()
        self._known_schemas: OrderedDict[str, None] = OrderedDict()
        self._known_grammars: OrderedDict[str, GrammarSpec] = OrderedDict()
        self._days: OrderedDict[tuple[str, str], date] = OrderedDict()
        self._lock = Lock()

    def chat(self, request: ChatRequest, today: date) -> Prepared:
        """ApiError 400 for everything about the request that cannot be served as asked, before any token is made."""
        if self._template is None and self._ids_only:
            raise ApiError("This model has no tokenizer: send token ids to /v1/completions.", code="no_chat_template")
        if self._template is None:
            raise ApiError("This model has no chat template; use /v1/completions.", code="no_chat_template")
        tools = parse_tools(request.tools)
        allowed = allowed_tools(tools, request.tool_choice, request.tool_name)
        messages = normalise(request.messages)
        schema = response_schema(request.response_format)
        for tool in allowed:
            self._check_schema(tool.parameters, tool.path)
        choice = request.tool_choice if allowed else "none"
        rules = rules_for(allowed, choice, parallel=request.parallel_tool_calls, schema=schema)
        grammar = self._grammar(rules)

        def original(call: PastCall) -> str:
            return self.calls.original(request.tenant, call)

        now = datetime.combine(self._day(request, today), datetime.min.time())
        if self._template.knows_tools:
            shown = [{"type": "function", "function": tool.function} for tool in tools]
            rendered = self._template.render(native_messages(messages, original), shown, now=now)
        else:
            rendered = self._template.render(own_messages(messages, tools, original), now=now)
        ids = self._tokenizer.encode_parts(rendered.parts)
        params = self._params(request.params, request.max_tokens_given, len(ids), "messages")
        return Prepared(tuple(ids), replace(params, grammar=grammar), choice, tuple(tool.name for tool in allowed))

    def completion(self, request: CompletionRequest) -> Prepared:
        """Special tokens in a text prompt count: it is the whole prompt as its author wants it. ApiError 400 as above."""
        prompt = request.prompt
        if isinstance(prompt, str):
            if self._ids_only:
                raise ApiError("This model has no tokenizer: send 'prompt' as a list of token ids.", param="prompt")
            bos = self._tokenizer.bos_id
            ids = self._tokenizer.encode(clean_text(prompt, "prompt"), allow_special=True)
            prompt = (*([] if bos is None else [bos]), *ids)
        else:
            self._check_ids(prompt)
        if not prompt:
            raise ApiError("'prompt' is empty: at least one token is needed.", param="prompt")
        params = self._params(request.params, request.max_tokens_given, len(prompt), "prompt")
        if params.grammar is not None:
            self._compile(params.grammar)
        return Prepared(tuple(prompt), params)

    def _check_ids(self, prompt: tuple[int, ...]) -> None:
        size = self._tokenizer.vocab_size
        if prompt and not 0 <= min(prompt) <= max(prompt) < size:
            index = next(index for index, token in enumerate(prompt) if not 0 <= token < size)
            raise ApiError(f"'prompt[{index}]' is {prompt[index]}: token ids are 0 to {size - 1}.", param=f"prompt[{index}]")

    def _params(self, params: SamplingParams, max_tokens_given: bool, n_prompt: int, where: str) -> SamplingParams:
        """``max_tokens`` brought to what the context leaves; a prompt that leaves nothing is refused."""
        left = self._context_tokens - n_prompt
        wanted = params.max_tokens if max_tokens_given else self._default_max_tokens or left
        if left < 1:
            wanted = max(1, wanted)
            raise ApiError(
                f"This model's maximum context length is {self._context_tokens} tokens. However, you requested"
                f" {n_prompt + wanted} tokens ({n_prompt} in the {where}, {wanted} in the completion)."
                f" Please reduce the length of the {where} or completion.",
                param=where,
                code="context_length_exceeded",
            )
        max_tokens = min(wanted, left)
        return replace(params, max_tokens=max_tokens, min_tokens=min(params.min_tokens, max_tokens))

    def _check_schema(self, schema: dict[str, object], path: str) -> None:
        """``check_schema``, skipped for a schema that passed before (agents send the same tools with every request)."""
        try:
            text = json.dumps(schema)
        except (RecursionError, ValueError):
            check_schema(schema, path)  # refuses: deeper than any schema may be
            return
        with self._lock:
            if text in self._known_schemas:
                self._known_schemas.move_to_end(text)
                return
        check_schema(schema, path)
        with self._lock:
            self._known_schemas[text] = None
            if len(self._known_schemas) > MAX_KNOWN_SCHEMAS:
                self._known_schemas.popitem(last=False)

    def _grammar(self, rules: CallRules) -> GrammarSpec | None:
        if not rules.tools and rules.schema is None:
            return None
        tools = [(tool.name, tool.parameters) for tool in rules.tools]
        key = json.dumps([tools, rules.must_call, rules.max_calls, rules.schema])
        with self._lock:
            spec = self._known_grammars.get(key)
        if spec is None:
            spec = grammar_for(rules, string_bound(self._context_tokens))
            assert spec is not None
        self._compile(spec, "tools" if rules.tools else "response_format.json_schema.schema")
        with self._lock:
            self._known_grammars[key] = spec
            self._known_grammars.move_to_end(key)
            if len(self._known_grammars) > MAX_KNOWN_GRAMMARS:
                self._known_grammars.popitem(last=False)
        return spec

    def _compile(self, spec: GrammarSpec, path: str | None = None) -> None:
        if self._grammars is None:
            raise ApiError("not supported: this model cannot be constrained.", param=path, code="not_supported")
        try:
            self._grammars.compile(spec)
        except GrammarError as error:
            where = f"{path}.{error.path}" if path and error.path else path
            raise ApiError(f"not supported: {error.reason}", param=where, code="not_supported") from error

    def _day(self, request: ChatRequest, today: date) -> date:
        """The date that templates show: a named session keeps the one it began with, so that midnight costs it nothing."""
        if not request.session:
            return today
        with self._lock:
            day = self._days.setdefault((request.tenant, request.session), today)
            self._days.move_to_end((request.tenant, request.session))
            if len(self._days) > MAX_SESSION_DAYS:
                self._days.popitem(last=False)
        return day
