"""``kvalet chat``: talk to a running server in the terminal. Any OpenAI-compatible server will do.

Standard library only on this side, so that it shows what a client needs and starts at once.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

DEFAULT_URL = "http://127.0.0.1:8000/v1"
TIMEOUT_S = 300.0
HELP = "/new begins again, /quit or end of input leaves, Ctrl-C stops an answer."


class ChatError(Exception):
    """One sentence for the person at the terminal."""


@dataclass
class Client:
    """One conversation with one server. ``url`` ends in /v1."""

    url: str
    key: str = ""
    model: str = ""
    max_tokens: int = 0
    temperature: float | None = None
    session: str = field(default_factory=lambda: f"chat-{os.urandom(8).hex()}")

    def find_model(self) -> str:
        """The server's first model, unless one was named. ChatError where no server answers."""
        if not self.model:
            with self._open("/models") as reply:
                models = json.load(reply).get("data", [])
            if not models:
                raise ChatError(f"the server at {self.url} has no model")
            self.model = models[0]["id"]
        return self.model

    def answer(self, messages: Sequence[Mapping[str, str]]) -> Iterator[dict[str, Any]]:
        """The chunks of one streamed answer. ChatError for an error of the server's. Closing the iterator stops it."""
        body: dict[str, Any] = {
            "model": self.model,
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.max_tokens:
            body["max_tokens"] = self.max_tokens
        if self.temperature is not None:
            body["temperature"] = self.temperature
        with self._open("/chat/completions", json.dumps(body).encode()) as reply:
            for line in reply:
                data = line.strip().removeprefix(b"data: ")
                if not line.startswith(b"data: "):
                    continue
                if data == b"[DONE]":
                    return
                chunk = json.loads(data)
                if chunk.get("error"):
                    raise ChatError(str(chunk["error"].get("message", "the server reports an error")))
                yield chunk

    def _open(self, path: str, body: bytes | None = None) -> http.client.HTTPResponse:
        headers = {"content-type": "application/json", "x-session-id": self.session}
        if self.key:
            headers["authorization"] = f"Bearer {self.key}"
        try:
            request = urllib.request.Request(self.url + path, data=body, headers=headers)
            reply = urllib.request.urlopen(request, timeout=TIMEOUT_S)
        except urllib.error.HTTPError as error:
            hint = ""
            if error.code == 404 and not self.url.endswith("/v1"):
                hint = f" (is the base URL {self.url}/v1?)"
            raise ChatError(server_message(error) + hint) from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise ChatError(f"no server answers at {self.url} ({reason}): start one with `kvalet serve`") from None
        assert isinstance(reply, http.client.HTTPResponse)
        return reply


def server_message(error: urllib.error.HTTPError) -> str:
    """The sentence inside the server's error object, or its status."""
    with error:
        try:
            return str(json.load(error)["error"]["message"])
        except (ValueError, KeyError, TypeError):
            return f"the server answered with status {error.code}"


def talk(client: Client, system: str, read: Callable[[str], str], write: Callable[[str], None]) -> None:
    """Question and answer until the end of input. An answer that fails or is stopped is not kept in the history."""
    messages = [{"role": "system", "content": system}] if system else []
    beginning = list(messages)
    while True:
        try:
            text = read("> ").strip()
        except EOFError:
            return
        if text in ("/quit", "/exit"):
            return
        if text == "/new":
            messages = list(beginning)
            client.session = f"chat-{os.urandom(8).hex()}"
        elif text == "/help":
            write(HELP + "\n")
        elif text:
            asked = [*messages, {"role": "user", "content": text}]
            answer = say_answer(client, asked, write)
            if answer:
                messages = [*asked, {"role": "assistant", "content": answer}]


def say_answer(client: Client, messages: Sequence[Mapping[str, str]], write: Callable[[str], None]) -> str:
    """Writes the answer as it comes; its whole text, "" where it failed or was stopped."""
    pieces: list[str] = []
    usage: Mapping[str, Any] = {}
    try:
        for chunk in client.answer(messages):
            usage = chunk.get("usage") or usage
            for choice in chunk.get("choices", []):
                piece = choice.get("delta", {}).get("content") or ""
                pieces.append(piece)
                write(piece)
    except KeyboardInterrupt:
        write("\n(stopped)\n")
        return ""
    except (ChatError, OSError, http.client.HTTPException) as error:
        write(f"\n(error: {error})\n")
        return ""
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    write(f"\n({usage.get('prompt_tokens', 0)} tokens in, {cached} of them cached; {usage.get('completion_tokens', 0)} out)\n")
    return "".join(pieces)


def main(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> int:
    parser = argparse.ArgumentParser("kvalet chat", description="Talk to a running server.", epilog=HELP)
    parser.add_argument(
        "--url", default=environment.get("OPENAI_BASE_URL", DEFAULT_URL), help="base URL (default: %(default)s)"
    )
    parser.add_argument("--api-key", default=environment.get("OPENAI_API_KEY", ""), help="default: OPENAI_API_KEY")
    parser.add_argument("--model", default="", help="default: the server's first model")
    parser.add_argument("--system", default="", help="system message")
    parser.add_argument("--max-tokens", type=int, default=0, help="longest answer (default: the server's)")
    parser.add_argument("--temperature", type=float, default=None, help="default: the server's")
    asked = parser.parse_args(list(arguments))
    client = Client(asked.url.rstrip("/"), asked.api_key, asked.model, asked.max_tokens, asked.temperature)
    try:
        print(f"{client.find_model()} at {client.url}. {HELP}")
    except ChatError as error:
        print(f"kvalet: {error}", file=sys.stderr)
        return 2

    def write(text: str) -> None:
        print(text, end="", flush=True)

    try:
        talk(client, asked.system, input, write)
    except KeyboardInterrupt:
        print()
    return 0
