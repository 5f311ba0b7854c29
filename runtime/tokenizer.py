"""The model's own tokenizer; from the arrays of a GGUF file here, from a folder's tokenizer.json in ``runtime.hf_tokenizer``.
Synchronous.

Of GGUF: byte-level BPE (GPT-2's) with the pre-tokenisers of ``_PRE_TOKENIZERS``; anything else is refused by name, because a
tokenizer that is nearly right is worse than none.

Control tokens (``<|im_start|>``) are one id each where they are meant and ordinary text where a user wrote them:
``allow_special`` says which. No id is ever added before or after a text; ``bos_id`` is the caller's.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from functools import cached_property
from typing import cast

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Token types of GGUF (``tokenizer.ggml.token_type``)."""

END_OF_TURN_NAMES = ("<|im_end|>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "</s>")
"""Control tokens that end a turn besides the file's own ``eos_token_id``: chat models end with either."""


class TokenizerError(ValueError):
    """The file's tokenizer cannot be used; the message names the field and what is wrong with it."""


@dataclass(frozen=True, slots=True)
class TokenizerArrays:
    """What a GGUF file says of its tokenizer: ``tokenizer.ggml.*``, with the same names.

    ``tokens``: the text of every id, byte-level alphabet; ``token_type``: one of the types above per id; ``merges``: "left
    right" in order of rank. ``bos_token_id`` and ``eos_token_id``: None where the file has none. ``scores`` (of a join, per
    token) and ``add_space_prefix``: SentencePiece's only.
    """

    model: str
    pre: str
    tokens: tuple[str, ...]
    token_type: tuple[int, ...]
    merges: tuple[str, ...]
    add_bos_token: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    scores: tuple[float, ...] = ()
    add_space_prefix: bool = True

    def digest(self) -> bytes:
        """32 bytes over all fields: two tokenizers with one digest give the same ids."""
        text = json.dumps(asdict(self), ensure_ascii=False, separators=(",", ":"), sort_keys=True)
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def _byte_alphabet() -> dict[int, int]:
    """GPT-2's printable stand-ins: code point -> byte, for ``str.translate``."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet = {byte: byte for byte in printable}
    others = [byte for byte in range(256) if byte not in alphabet]
    return alphabet | {256 + i: byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
SPACE = "▁"
"""SentencePiece's mark for a space."""


class Alphabet(Enum):
    """What the text of a token stands for: GPT-2's letters for bytes; SentencePiece's ``▁`` and ``<0x0A>``; or, where a model
    has no tokenizer, the id itself as a decimal number."""

    BYTE_LEVEL = "byte-level"
    METASPACE = "metaspace"
    IDS = "ids"


def _words(digits: str) -> pre_tokenizers.PreTokenizer:
    """The cut into words that Llama 3 and Qwen share; ``digits``: how many digits make one."""
    words = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(words), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


_PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "smollm": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    "llama-bpe": lambda: _words(r"\p{N}{1,3}"),
    "qwen2": lambda: _words(r"\p{N}"),
}
_WHOLE_WORDS_FIRST = frozenset({"llama-bpe"})
"""Where a word that is a token is that token, whatever its merges say."""
_COMPOSED = frozenset({"qwen2"})
"""Where a text is brought to Unicode's composed form first."""


class Tokenizer:
    """Text to ids and ids to bytes. Immutable; every method may be called from any thread.

    ``fast`` reads control tokens as such, ``fast_text`` reads them as plain text: the two objects of the ``tokenizers`` package
    whose ``async_encode`` a server awaits. (Their plain ``encode`` holds the interpreter lock for as long as it runs.)
    """

    def __init__(
        self,
        tokenizer_json: str,
        arrays_digest: bytes,
        *,
        bos_id: int | None,
        end_ids: frozenset[int],
        alphabet: Alphabet = Alphabet.BYTE_LEVEL,
        prefix_space: bool = False,
    ) -> None:
        """``tokenizer_json``: for the ``tokenizers`` package. ``bos_id``: the id that a prompt begins with, None where the
        model wants none. ``end_ids``: the ids that end a turn. ``prefix_space``: a prompt that begins with text gets a space in
        front of it."""
        self.fast = FastTokenizer.from_str(tokenizer_json)
        self.fast_text = FastTokenizer.from_str(tokenizer_json)
        self.fast_text.encode_special_tokens = True
        self.tokenizer_json = tokenizer_json
        self.digest = arrays_digest
        self.bos_id = bos_id
        self.end_ids = end_ids
        self.alphabet = alphabet
        self._prefix_space = prefix_space
        added = self.fast.get_added_tokens_decoder()
        self.vocab_size = max(self.fast.get_vocab_size(with_added_tokens=True), *(token_id + 1 for token_id in added), 0)
        self.control_ids = {token.content: token_id for token_id, token in added.items() if token.special}
        """Control tokens: text -> id."""
        self._control = frozenset(self.control_ids.values())
        self._literal = frozenset(added)
        self._bytes: dict[int, bytes] = {}

    @property
    def ids_only(self) -> bool:
        """There is no tokenizer: no text can be encoded, and ids are decoded to their decimal numbers."""
        return self.alphabet is Alphabet.IDS

    def encode(self, text: str, *, allow_special: bool) -> list[int]:
        """Ids of ``text``. ``allow_special``: control-token text becomes the control token; else it stays text, which is what
        text from a client needs. Releases the interpreter lock while it works."""
        fast = self.fast if allow_special else self.fast_text
        if self._prefix_space and not (allow_special and self._control_pattern and self._control_pattern.match(text)):
            text = _spaced(text)
        return fast.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def split_parts(self, parts: Sequence[tuple[str, bool]]) -> list[int | str]:
        """A prompt of (text, trusted) parts, cut at the control tokens of its trusted parts.

        Returns control ids and runs of plain text; a run goes across the border of two parts, so its ids are those of the
        whole prompt. The runs are to be encoded without special tokens; control-token text in an untrusted part stays text.
        """
        pieces: list[int | str] = []
        run: list[str] = []

        def end_run() -> None:
            text = "".join(run)
            run.clear()
            if text:
                pieces.append(_spaced(text) if self._prefix_space and not pieces else text)

        for text, trusted in parts:
            cuts = self._control_pattern.split(text) if trusted and self._control_pattern is not None else [text]
            for i, piece in enumerate(cuts):
                if i % 2 == 0:
                    run.append(piece)
                    continue
                end_run()
                pieces.append(self.control_ids[piece])
        end_run()
        return pieces

    def encode_parts(self, parts: Sequence[tuple[str, bool]]) -> list[int]:
        """Ids of a prompt of (text, trusted) parts; see ``split_parts``."""
        pieces = self.split_parts(parts)
        runs = [piece for piece in pieces if isinstance(piece, str)]
        encoded = iter(self.fast_text.encode_batch_fast(runs, add_special_tokens=False))
        ids: list[int] = []
        for piece in pieces:
            if isinstance(piece, int):
                ids.append(piece)
            else:
                ids.extend(next(encoded).ids)
        return ids

    @cached_property
    def _control_pattern(self) -> re.Pattern[str] | None:
        names = sorted(self.control_ids, key=len, reverse=True)
        return re.compile("(" + "|".join(map(re.escape, names)) + ")") if names else None

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``, control tokens left out; U+FFFD for bytes that are no character."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token adds to the text, so that joined bytes decode to the text: none for a control token, nor for an id
        outside the vocabulary."""
        if token_id in self._control or not 0 <= token_id < self.vocab_size:
            return b""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._make_bytes(token_id)
        return known

    def token_text(self, token_id: int) -> str:
        """A token for people to read: control tokens by their name, incomplete characters as U+FFFD."""
        if token_id in self._control:
            return self.fast.id_to_token(token_id) or ""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def _make_bytes(self, token_id: int) -> bytes:
        text = self.fast.id_to_token(token_id) or ""
        if token_id in self._literal:
            return text.encode()
        if self.alphabet is Alphabet.IDS:
            return f"{text} ".encode()
        if self.alphabet is Alphabet.METASPACE:
            byte = _BYTE_TOKEN.fullmatch(text)
            return bytes([int(byte[1], 16)]) if byte else text.replace(SPACE, " ").encode()
        return text.translate(_BYTE_OF).encode("latin-1")


def _spaced(text: str) -> str:
    return text if not text or text.startswith((" ", SPACE)) else " " + text


def _check(arrays: TokenizerArrays) -> None:
    """Raise TokenizerError on anything that would give other ids than the model was trained with."""
    if arrays.model != "gpt2":
        raise TokenizerError(f"tokenizer.ggml.model {arrays.model!r} is not supported, only 'gpt2' (byte-level BPE) is")
    if arrays.pre not in _PRE_TOKENIZERS:
        known = ", ".join(map(repr, _PRE_TOKENIZERS))
        named = f"{arrays.pre!r} is not supported" if arrays.pre else "is missing"
        raise TokenizerError(f"tokenizer.ggml.pre {named}; supported are {known}")
    n = len(arrays.tokens)
    if len(arrays.token_type) != n:
        raise TokenizerError(f"tokenizer.ggml.token_type has {len(arrays.token_type)} entries for {n} tokens")
    if len(set(arrays.tokens)) != n:
        raise TokenizerError("tokenizer.ggml.tokens holds a token twice")
    unsupported = set(arrays.token_type) - {NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED}
    if unsupported:
        raise TokenizerError(f"tokenizer.ggml.token_type holds types {sorted(unsupported)}, which are not supported")
    for name, token_id in (("bos", arrays.bos_token_id), ("eos", arrays.eos_token_id)):
        if token_id is not None and not 0 <= token_id < n:
            raise TokenizerError(f"tokenizer.ggml.{name}_token_id {token_id} is outside the vocabulary of {n}")
    if arrays.add_bos_token and arrays.bos_token_id is None:
        raise TokenizerError("tokenizer.ggml.add_bos_token is set, but there is no bos_token_id")
    for text, kind in zip(arrays.tokens, arrays.token_type, strict=True):
        if kind in (NORMAL, UNKNOWN, UNUSED) and not all(ord(character) in _BYTE_OF for character in text):
            raise TokenizerError(f"tokenizer.ggml.tokens holds {text!r}, which is not in the byte-level alphabet")


def build_tokenizer(arrays: TokenizerArrays) -> Tokenizer:
    """The tokenizer of a GGUF file (about 0.2 s for 49k tokens). Raises TokenizerError naming the field."""
    _check(arrays)
    merges = [tuple(merge.split(" ")) for merge in arrays.merges]
    vocab = {text: i for i, text in enumerate(arrays.tokens)}
    if any(len(merge) != 2 or not all(part in vocab for part in (*merge, "".join(merge))) for merge in merges):
        raise TokenizerError("tokenizer.ggml.merges holds an entry that is not two tokens making a third")
    pairs = cast(list[tuple[str, str]], merges)
    fast = FastTokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=arrays.pre in _WHOLE_WORDS_FIRST))
    if arrays.pre in _COMPOSED:
        fast.normalizer = normalizers.NFC()
    fast.pre_tokenizer = _PRE_TOKENIZERS[arrays.pre]()
    fast.decoder = decoders.ByteLevel()
    for kind in (CONTROL, USER_DEFINED):
        names = [text for text, its_kind in zip(arrays.tokens, arrays.token_type, strict=True) if its_kind == kind]
        added = [AddedToken(name, special=kind == CONTROL, normalized=False) for name in names]
        fast.add_special_tokens(added) if kind == CONTROL else fast.add_tokens(added)
    return Tokenizer(
        fast.to_str(),
        arrays.digest(),
        bos_id=arrays.bos_token_id if arrays.add_bos_token else None,
        end_ids=end_ids(arrays),
    )


def end_ids(arrays: TokenizerArrays) -> frozenset[int]:
    """The ids that end a turn: the file's end-of-sequence id and the control tokens of ``END_OF_TURN_NAMES``."""
    found = set() if arrays.eos_token_id is None else {arrays.eos_token_id}
    for i, (text, kind) in enumerate(zip(arrays.tokens, arrays.token_type, strict=True)):
        if kind == CONTROL and text in END_OF_TURN_NAMES:
            found.add(i)
    return frozenset(found)
