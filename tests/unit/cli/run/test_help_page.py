"""What options say of themselves is true: defaults, sections of settings, waits."""

import re

import msgspec
import pytest

from everstep.settings.layers import KNOWN_SECTIONS
from everstep_services.agent.probes.settings import ChecksSettings
from everstep_services.agent.runtime import rank_runner
from everstep_services.agent.settings import AgentSettings
from everstep_services.cli.run.help_page import page
from everstep_services.cli.run.options import NVRX, OWN, TORCHRUN, RunOption

DEFAULTS = msgspec.structs.asdict(AgentSettings())
NUMBERS = [
    option
    for option in (*TORCHRUN, *OWN)
    if option.metavar and isinstance(DEFAULTS.get(option.to), int | float)
]


@pytest.mark.parametrize("option", NUMBERS, ids=lambda option: option.long)
def test_the_default_that_an_option_names_is_that_of_the_settings(option: RunOption) -> None:
    assert f"({DEFAULTS[option.to]:g}" in option.help


def test_there_are_such_options() -> None:
    assert {option.long for option in NUMBERS} >= {
        "--max-restarts", "--no-progress-limit", "--stop-grace", "--preempt-grace",
    }  # fmt: skip


def test_notes_name_sections_and_keys_that_there_are() -> None:
    notes = {option.long: option.note or option.instead for option in NVRX}
    for name, note in notes.items():
        assert set(re.findall(r"\[(\w+)\]", note)) <= set(KNOWN_SECTIONS), name
    where = notes["--ft-storage-health-check-path"]
    assert where.rpartition(" ")[2] in ChecksSettings.__struct_fields__
    assert f"{rank_runner._DEVICES_WITHIN_S:g} s" in notes["--ft-gpu-memory-reclaim-timeout"]


def test_every_exit_code_has_a_line() -> None:
    """The exit codes for a scheduler, each with its meaning (A12.3)."""
    lines = page(100).partition("Exit codes:\n")[2].splitlines()
    codes = [line.split()[0] for line in lines if line.startswith("  ")]
    assert codes == ["0", "1", "2", "90", "91", "92", "93", "94", "128+N"]
