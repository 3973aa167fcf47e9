"""A section of the settings: its fields, their help, and how a value is shown."""

import functools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec

from everstep.errors import EverstepError

HIDDEN = "***"

_SECRET = re.compile(r"passw|secret|token|credential|private|(^|_)(pw|key|seed|nkey)(_|$)")
_URL_PASSWORD = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*://)[^\s/@]+@", re.IGNORECASE)
_SHOWN_CHARACTERS = 200


class SettingsError(EverstepError):
    """A setting, or the file that should hold it, cannot be used. The text names the place."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One section of the settings.

    Names carry units (`_s`, `_bytes`). A secret is never a value: only the path of the file
    that holds it, in a field whose name ends in `_file`. The string under a field is its help.
    Values are checked in `__post_init__`, by raising ValueError.
    """

    def _above_zero(self, names: str, below: float = math.inf) -> None:
        """Refuse these numbers, where they are set, unless they are above 0."""
        self._check(names, "be above 0", lambda value: value > 0)
        self._check(names, f"be below {below:g}", lambda value: below == math.inf or value < below)

    def _not_negative(self, names: str, below: float = math.inf) -> None:
        """Refuse these numbers, where they are set, if they are below 0."""
        self._check(names, "not be negative", lambda value: value >= 0)
        self._check(names, f"be below {below:g}", lambda value: below == math.inf or value < below)

    def _at_least(self, least: float, names: str) -> None:
        """Refuse these numbers, where they are set, if they are below the least."""
        self._check(names, f"be at least {least:.15g}", lambda value: value >= least)

    def _check(self, names: str, rule: str, obeys: Callable[[float], bool]) -> None:
        for name in names.split():
            value = getattr(self, name)
            if value is not None and not obeys(value):
                raise ValueError(f"{name} must {rule}, got {value:g}")


@dataclass(frozen=True, slots=True)
class Leaf:
    """One setting of a section; nested sections are walked, so that this has a plain value."""

    key: str
    """Dotted, the section first."""
    path: tuple[str, ...]
    """The attributes that lead to it from the section."""
    type: Any
    owner: type[Settings]

    @property
    def variable(self) -> str:
        """Its name in the environment."""
        return "EVERSTEP_" + self.key.upper().replace(".", "__")

    @property
    def help(self) -> str:
        """Its meaning, from the string in the source."""
        return field_help(self.owner).get(self.path[-1], "")


def leaves(of: type[Settings], prefix: str, path: tuple[str, ...] = ()) -> list[Leaf]:
    """Each setting of a section, nested ones included, in the order of definition."""
    leaves_found: list[Leaf] = []
    for field in msgspec.structs.fields(of):
        key, inner = f"{prefix}.{field.encode_name}", (*path, field.name)
        if is_section(field.type):
            leaves_found += leaves(field.type, key, inner)
        else:
            leaves_found.append(Leaf(key, inner, field.type, of))
    return leaves_found


def is_section(of: object) -> bool:
    """Whether a field of this type is a section inside a section."""
    return isinstance(of, type) and issubclass(of, Settings)


@functools.cache
def field_help(of: type[Settings]) -> dict[str, str]:
    """The string under each field in the source, on one line. Empty without source."""
    helps: dict[str, str] = {}
    for base in reversed(of.__mro__):
        if issubclass(base, Settings) and base is not Settings:
            helps |= _strings_under_fields(base)
    return helps


def is_secret(key: str) -> bool:
    """Whether the text under this name must never be printed."""
    name = key.rpartition(".")[2].lower()
    return bool(_SECRET.search(name)) and not name.endswith("_file")


def shown(key: str, value: object) -> str:
    """A value as people may see it: secrets, and the user part of URLs, are replaced."""
    if value is None:
        return ""
    if is_secret(key) and isinstance(value, str | bytes):
        return HIDDEN
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return ", ".join(shown(key, item) for item in value)
    text = _URL_PASSWORD.sub(rf"\g<scheme>{HIDDEN}@", str(value))
    text = " ".join(text.splitlines())
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."


def _strings_under_fields(base: type) -> dict[str, str]:
    import ast  # here: slow to import, and only help needs them
    import inspect

    try:
        tree = ast.parse(inspect.cleandoc("\n" + inspect.getsource(base)))
    except (OSError, TypeError, SyntaxError):  # no source: a frozen program, a prompt
        return {}
    helps: dict[str, str] = {}
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    for field, below in pairwise(body):
        match field, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                helps[name] = " ".join(text.split())
            case _:
                pass
    return helps
