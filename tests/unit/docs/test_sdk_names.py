"""The list of the SDK's names has what scripts import, as it is defined."""

import importlib
import inspect
from typing import Any

import pytest

from docs.generators.sdk import MODULES, names

WITHOUT_FRAMEWORK = [name for name in MODULES if "integrations" not in name]


@pytest.mark.parametrize("module", WITHOUT_FRAMEWORK)
def test_each_name_exists_with_these_arguments(module: str) -> None:
    listed = names()
    imported: Any = importlib.import_module(module)
    own = {name: value for name, value in listed.items() if name.rpartition(".")[0] == module}
    assert own
    for name, arguments in own.items():
        value = getattr(imported, name.rpartition(".")[2])
        if not inspect.isfunction(value):
            continue
        assert arguments is not None
        parameters = inspect.signature(value).parameters
        assert arguments.keys() == parameters.keys()
        required = {key for key, each in parameters.items() if each.default is each.empty}
        assert {key for key, words in arguments.items() if "required" in words} == required


def test_what_a_package_exports_lazily_and_what_a_class_inherits_is_listed() -> None:
    listed = names()
    assert listed["trainer_sdk.Session.should_stop"] is None
    assert listed["trainer_sdk.Session.step"] == {"number": ["optional", "by name", "position 0"]}
    step = listed["trainer_sdk.Checkpointer.step"]
    assert step is not None
    assert step["state"] == ["required", "by name", "position 1"]
