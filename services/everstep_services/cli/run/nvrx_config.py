"""Reads the configuration file of NVRx's launcher, as options with the line that has each."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everstep.evidence.files import read_regular

_SECTION = "fault_tolerance"
_MOST_BYTES = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_OPTIONS = {
    "num_warmup_iterations": "--ft-num-warmup-iterations",
    "storage_healthcheck_path": "--ft-storage-health-check-path",
}
"""The options of keys that differ from their option's name."""


class FileError(ValueError):
    """The file cannot be read, or has no meaning as a configuration of NVRx."""


@dataclass(frozen=True, slots=True)
class FileOption:
    """A key of the file, as an option of ft_launcher."""

    option: str
    """Its option, with dashes; an unknown key has an option that does not exist."""
    text: str
    """The value, as it would be typed."""
    origin: str
    """File, line and key, for messages."""


def file_options(path: str, *, may_lack: bool) -> list[FileOption]:
    """The options in a file; the section `fault_tolerance` may be nested anywhere in it.

    `may_lack` allows a file without the section. Raises `FileError` with file, line and key.
    """
    tree = _tree(path)
    section = None if tree is None else _section(tree, path)
    if section is not None:
        return list(_options(section, path))
    if not may_lack:
        raise FileError(
            f"--ft-cfg-path {path}: it has no section `{_SECTION}:`; add one, or give "
            "--ft-ignore-missing-cfg"
        )
    return []


def option_of(key: str) -> str:
    """The option that a key of the file is taken as; an unknown key has none that exists."""
    return _OPTIONS.get(key, f"--ft-{key.removeprefix('ft_').replace('_', '-')}")


def _tree(path: str) -> Any:
    """The parsed file, whose nodes know their lines; None if it is empty."""
    try:
        import yaml
    except ImportError as error:
        raise FileError(
            f"--ft-cfg-path {path}: PyYAML is missing: pip install 'everstep[cli]'"
        ) from error
    try:
        octets = read_regular(Path(path).expanduser())
    except OSError as error:
        raise FileError(f"--ft-cfg-path {path}: {error.strerror or error}") from error
    if len(octets) > _MOST_BYTES:
        raise FileError(f"--ft-cfg-path {path}: {len(octets)} bytes are too many for such a file")
    try:
        return yaml.compose(octets, yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise FileError(f"--ft-cfg-path {path}{_where(error)}") from error


def _where(error: Exception) -> str:
    """Line and problem of an error of the parser."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error) or "it is nested too deeply"
    line = "" if mark is None else f", line {mark.line + 1}"
    return f"{line}: this is not YAML: {' '.join(problem.split())}"


def _section(tree: Any, path: str) -> Any:
    """The mapping under `fault_tolerance`; None if there is none. Several are refused."""
    sections = list(_sections(tree))
    if not sections:
        return None
    first_line, first = sections[0]
    for line, other in sections[1:]:
        if other is not first:  # an alias is the same section
            raise FileError(
                f"--ft-cfg-path {path}, line {line}: {_SECTION} was given in line {first_line} "
                "already: remove one"
            )
    return _mapping(first, path)


def _sections(tree: Any) -> Iterator[tuple[int, Any]]:
    """The nodes under `fault_tolerance`, each with the line of its key; the outermost first."""
    waiting, seen = [tree], set()
    while waiting:
        node = waiting.pop(0)
        if id(node) in seen:
            continue
        seen.add(id(node))
        if node.id == "sequence":
            waiting += node.value
        elif node.id == "mapping":
            for key, value in node.value:
                if key.value == _SECTION:
                    yield key.start_mark.line + 1, value
                waiting.append(value)


def _mapping(node: Any, path: str) -> Any:
    if node.id == "mapping":
        return node
    if node.id == "scalar" and node.tag.endswith(":null"):
        return None
    raise FileError(
        f"--ft-cfg-path {path}, line {node.start_mark.line + 1}: {_SECTION}: write keys and "
        "values below it"
    )


def _options(section: Any, path: str) -> Iterator[FileOption]:
    lines: dict[str, int] = {}
    for key, value in section.value:
        name, line = str(key.value), key.start_mark.line + 1
        origin = f"{path}, line {line}: {name}"
        if key.id != "scalar" or not _NAME.fullmatch(name):
            raise FileError(
                f"--ft-cfg-path {path}, line {line}: a key is a name, such as log_level"
            )
        if name in lines:
            raise FileError(
                f"--ft-cfg-path {origin} was given in line {lines[name]} already: remove one"
            )
        lines[name] = line
        yield FileOption(option_of(name), _text(value, origin), origin)


def _text(node: Any, origin: str) -> str:
    """A value as it would be typed; sections with limits as `name:seconds,…`."""
    if node.id == "scalar":
        return "null" if node.tag.endswith(":null") else str(node.value)
    if node.id == "mapping" and all(key.id == value.id == "scalar" for key, value in node.value):
        return ",".join(f"{key.value}:{_text(value, origin)}" for key, value in node.value)
    raise FileError(f"--ft-cfg-path {origin}: expected a number, a text, or names with numbers")
