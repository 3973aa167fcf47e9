"""A setting that is documented acts: the process that it is for reads it."""

import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import pytest

import everstep
import everstep_services
from everstep import messages
from everstep.bus import BusSettings
from everstep.settings import Settings, leaves
from everstep_services.cli.settings_sections import SECTIONS, section_class
from everstep_services.cli.stack.supervisor import TUNING

LIBS, SERVICES = (Path(package.__path__[0]) for package in (everstep, everstep_services))
RUN = (SERVICES / "cli/run", SERVICES / "cli/attached")
READERS: Mapping[str, tuple[Path, ...]] = {
    "bus": (LIBS / "bus", SERVICES / "cli/commands/cluster"),
    "agent": (SERVICES / "agent", *RUN),
    "checks": (SERVICES / "agent", SERVICES / "cli"),
    "log": (LIBS / "observe",),
    "observe": (LIBS,),
    "history": (SERVICES / "history",),
    "health": (SERVICES / "health",),
    "logins": (SERVICES / "logins", SERVICES / "cli/stack"),
    "rendezvous": (SERVICES / "rendezvous",),
    "catalog": (SERVICES / "catalog",),
    "kubernetes": (SERVICES / "kubernetes",),
    "straggler": (SERVICES / "straggler",),
    "attribution": (SERVICES / "attribution",),
    "api": (SERVICES / "history", LIBS / "observe"),
    "notify": (SERVICES / "history/notifications",),
    "client": (SERVICES / "cli",),
}
"""Where the process that a section is documented for reads it."""
NAMED_BY_UP = {
    "url", "user", "password_file", "credentials_file", "renewed_credentials_file",
    "nkey_seed_file", "inbox_prefix", "ca_file", "cert_file", "key_file", "spool_dir", "replicas",
}  # fmt: skip
"""`everstep up` runs the bus itself: it knows these, and its guide says so."""


def read_names(section: str, owner: type[Settings]) -> set[str]:
    """All attributes that the readers of a section look at, but for the checks of the class."""
    own = Path(inspect.getfile(owner))
    names: set[str] = set()
    for file in files(READERS[section]):
        text = file.read_text()
        if file == own:
            text = re.sub(r"(?s)def __post_init__.*?(?=\n    def |\nclass |\Z)", "", text)
        names |= set(re.findall(r"\.([a-z_0-9]+)\b", text))
        for message in re.findall(r"\bshared\(([A-Z]\w+), (?:agent|settings)\)", text):
            names |= set(getattr(messages, message).__struct_fields__)
    return names


def files(folders: tuple[Path, ...]) -> Iterator[Path]:
    for folder in folders:
        yield from folder.rglob("*.py")


@pytest.mark.parametrize("section", SECTIONS)
def test_no_setting_is_read_by_nobody(section: str) -> None:
    """What is shown acts."""
    unread = [
        leaf.key
        for leaf in leaves(section_class(section), section)
        if leaf.path[-1] not in read_names(section, leaf.owner)
    ]
    assert unread == []


def test_everstep_up_applies_each_setting_of_the_bus_or_names_its_own() -> None:
    names = {field.name for field in msgspec.structs.fields(BusSettings)}
    assert set(TUNING) | NAMED_BY_UP == names
    assert not set(TUNING) & NAMED_BY_UP
