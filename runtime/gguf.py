"""Reading a GGUF file: its key-value fields, and its tensors as views into one read-only mapping.

Own reader, because the ``gguf`` package's walks the token arrays through numpy (2 s at each start; here 0.1 s), and because a
damaged file must end in one sentence. Nothing in the file is trusted: every count and offset is checked against its size.

Layout (GGUF 2 and 3, little-endian): magic, version u32, tensor count u64, field count u64, fields, tensor infos, padding to
``general.alignment``, data. Source: ggml-org/ggml, docs/gguf.md.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from kvalet.runtime.errors import ModelError
from numpy.typing import NDArray

VERSIONS = (2, 3)
MAX_DIMS = 4
MAX_NAME = 128
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of the file. ``shape``: outermost dimension first (rows, columns), in elements. ``kind``: how it is stored.
    ``start`` and ``n_bytes``: where its bytes lie in the file."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    start: int
    n_bytes: int


class _Cursor:
    """Reads values one after the other; anything beyond the end is a ModelError."""

    def __init__(self, data: mmap.mmap | bytes, name: str) -> None:
        self.data = data
        self.size = len(data)
        self.at = 0
        self._name = name

    def short(self, what: str) -> ModelError:
        return ModelError(f"model file {self._name} is damaged or cut short: {what} goes beyond its end ({self.size} bytes)")

    def scalar(self, code: str) -> Any:
        size = struct.calcsize("<" + code)
        if self.at + size > self.size:
            raise self.short("a field")
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += size
        return value

    def string(self) -> str:
        length = self.scalar("Q")
        if length > self.size - self.at:
            raise self.short("a text")
        raw = self.data[self.at : self.at + length]
        self.at += length
        return raw.decode("utf-8", "surrogateescape")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array()
        if kind not in _SCALARS:
            raise ModelError(f"model file {self._name} is damaged: field type {kind} does not exist")
        return self.scalar(_SCALARS[kind])

    def _array(self) -> tuple[Any, ...]:
        kind, count = self.scalar("I"), self.scalar("Q")
        if kind in _SCALARS:
            size = count * struct.calcsize("<" + _SCALARS[kind])
            if size > self.size - self.at:
                raise self.short("an array")
            values = struct.unpack_from(f"<{count}{_SCALARS[kind]}", self.data, self.at)
            self.at += size
            return values
        if kind != _STRING:  # arrays of arrays exist in no model we know
            raise ModelError(f"model file {self._name} has an array of type {kind}, which is not supported")
        if count * 8 > self.size - self.at:
            raise self.short("an array")
        return self._strings(count)

    def _strings(self, count: int) -> tuple[str, ...]:
        """Many strings: the tokens and merges, where a method call per string would cost half a second."""
        data, at, size, unpack = self.data, self.at, self.size, struct.Struct("<Q").unpack_from
        strings = []
        for _ in range(count):
            if at + 8 > size:
                raise self.short("a text")
            (length,) = unpack(data, at)
            at += 8
            if length > size - at:
                raise self.short("a text")
            strings.append(data[at : at + length].decode("utf-8", "surrogateescape"))
            at += length
        self.at = at
        return tuple(strings)


class GgufFile:
    """One open model file. ``fields``: name -> value (arrays are tuples); ``tensors``: name -> ``TensorInfo``; ``head_bytes``:
    the bytes before the tensor data, from which everything but the weights follows. Close it when the weights are made."""

    def __init__(self, path: Path) -> None:
        """Raises ModelError, with one sentence, for a file that is missing, short, damaged or no GGUF."""
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise ModelError(f"there is no model file at {path}") from None
        except ValueError:
            raise ModelError(f"model file {path} is empty") from None
        except OSError as error:
            raise ModelError(f"model file {path} cannot be read: {error.strerror or error}") from None
        try:
            self._parse()
        except BaseException:
            self.close()
            raise

    def _parse(self) -> None:
        cursor = _Cursor(self._map, str(self.path))
        if self._map[:4] != b"GGUF":
            raise ModelError(f"model file {self.path} is not a GGUF file")
        cursor.at = 4
        self.version: int = cursor.scalar("I")
        if self.version not in VERSIONS:
            raise ModelError(f"model file {self.path} has GGUF version {self.version}; supported are 2 and 3, little-endian")
        n_tensors, n_fields = cursor.scalar("Q"), cursor.scalar("Q")
        if max(n_tensors, n_fields) * 12 > cursor.size:
            raise cursor.short("its table of contents")
        self.fields: dict[str, Any] = {}
        for _ in range(n_fields):
            name = cursor.string()
            self.fields[name] = cursor.value(cursor.scalar("I"))
        infos = [self._info(cursor) for _ in range(n_tensors)]
        alignment = self.fields.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or not 0 < alignment <= MAX_ALIGNMENT:
            raise ModelError(f"model file {self.path} has general.alignment {alignment!r}, which is not supported")
        base = -(-cursor.at // alignment) * alignment
        self.tensors: dict[str, TensorInfo] = {}
        for info in infos:
            if base + info.start + info.n_bytes > cursor.size:
                raise cursor.short(f"tensor {info.name}")
            self.tensors[info.name] = TensorInfo(info.name, info.shape, info.kind, base + info.start, info.n_bytes)
        self.head_bytes = self._map[: cursor.at]

    def _info(self, cursor: _Cursor) -> TensorInfo:
        name, n_dims = cursor.string(), cursor.scalar("I")
        if len(name) > MAX_NAME or not name.isprintable():
            raise ModelError(f"model file {self.path} is damaged: a tensor's name is {name[:20]!r}")
        if not 0 < n_dims <= MAX_DIMS:
            raise ModelError(f"model file {self.path} is damaged: tensor {name} has {n_dims} dimensions")
        shape = tuple(cursor.scalar("Q") for _ in range(n_dims))[::-1]
        code, start = cursor.scalar("I"), cursor.scalar("Q")
        try:
            kind = GGMLQuantizationType(code)
            block, block_bytes = GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            raise ModelError(f"tensor {name} of {self.path} has the unknown type {code}") from None
        if shape[-1] % block:
            raise ModelError(f"tensor {name} of {self.path} has {shape[-1]} columns, not a multiple of {kind.name}'s {block}")
        n_elements = 1
        for size in shape:
            n_elements *= size
        return TensorInfo(name, shape, kind, start, n_elements // block * block_bytes)

    def data(self, name: str) -> NDArray[np.uint8]:
        """The stored bytes of a tensor, uint8 [n_bytes], read-only, without a copy. Valid until ``close``."""
        info = self.tensors[name]
        return np.frombuffer(self._map, dtype=np.uint8, count=info.n_bytes, offset=info.start)

    def field(self, name: str, convert: Callable[[Any], Any], default: Any = None) -> Any:
        """The field's value through ``convert``; ``default`` where the file has none. Raises ModelError if it does not fit or
        if it is missing without a default."""
        value = self.fields.get(name)
        if value is None:
            if default is None:
                raise ModelError(f"model file {self.path} has no field {name}")
            return default
        try:
            return convert(value)
        except (TypeError, ValueError):
            raise ModelError(f"model file {self.path} has {name} = {str(value)[:40]!r}, which is not understood") from None

    def close(self) -> None:
        """Unmap; where a view is still held, the mapping lives until the view goes. Idempotent."""
        try:
            self._map.close()
        except BufferError:
            pass
