"""Constrained text: grammars compiled by llguidance, one matcher per row.

A grammar that cannot be enforced is refused when it is compiled, with the reason and the place; it is never weakened and never
left out. A matcher that fails later allows nothing (its row ends with ``EndedBy.GRAMMAR``): llguidance itself answers a failed
matcher's mask with "end of turn allowed", which would make broken output look finished.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np
from kvalet.runtime.plan import GrammarSpec
from kvalet.runtime.schema_check import endless_path, find_error, format_path
from kvalet.runtime.tokenizer import Tokenizer
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_GRAMMAR_BYTES = 1 << 20
"""Longest source text of a grammar, UTF-8 bytes; a longer one is refused."""

MAX_FORCED = 32
"""Longest forced run handed out at once: it enters the next step as one multi-token row."""

_JSON_DEFAULTS: JsonCompileOptions = {"whitespace_pattern": r"[ \n\r\t]{0,24}"}
"""White space between JSON tokens is free but short: small models would fill an answer with it."""

_JSON_OVERRIDES: JsonCompileOptions = {"lenient": False, "coerce_one_of": False}
"""A schema's own "x-guidance" may not weaken it."""


_BOOLEAN_SCHEMAS = {"true": "{}", "false": '{"enum": []}'}
"""The compiler takes options with object schemas only."""


class GrammarError(ValueError):
    """A grammar that cannot be enforced. ``reason``: what is wrong; ``path``: where in a JSON Schema ("properties.a"), "" for
    the whole or for another kind of grammar."""

    def __init__(self, reason: str, path: str = "") -> None:
        super().__init__(f"{path}: {reason}" if path else reason)
        self.reason = reason
        self.path = path


class Matcher:
    """A grammar's state in one row (``runtime.rows.RowMatcher``). Owned by one thread; releases the interpreter lock."""

    __slots__ = ("_failed", "_matcher", "_words")

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._words = (vocab_size + 31) // 32
        self._failed = False

    def bitmask(self) -> NDArray[np.int32]:
        """int32 [ceil(vocab / 32)], bit i of word w allows token 32 * w + i. End-of-turn ids are allowed exactly where the text
        may end. All zero: a dead end, or the matcher failed (a limit of the parser, a token that it did not allow)."""
        mask = np.zeros(self._words, dtype=np.int32)
        if not self._failed:
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            if self._has_failed():
                mask[:] = 0
        return mask

    def consume(self, token_id: int) -> bool:
        """Advance by one token. False: it is not allowed here, or the matcher had failed; it stays failed."""
        if self._failed or not self._matcher.consume_token(token_id):
            self._failed = True
        return not self._failed

    def forced(self) -> list[int]:
        """The tokens that must come next, at most ``MAX_FORCED``; empty where there is a choice, at the end, after a failure.
        They are the tokenizer's own tokens for the forced text. The matcher does not advance."""
        if self._failed:
            return []
        tokens: list[int] = self._matcher.compute_ff_tokens()
        return [] if self._has_failed() else tokens[:MAX_FORCED]

    @property
    def finished(self) -> bool:
        """The text is complete and nothing but an end-of-turn id can follow."""
        return not self._failed and self._matcher.is_stopped() and not self._has_failed()

    @property
    def may_end(self) -> bool:
        """The text is complete as it stands; more may follow."""
        return not self._failed and self._matcher.is_accepting() and not self._has_failed()

    @property
    def error(self) -> str:
        """Why the matcher failed, "" if it did not."""
        if self._matcher.is_error():
            return _first_lines(self._matcher.get_error())
        return "a token was not allowed" if self._failed else ""

    def _has_failed(self) -> bool:
        if self._matcher.is_error():
            self._failed = True
        return self._failed


class GrammarCache:
    """Compiled grammars, least recently used ones forgotten beyond ``capacity``. Thread-safe.

    ``compile`` is called in a worker thread before a request is submitted; ``matcher`` on the engine thread when its row opens.
    A grammar forgotten in between is compiled again there, which stalls the step by that much and changes nothing else.
    """

    def __init__(self, tokenizer: Tokenizer, capacity: int = 256) -> None:
        self._can_end = bool(tokenizer.end_ids)
        self._vocab_size = tokenizer.vocab_size
        self._tokenizer = LLTokenizer(
            tokenizer.tokenizer_json, n_vocab=tokenizer.vocab_size, eos_token=sorted(tokenizer.end_ids, reverse=True) or None
        )
        self._limits = LLParserLimits(verbose_errors=False)
        self._capacity = capacity
        self._compiled: OrderedDict[GrammarSpec, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, spec: GrammarSpec) -> None:
        """Make sure that ``spec`` is compiled. Raises GrammarError if it cannot be enforced."""
        self._lookup(spec)

    def matcher(self, spec: GrammarSpec) -> Matcher | None:
        """A matcher at the beginning of ``spec``; None if it does not compile (which ``compile`` had said)."""
        try:
            compiled = self._lookup(spec)
        except GrammarError:
            return None
        return Matcher(compiled.deep_copy(), self._vocab_size)

    def _lookup(self, spec: GrammarSpec) -> LLMatcher:
        with self._lock:
            found = self._compiled.get(spec)
            if found is not None:
                self._compiled.move_to_end(spec)
                return found
        compiled = self._build(spec)
        with self._lock:
            self._compiled[spec] = compiled
            while len(self._compiled) > self._capacity:
                self._compiled.popitem(last=False)
        return compiled

    def _build(self, spec: GrammarSpec) -> LLMatcher:
        """Compile, and take the first mask: it also finds grammars that cannot even begin."""
        if not self._can_end:
            raise GrammarError("the model has no end-of-turn id, so a constrained text could not end")
        if len(spec.text.encode("utf-8", "replace")) > MAX_GRAMMAR_BYTES:
            raise GrammarError(f"the grammar is longer than {MAX_GRAMMAR_BYTES} bytes")
        schema = _parse_schema(spec.text) if spec.kind == "json_schema" else None
        if schema is not None:
            endless = endless_path(schema)
            if endless is not None:
                raise GrammarError("refers to itself without an end: no finite text satisfies it", format_path(endless))
        compiled = LLMatcher(self._tokenizer, _source(spec), log_level=0, limits=self._limits)
        reason = self._why_unusable(compiled)
        if reason and schema is not None:
            raise GrammarError(reason, format_path(find_error(schema, self._schema_error)))
        if reason:
            raise GrammarError(reason)
        return compiled

    def _why_unusable(self, compiled: LLMatcher) -> str:
        if compiled.is_error():
            return _first_lines(compiled.get_error())
        first = Matcher(compiled.deep_copy(), self._vocab_size)
        if not first.bitmask().any():
            return "no text satisfies it" + (f" ({first.error})" if first.error else "")
        return ""

    def _schema_error(self, schema: Any) -> str:
        try:
            source = _source(GrammarSpec("json_schema", json.dumps(schema)))
        except GrammarError as error:
            return error.reason
        return self._why_unusable(LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits))


def _parse_schema(text: str) -> Any:
    try:
        schema = json.loads(text)
    except RecursionError:
        raise GrammarError("the schema is nested too deeply") from None
    except ValueError as error:
        raise GrammarError(f"the schema is not JSON: {error}") from error
    if not isinstance(schema, dict | bool):
        raise GrammarError("the schema must be an object or a boolean")
    return schema


def _has_spacing(text: str) -> bool:
    """Whether a schema fixes its white space itself ("x-guidance": {"whitespace_flexible": false}), as ours for tool calls do:
    a pattern given as default would win over that."""
    schema = _parse_schema(text)
    options = schema.get("x-guidance") if isinstance(schema, dict) else None
    return isinstance(options, dict) and options.get("whitespace_flexible") is False


def _source(spec: GrammarSpec) -> str:
    """llguidance's own form of a grammar. Raises GrammarError where that already fails."""
    try:
        if spec.kind == "json_schema":
            text = _BOOLEAN_SCHEMAS.get(spec.text.strip(), spec.text)
            defaults = None if _has_spacing(spec.text) else _JSON_DEFAULTS
            grammar = LLMatcher.grammar_from_json_schema(text, defaults=defaults, overrides=_JSON_OVERRIDES)
        elif spec.kind == "regex":
            grammar = LLMatcher.grammar_from_regex(spec.text)
        elif spec.kind == "lark":
            grammar = LLMatcher.grammar_from_lark(spec.text)
        else:
            raise GrammarError(f"grammar kind {spec.kind!r} is not one of json_schema, regex, lark")
    except GrammarError:
        raise
    except (ValueError, UnicodeEncodeError) as error:
        raise GrammarError(str(error)) from error
    return str(grammar)


def _first_lines(message: str) -> str:
    """An error of llguidance without its dump of the parser's state ("<state>", "<non-verbose/>")."""
    return re.split(r"\n<(?:state|non-verbose)", message)[0].strip()[:500]
