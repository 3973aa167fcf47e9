"""The bill of materials names each package, and an audit that looked nothing up does not pass."""

from datetime import UTC, datetime
from importlib.metadata import distributions

import pytest

from tools.audit import dependencies, materials, verdict

FINE = {"name": "torch", "version": "2.13.0", "vulns": []}
FLAWED = {
    "name": "left",
    "version": "1.0",
    "vulns": [{"id": "PYSEC-2026-1", "fix_versions": ["1.1"]}],
}
UNKNOWN = {"name": "pad", "skip_reason": "Dependency not found on PyPI"}
OURS = {"name": "everstep", "skip_reason": "distribution marked as editable"}


def test_packages_that_were_looked_up_pass() -> None:
    assert verdict([FINE, OURS]) == []


def test_a_known_flaw_is_named_with_the_release_that_has_it_not() -> None:
    assert verdict([FINE, FLAWED]) == ["left 1.0: PYSEC-2026-1, fixed in 1.1"]


def test_packages_that_nobody_could_look_up_do_not_pass() -> None:
    (line,) = verdict([FINE, UNKNOWN, OURS])
    assert line.startswith("1 of 3 packages could not be looked up")
    assert line.endswith(": pad")


def test_an_audit_that_failed_says_why_in_one_line() -> None:
    assert dependencies(b'{"dependencies": []}', b"No known vulnerabilities found\n") == []
    with pytest.raises(SystemExit, match="packages up: it cannot be resolved$"):
        dependencies(b"", b"Traceback (most recent call last):\nit cannot be resolved\n")


def test_the_bill_names_each_installed_package_once() -> None:
    bill = materials(distributions(), datetime.now(UTC))
    purls = [component["purl"] for component in bill["components"]]
    assert len(set(purls)) == len(purls)
    assert any(purl.startswith("pkg:pypi/pytest@") for purl in purls)
    assert bill["metadata"]["component"]["name"] == "everstep"
