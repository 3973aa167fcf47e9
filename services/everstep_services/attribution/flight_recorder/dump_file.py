"""Decodes the file of a dump: JSON, whole or cut off, or a pickle of nothing but data.

A pickle can run only what it has imported by name, or reached by a persistent id. Both are refused
here, so nothing is left to call. Memory is the caller's concern: a few bytes can ask for gigabytes,
so dumps are read in a process with a limit (`folder.py`).
"""

import io
import json
import pickle  # noqa: TID251  torch writes its dumps so; this reads data alone
import re
from collections.abc import Mapping
from typing import Any, NoReturn

import msgspec

from everstep.observe.printable import printable

_MOST_ENTRIES = 1_000_000
_MARKS = {b"\xef\xbb\xbf": "utf-8", b"\xff\xfe": "utf-16-le", b"\xfe\xff": "utf-16-be"}
"""How text begins that was written by an editor or a shell of Windows."""


class BadDumpError(Exception):
    """The file is not a dump of a flight recorder; the text has the reason."""


class NotDataError(Exception):
    """A pickle imports something, is truncated, or is not a pickle."""


class _DataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> NoReturn:
        wanted = printable(f"{module[:80]}.{name[:80]}").replace("\n", "\\u000a")
        raise NotDataError(f"it wants to import {wanted}, which no dump needs")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise NotDataError(f"it refers to something outside of itself ({str(pid)[:80]!r})")


def load_data(content: bytes) -> Any:
    """Return the data of a pickle; `NotDataError` for everything that is not data."""
    try:
        # The unpickler reads three times as fast from a file that it can peek into.
        file = io.BufferedReader(io.BytesIO(content))
        return _DataUnpickler(file, errors="replace").load()
    except NotDataError:
        raise
    except MemoryError:
        raise NotDataError("it asks for more memory than a dump may take") from None
    except Exception as error:
        raise NotDataError(f"it is not a complete pickle: {error}") from error


def decoded_entries(content: bytes) -> tuple[list[Any], Mapping[str, Any]]:
    """The entries of a dump as they stand there, and what stands next to them."""
    return parts_of(decoded(content)[0])


def decoded(content: bytes) -> tuple[Any, list[str]]:
    """Return the data of a dump, and the problems of its file; `BadDumpError` if it is not one."""
    for mark, encoding in _MARKS.items():
        if content.startswith(mark):
            content = content.decode(encoding, "replace").lstrip("\ufeff").encode()
            break
    if content[:1] in {b"{", b"["}:
        try:
            return msgspec.json.decode(content), []
        except UnicodeDecodeError as error:
            problem = f"it is not Unicode ({error.reason} at byte {error.start} of a text)"
            data, problems = decoded(content.decode("utf-8", "replace").encode())
            return data, [problem, *problems]
        except (msgspec.DecodeError, RecursionError) as error:
            return _salvaged(content, str(error))
    try:
        return load_data(content), []
    except NotDataError as error:
        raise BadDumpError(str(error)) from error


def _salvaged(content: bytes, why: str) -> tuple[Any, list[str]]:
    """The whole entries of a JSON dump that was cut off."""
    text = content.decode("utf-8", "replace")
    start = text.find('"entries"')
    start = text.find("[", start) if start >= 0 else -1
    entries: list[Any] = []
    decoder, at = json.JSONDecoder(), start + 1
    while start >= 0 and len(entries) < _MOST_ENTRIES:
        brace = text.find("{", at)
        if brace < 0:
            break
        try:
            entry, at = decoder.raw_decode(text, brace)
        except (ValueError, RecursionError):
            break
        entries.append(entry)
    if not entries:
        raise BadDumpError(f"it is not complete JSON, and no entry of it can be read: {why}")
    version = re.search(r'"version"\s*:\s*"([\d.]{1,16})"', text)
    head = {"entries": entries, "version": version[1] if version else ""}
    return head, [f"it is cut off: {len(entries)} entries could be read ({why})"]


def parts_of(data: Any) -> tuple[list[Any], Mapping[str, Any]]:
    """Return the entries, and what stands next to them."""
    if isinstance(data, list):  # the first format had no head
        data = {"entries": data}
    if not isinstance(data, dict) or not isinstance(data.get("entries", []), list):
        raise BadDumpError("it has no list of entries: not a dump of a flight recorder")
    if "entries" not in data and "version" not in data:
        raise BadDumpError("it has neither entries nor a version: not a dump of a flight recorder")
    entries = data.get("entries", [])
    if len(entries) > _MOST_ENTRIES:
        raise BadDumpError(f"it has {len(entries)} entries; at most {_MOST_ENTRIES} are read")
    return entries, data
