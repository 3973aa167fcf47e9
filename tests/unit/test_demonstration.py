"""`everstep demo`, as far as it gets without a training."""

import sys

import pytest

from everstep_services.cli.__main__ import main
from everstep_services.cli.errors import Exit


def test_without_torch_it_says_so_and_starts_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["demo"]) == Exit.ERROR
    said, error = capsys.readouterr()
    assert (
        error == f"everstep: {sys.executable} has no torch, which the demo trains with: make demo\n"
    )
    assert said == ""
