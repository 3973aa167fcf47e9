"""The replacement group of a node: by name, hardware, scheduler, domain or topology."""

import os
from pathlib import Path

import pytest

from everstep_services.cli.run.arguments import UsageError
from everstep_services.cli.run.replacement_group import replacement_group

ARRAY = {"SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": "3"}


def smi(folder: Path, *domains: str) -> dict[str, str]:
    """An `nvidia-smi` whose GPUs are in these NVLink domains."""
    program = folder / "nvidia-smi"
    lines = "".join(f"        ClusterUUID : {domain}\\n" for domain in domains)
    program.write_text(f"#!/bin/sh\nprintf '{lines}'\n")
    program.chmod(0o755)
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


@pytest.mark.parametrize(
    ("text", "domain", "topology", "group"),
    [
        ("rack-7", "power-1", ("spine", "leaf"), "rack-7"),
        ("", "power-1", ("spine", "leaf"), "power-1"),
        ("", "", ("spine", "leaf"), "spine/leaf"),
        ("@array", "power-1", (), "70_3"),
    ],
)
def test_the_group_is_the_most_explicit_one(
    text: str, domain: str, topology: tuple[str, ...], group: str
) -> None:
    assert replacement_group(text, domain, topology, ARRAY) == group


def test_an_nvlink_domain_is_what_all_gpus_report(tmp_path: Path) -> None:
    environ = smi(tmp_path, *["f2c1-77aa"] * 4)
    assert replacement_group("@nvlink", "", (), environ) == "nvlink-f2c1-77aa"


@pytest.mark.parametrize("domains", [(), ("a1", "b2"), ("00000000-0000",), ("N/A",)])
def test_gpus_without_one_nvlink_domain_are_refused(
    tmp_path: Path, domains: tuple[str, ...]
) -> None:
    with pytest.raises(UsageError, match="is not one NVLink domain; give the group's name"):
        replacement_group("@nvlink", "", (), smi(tmp_path, *domains))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no replacement group; give it --group"),
        ("@array", "SLURM_ARRAY_TASK_ID is not set"),
        ("@rack", "--group @rack: give a name, @nvlink or @array"),
    ],
)
def test_a_node_without_a_group_is_one_line(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said) as error:
        replacement_group(text, "", (), {})
    assert "\n" not in str(error.value)
