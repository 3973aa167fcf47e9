"""The layers of settings: their order, and what is refused in them."""

import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from everstep.evidence.files import open_regular
from everstep.settings.file_owners import stranger_of
from everstep.settings.schema import (
    Leaf,
    Settings,
    SettingsError,
    is_secret,
    is_section,
    leaves,
    shown,
)
from everstep.settings.values import converted, without_none

FILE_NAME = "everstep.toml"
MAX_FILE_BYTES = 1 << 20
DEFAULT = "default"

KNOWN_SECTIONS = frozenset(
    [
        *["agent", "api", "attribution", "bus", "catalog", "checkpoint", "checks", "client"],
        *["health", "history", "log", "logins", "notify", "observe", "rendezvous", "run"],
        *["state", "straggler"],
    ]
)
"""Sections that some process reads. A process ignores those of others."""

_PREFIX = "EVERSTEP_"
_PLAIN_VARIABLES = frozenset({"EVERSTEP_CONFIG", "EVERSTEP_STATE_DIR"})

S = TypeVar("S", bound=Settings)
Given = tuple[str, object, str]
"""A key, its value as written, and where it was written."""


@dataclass(frozen=True, slots=True)
class Flag:
    """The value of one setting on the command line; None for a flag that was not given."""

    name: str
    """As typed, for instance `--port`."""
    key: str
    """The setting, for instance `api.port`."""
    value: object


@dataclass(frozen=True, slots=True)
class Row:
    """One setting as people see it."""

    key: str
    value: str
    """Never a secret: those are replaced."""
    origin: str
    help: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """Every requested section, and the origin of each value."""

    sections: Mapping[str, Settings]
    origins: Mapping[str, str]
    """By dotted key: `default`, `file PATH`, `environment NAME` or `flag --name`."""
    files: tuple[Path, ...]
    """The files that were read, the strongest last."""

    def section(self, of: type[S]) -> S:
        """The section of this type."""
        for settings in self.sections.values():
            if type(settings) is of:
                return settings
        raise KeyError(f"{of.__name__} is not among the sections that were loaded")

    def rows(self) -> list[Row]:
        """All settings, in the order of their definition, fit for printing."""
        return [
            Row(
                leaf.key, shown(leaf.key, _value(settings, leaf)), self.origins[leaf.key], leaf.help
            )
            for name, settings in self.sections.items()
            for leaf in leaves(type(settings), name)
        ]


def config_files(
    environ: Mapping[str, str], chosen: Path | None = None, *, root: Path = Path("/")
) -> tuple[Path, ...]:
    """The files to read, the weakest first: those of the three usual places that exist.

    With `chosen`, or `EVERSTEP_CONFIG`, that one only; it must exist. `root` is for tests.
    Settings name programs and addresses that get secrets: a file that a stranger may have written
    in the home or in this folder raises `SettingsError`.
    """
    if chosen is None and environ.get("EVERSTEP_CONFIG"):
        chosen = Path(environ["EVERSTEP_CONFIG"])
    if chosen is not None:
        return (chosen.expanduser(),)
    of_site, *others = usual_places(environ, root=root)
    for path in filter(_is_there, others):
        if why := stranger_of(path):
            raise SettingsError(
                f"{path} is not read: {why}; if you trust it, name it with --config or "
                f"EVERSTEP_CONFIG"
            )
    return tuple(path for path in (of_site, *others) if _is_there(path))


def usual_places(environ: Mapping[str, str], *, root: Path = Path("/")) -> tuple[Path, ...]:
    """Where a settings file is looked for when none was chosen, the weakest first."""
    home = Path(environ["HOME"]) if environ.get("HOME") else Path("~").expanduser()
    personal = Path(environ.get("XDG_CONFIG_HOME") or home / ".config")
    return (
        root / "etc" / "everstep" / FILE_NAME,
        personal / "everstep" / FILE_NAME,
        Path(FILE_NAME),
    )


def load(
    sections: Mapping[str, type[Settings]],
    *,
    files: Sequence[Path] = (),
    environ: Mapping[str, str],
    flags: Iterable[Flag] = (),
) -> Loaded:
    """Read every layer once. Raises `SettingsError`, one line, at the first mistake.

    A section of another service is ignored, wherever it is set; everything else that is not known
    is refused.
    """
    leaves_by_key = {leaf.key: leaf for name, of in sections.items() for leaf in leaves(of, name)}
    _refuse_inline_secrets(leaves_by_key.values())
    values: dict[str, object] = {}
    origins = dict.fromkeys(leaves_by_key, DEFAULT)
    for key, given, origin in _given(sections, leaves_by_key, files, environ, flags):
        is_text = origin.startswith("environment ")
        values[key] = converted(leaves_by_key[key], given, origin, is_text=is_text)
        origins[key] = origin
    built = {name: _built(name, of, values, origins) for name, of in sections.items()}
    return Loaded(built, origins, tuple(files))


def _given(
    sections: Mapping[str, type[Settings]],
    leaves_by_key: Mapping[str, Leaf],
    files: Sequence[Path],
    environ: Mapping[str, str],
    flags: Iterable[Flag],
) -> Iterator[Given]:
    """The values of each layer, the weakest first."""
    for path in files:
        for name, table in _read(path).items():
            if name not in KNOWN_SECTIONS.union(sections):
                near = _did_you_mean(name, KNOWN_SECTIONS.union(sections))
                raise SettingsError(f"{path}: [{name}] is not a section{near}")
            if not isinstance(table, dict):
                raise SettingsError(f"{path}: {name} is a section: write [{name}]")
            if name in sections:
                yield from _from_table(leaves_by_key, path, name, table)
    yield from _from_environment(sections, leaves_by_key, environ)
    for flag in flags:
        if flag.value is not None:
            yield flag.key, flag.value, f"flag {flag.name}"


def _from_table(
    leaves_by_key: Mapping[str, Leaf], path: Path, prefix: str, table: Mapping[str, object]
) -> Iterator[Given]:
    for name, value in table.items():
        key = f"{prefix}.{name}"
        if key in leaves_by_key:
            yield key, value, f"file {path}"
        elif any(other.startswith(f"{key}.") for other in leaves_by_key):
            if not isinstance(value, dict):
                raise SettingsError(f"{path}: {key} is a section: write [{key}]")
            yield from _from_table(leaves_by_key, path, key, value)
        else:
            raise SettingsError(f"{path}: {key} is not a setting{_hint(key, leaves_by_key)}")


def _from_environment(
    sections: Mapping[str, type[Settings]],
    leaves_by_key: Mapping[str, Leaf],
    environ: Mapping[str, str],
) -> Iterator[Given]:
    variables = {leaf.variable: leaf for leaf in leaves_by_key.values()}
    # EVERSTEP_BUS_URL looks right, and would be ignored silently.
    misspelt = {name.replace("__", "_"): name for name in variables}
    for name, value in sorted(environ.items()):
        if not name.startswith(_PREFIX) or name in _PLAIN_VARIABLES:
            continue
        section, double, _ = name.removeprefix(_PREFIX).lower().partition("__")
        if name in variables:
            yield variables[name].key, value, f"environment {name}"
        elif name in misspelt:
            raise SettingsError(f"{name} is not a setting; did you mean {misspelt[name]}?")
        elif double and section in sections:
            key = name.removeprefix(_PREFIX).lower().replace("__", ".")
            near = {leaf.key: variable for variable, leaf in variables.items()}
            raise SettingsError(f"{name} is not a setting{_hint(key, leaves_by_key, spelled=near)}")
        elif double and section not in KNOWN_SECTIONS:
            hint = _did_you_mean(section, KNOWN_SECTIONS.union(sections))
            raise SettingsError(f"{name}: [{section}] is not a section{hint}")


def _hint(key: str, keys: Iterable[str], *, spelled: Mapping[str, str] | None = None) -> str:
    """The key that was probably meant, spelled as it must be there."""
    spelled = spelled or {name: name for name in keys}
    if is_secret(key):
        in_file = spelled.get(f"{key}_file")
        return "; a secret is read from a file" + (f": set {in_file}" if in_file else "")
    return _did_you_mean(key, keys, spelled)


def _did_you_mean(name: str, names: Iterable[str], spelled: Mapping[str, str] | None = None) -> str:
    import difflib  # here: only a mistake needs it

    close = difflib.get_close_matches(name, sorted(names), n=1, cutoff=0.6)
    return f"; did you mean {(spelled or {}).get(close[0], close[0])}?" if close else ""


def _read(path: Path) -> dict[str, object]:
    try:
        with open_regular(path) as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror}") from error
    if len(data) > MAX_FILE_BYTES:
        raise SettingsError(f"{path} is larger than {MAX_FILE_BYTES >> 10} KiB: no settings")
    try:
        return tomllib.loads(data.decode())
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path} is not UTF-8 text (at byte {error.start})") from error
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{path} is not TOML: {error}") from error
    except RecursionError as error:
        raise SettingsError(f"{path} is not TOML: nested too deeply") from error


def _is_there(path: Path) -> bool:
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True  # reading it raises the error
    return True


def _built(name: str, of: type[S], values: Mapping[str, object], origins: Mapping[str, str]) -> S:
    arguments: dict[str, object] = {}
    for field in msgspec.structs.fields(of):
        key = f"{name}.{field.encode_name}"
        if key in values:
            arguments[field.name] = values[key]
        elif is_section(field.type):
            arguments[field.name] = _built(key, field.type, values, origins)
        elif field.required:
            variable = _PREFIX + key.upper().replace(".", "__")
            raise SettingsError(
                f"{key} is not set: write it under [{name}] in {FILE_NAME}, or set {variable}"
            )
    try:
        return of(**arguments)
    except ValueError as error:
        given = [value for key, value in origins.items() if key.startswith(f"{name}.")]
        where = ", ".join(sorted(set(given) - {DEFAULT}))
        raise SettingsError(f"[{name}] {error}{f' ({where})' if where else ''}") from error


def _value(settings: Settings, leaf: Leaf) -> object:
    value: object = settings
    for part in leaf.path:
        value = getattr(value, part)
    return value


def _refuse_inline_secrets(every_leaf: Iterable[Leaf]) -> None:
    for leaf in every_leaf:
        if is_secret(leaf.key) and without_none(leaf.type)[0] is str:
            raise TypeError(f"{leaf.key} would hold a secret: make it {leaf.key}_file, a path")
