"""Analyzers read no file while they run: as in the service, their rules were read before."""

import pytest

from everstep_services.attribution.replica import read_rules


@pytest.fixture(autouse=True)
def rules() -> None:
    read_rules()
