"""Messages and tools -> the model's prompt text, by the chat template that came with the model.

Rendered once per request. Text of a special token inside a message ("<|im_end|>") must not become that token, or a user could
forge turns: before rendering, each such text in the messages gets a mark character after its first character, so that
afterwards only the template's own special tokens are found; ``Rendered.parts`` tells the encoder which is which. Without such
text the prompt is encoded in one go, exactly as the template wrote it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from jinja2 import meta
from jinja2.exceptions import TemplateError
from kvalet.api.errors import ApiError
from kvalet.api.template_sandbox import TemplateRefusal, TemplateSandbox, TemplateTooLong, time_limit

MAX_SOURCE_CHARS = 1_000_000
MAX_RENDER_S = 5.0
MAX_RENDER_CHARS = 64_000_000
MARKS = [chr(code) for code in range(0xF8F0, 0xF900)] + [chr(code) for code in range(0x10FF00, 0x10FFFE)]
"""Private-use characters. More of them than a request could be expected to use; a request that uses all is refused."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """``parts``: (text, trusted), as ``Tokenizer.encode_parts`` takes them: special-token text is a special token in trusted
    parts only. One trusted part where no message held any."""

    parts: tuple[tuple[str, bool], ...]

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.parts)


class ChatTemplate:
    """One model's template, compiled. ``source`` is jinja2; ``specials``: the texts of the tokenizer's special tokens;
    ``variables``: what templates expect beside messages (``bos_token``, ``eos_token``).

    ValueError at construction if the template cannot be compiled. Thread-safe.
    """

    def __init__(self, source: str, specials: Sequence[str] = (), variables: dict[str, str] | None = None) -> None:
        if len(source) > MAX_SOURCE_CHARS:
            raise ValueError(f"the chat template has {len(source)} characters, more than {MAX_SOURCE_CHARS}")
        self._sandbox = TemplateSandbox()
        try:
            self._template = self._sandbox.from_string(source)
            names = meta.find_undeclared_variables(self._sandbox.parse(source))
        except TemplateError as error:
            raise ValueError(f"the chat template cannot be compiled: {error}") from error
        self._variables = dict(variables or {})
        alternatives = "|".join(re.escape(text) for text in sorted(set(specials), key=len, reverse=True) if text)
        self._special = re.compile(f"({alternatives})") if alternatives else None
        self.knows_tools = "tools" in names and "<tool_call>" in source and "<function=" not in source
        """It writes tools and calls in the Hermes format itself. Other tool formats are not parsed yet: for such a template,
        as for one without tools, the server describes the tools in its own words."""

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] = (),
        *,
        now: datetime,
        prompt_turn: bool = True,
    ) -> Rendered:
        """The prompt of normalised ``messages``. ``now`` is what the template's clock shows: its caller freezes it, so that a
        date in the prompt does not change under a session. ``prompt_turn`` opens the assistant's turn at the end.

        ApiError 400: the template refused (its own text), failed, or took too long or wrote too much.
        """
        mark = self._mark_for([*messages, *tools])
        variables = {
            **self._variables,
            "messages": self._marked(list(messages), mark),
            "tools": self._marked(list(tools), mark) or None,
            "documents": None,
            "add_generation_prompt": prompt_turn,
            "strftime_now": lambda pattern: now.strftime(pattern),
        }
        return self._parts(self._run(variables), mark)

    def _run(self, variables: dict[str, Any]) -> str:
        pieces: list[str] = []
        total = 0
        try:
            with time_limit(MAX_RENDER_S):
                for piece in self._template.generate(variables):
                    pieces.append(piece)
                    total += len(piece)
                    if total > MAX_RENDER_CHARS:
                        raise TemplateTooLong(f"the chat template wrote more than {MAX_RENDER_CHARS} characters")
        except TemplateRefusal as refusal:
            raise ApiError(str(refusal), param="messages", code="template_refused") from refusal
        # A template is a stranger's program: it may raise anything, and none of it may become a 500.
        except Exception as error:
            raise ApiError(
                f"The model's chat template cannot render these messages: {error}", param="messages", code="template_error"
            ) from error
        return "".join(pieces)

    def _mark_for(self, values: list[Any]) -> str:
        """ "" if no string in ``values`` holds a special token's text, else a mark that occurs in none of them."""
        special = self._special
        if special is None:
            return ""
        texts: list[str] = []
        _walk(values, texts.append)
        if not any(special.search(text) for text in texts):
            return ""
        used = set().union(*texts)
        for mark in MARKS:
            if mark not in used:
                return mark
        raise ApiError("The messages use every private-use character.", param="messages")

    def _marked(self, value: Any, mark: str) -> Any:
        if not mark:
            return value
        if isinstance(value, str):
            return self._break_specials(value, mark)
        if isinstance(value, dict):
            return {self._marked(key, mark): self._marked(item, mark) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._marked(item, mark) for item in value]
        return value

    def _break_specials(self, text: str, mark: str) -> str:
        assert self._special is not None
        # Breaking one match can uncover one that overlapped it; each pass breaks at least one, so this ends.
        while self._special.search(text):
            text = self._special.sub(lambda match: match[0][0] + mark + match[0][1:], text)
            if all(len(match[0]) == 1 for match in self._special.finditer(text)):
                break  # a special token of one character cannot be broken; no model we know has one
        return text

    def _parts(self, text: str, mark: str) -> Rendered:
        if not mark:
            return Rendered(((text, True),) if text else ())
        assert self._special is not None
        pieces = self._special.split(text)
        return Rendered(tuple((piece.replace(mark, ""), index % 2 == 1) for index, piece in enumerate(pieces) if piece))


def _walk(value: Any, visit: Callable[[str], None]) -> None:
    if isinstance(value, str):
        visit(value)
    elif isinstance(value, dict):
        for key, item in value.items():
            _walk(key, visit)
            _walk(item, visit)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _walk(item, visit)
