"""Options of other launchers that need more than another name here."""

import re
from collections.abc import Mapping

from everstep_services.cli.run.arguments import Given

_OMP = "OMP_NUM_THREADS"
_SIZES = {"segment": "segment", "replacement_group_size": "group_size"}
"""Keys of --rdzv-conf that are options here."""


def nodes_of(given: Given) -> tuple[int, int]:
    """The least and the largest number of nodes."""
    text = given.text("nnodes", "1").strip()
    match = re.fullmatch(r"([0-9]{1,7})(?::([0-9]{1,7}))?", text)
    if match is None:
        raise given.wrong("nnodes", "expected a number of nodes, or a range such as 4:8")
    least, most = int(match[1]), int(match[2] or match[1])
    if least < 1:
        raise given.wrong("nnodes", "a job has at least one node")
    if least > most:
        raise given.wrong("nnodes", f"the least number comes first, as in {most}:{least}")
    if most > least and any(
        origin.startswith("--ft-") or origin == "--as-nvrx" for origin in given.origins.values()
    ):
        given.notes.append(
            f"--nnodes {text} is elastic here, as with torchrun; ft_launcher's {least} nodes and "
            f"{most - least} hot spares are --nnodes {least} --spares {most - least}"
        )
    return least, most


def apply_rdzv_conf(given: Given) -> None:
    """Take from --rdzv-conf what has a meaning here, and note the rest."""
    text = given.text("rdzv_conf").strip()
    if not text:
        return
    idle: list[str] = []
    for part in text.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not key or not equals or not value:
            raise given.wrong("rdzv_conf", f"{part.strip()!r}: write KEY=VALUE, with commas")
        if key in {"join_timeout", "timeout"}:
            _join_within(given, key, value)
        elif key in _SIZES:
            if not value.isdecimal() or int(value) < 1:
                raise given.wrong("rdzv_conf", f"{key}={value} is not a number of slots")
            given.values.setdefault(_SIZES[key], int(value))
        else:
            idle.append(key)
    if idle:
        origin = given.origins["rdzv_conf"]
        given.notes.append(f"{', '.join(idle)} in {origin}: not used, agents meet on the bus")


def _join_within(given: Given, key: str, value: str) -> None:
    if not re.fullmatch(r"[0-9]+(\.[0-9]*)?", value) or not float(value):
        raise given.wrong("rdzv_conf", f"{key}={value} is not a number of seconds above 0")
    mine = f"{key} of {given.origins['rdzv_conf']}"
    before = given.origins.get("join_within_s", "")
    if not before or (key == "join_timeout" and before.startswith("timeout of")):
        given.values["join_within_s"], given.origins["join_within_s"] = float(value), mine


def notes_of(given: Given, environ: Mapping[str, str], ranks: int) -> tuple[str, ...]:
    """Every note, each once."""
    notes = list(given.notes)
    origin = given.origins.get("join_within_s", "")
    if " of " in origin:
        notes.append(f"{origin} is taken as --join-timeout {given.values['join_within_s']:g}")
    if _OMP not in environ and ranks > 1:
        notes.append(f"{_OMP} is 1 for each rank, as with torchrun; set it to have more")
    return tuple(dict.fromkeys(notes))


def streams(given: Given, name: str) -> tuple[int, dict[int, int]]:
    """What torchrun's `-r` and `-t` say: one answer for all, and those for single local ranks."""
    text = given.text(name, "0").strip()
    if re.fullmatch(r"[0-3]", text):
        return int(text), {}
    if re.fullmatch(r"[0-9]+:[0-3](,[0-9]+:[0-3])*", text):
        pairs = (pair.split(":") for pair in text.split(","))
        return 0, {int(rank): int(std) for rank, std in pairs}
    raise given.wrong(name, "write 0 none, 1 stdout, 2 stderr, 3 both, or RANK:N with commas")


def ranks(text: str) -> frozenset[int] | None:
    """The ranks that `0,2,4-6` names; None when it names none."""
    numbers: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,6})(?:-([0-9]{1,6}))?\s*", part)
        if match is None:
            return None
        first, last = int(match[1]), int(match[2] or match[1])
        numbers.update(range(first, last + 1))
    return frozenset(numbers)


def ranks_given(given: Given, name: str, also: str = "") -> frozenset[int]:
    """The ranks that an option names; an error when it names none."""
    numbers = ranks(given.text(name))
    if not numbers:
        raise given.wrong(name, f"expected {also}ranks with commas, such as 0,2,4-6")
    return numbers
