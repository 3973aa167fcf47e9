"""The fake NVML is held to the real module, and the real module is called as C expects it."""

import ctypes
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml
import pytest

from everstep_services.agent.probes.gpu import nvml, probe
from everstep_services.agent.probes.gpu.nvml import Nvml
from everstep_services.agent.probes.gpu.snapshot import Fabric, read
from everstep_services.agent.probes.gpu.verdicts import RECOVERY
from tests.fakes.nvml import FakeNvml

_Pointer: Any = ctypes.c_void_p
_Number: Any = ctypes.c_int32
_Unsigned: Any = ctypes.c_uint

_SOURCES = sorted(Path(probe.__file__).parent.glob("*.py"))
_NAMES = sorted(
    {
        name
        for source in _SOURCES
        for name in re.findall(r'"((?:nvml|NVML_|c_nvml)\w+)"', source.read_text())
    }
)


def test_the_checks_use_names_at_all() -> None:
    assert len(_NAMES) > 40


@pytest.mark.parametrize("name", [name for name in _NAMES if not name.endswith("_")])
def test_each_name_that_a_check_uses_is_in_the_real_module(name: str) -> None:
    assert hasattr(pynvml, name)


@pytest.mark.parametrize("name", [name for name in vars(FakeNvml) if name.startswith("nvml")])
def test_a_function_of_the_fake_takes_what_the_real_one_takes(name: str) -> None:
    mine = list(inspect.signature(getattr(FakeNvml(), name)).parameters)
    assert mine == list(inspect.signature(getattr(pynvml, name)).parameters)


def test_the_fake_answers_each_function_that_a_check_calls() -> None:
    called = {name for name in _NAMES if callable(getattr(pynvml, name, None))}
    functions = {name for name in called if not isinstance(getattr(pynvml, name), type)}
    assert functions <= set(vars(FakeNvml))


@pytest.mark.parametrize("part", ["ROUTE_UNHEALTHY", "DEGRADED_BW", "INCORRECT_CONFIGURATION"])
def test_the_parts_of_the_health_mask_have_the_names_that_are_put_together(part: str) -> None:
    for kind in ("SHIFT", "WIDTH"):
        assert hasattr(pynvml, f"NVML_GPU_FABRIC_HEALTH_MASK_{kind}_{part}")


def test_each_recovery_action_has_its_number() -> None:
    prefix = "NVML_GPU_RECOVERY_ACTION_"
    known = {
        value: name.removeprefix(prefix)
        for name, value in vars(pynvml).items()
        if name.startswith(prefix) and value != pynvml.NVML_GPU_RECOVERY_ACTION_NONE
    }
    assert {number: row[2] for number, row in RECOVERY.items()} == known


def test_a_value_is_read_from_the_member_of_its_type() -> None:
    names = [
        "DOUBLE",
        "UNSIGNED_INT",
        "UNSIGNED_LONG",
        "UNSIGNED_LONG_LONG",
        "SIGNED_LONG_LONG",
        "SIGNED_INT",
        "UNSIGNED_SHORT",
    ]
    assert [getattr(pynvml, f"NVML_VALUE_TYPE_{name}") for name in names] == list(range(7))
    members = [name for name, _ in type(pynvml.c_nvmlFieldValue_t().value)._fields_]
    assert set(nvml._UNION_FIELD) <= set(members)


class _Library:
    """What the loader gives `pynvml`: a library in C, with some of its functions."""

    def __init__(self, *functions: Callable[..., int]) -> None:
        for function in functions:
            taken = [each.annotation for each in inspect.signature(function).parameters.values()]
            setattr(self, function.__name__, ctypes.CFUNCTYPE(ctypes.c_int, *taken)(function))


def nvmlDeviceGetGpuFabricInfoV(_gpu: _Pointer, into: _Pointer) -> int:
    info = pynvml.c_nvmlGpuFabricInfoV_t.from_address(into)
    assert info.version == pynvml.nvmlGpuFabricInfo_v2
    info.state = pynvml.NVML_GPU_FABRIC_STATE_COMPLETED
    info.status = pynvml.NVML_SUCCESS
    unhealthy = pynvml.NVML_GPU_FABRIC_HEALTH_MASK_ROUTE_UNHEALTHY_TRUE
    info.healthMask = unhealthy << pynvml.NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_ROUTE_UNHEALTHY
    return int(pynvml.NVML_SUCCESS)


def nvmlDeviceGetSramEccErrorStatus(_gpu: _Pointer, into: _Pointer) -> int:
    pynvml.c_nvmlEccSramErrorStatus_v1_t.from_address(into).bThresholdExceeded = 1
    return int(pynvml.NVML_SUCCESS)


def nvmlDeviceGetFieldValues(_gpu: _Pointer, _count: _Number, into: _Pointer) -> int:
    value = pynvml.c_nvmlFieldValue_t.from_address(into)
    assert value.fieldId == pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION
    value.nvmlReturn = pynvml.NVML_SUCCESS
    value.valueType = pynvml.NVML_VALUE_TYPE_UNSIGNED_INT
    value.value.uiVal = pynvml.NVML_GPU_RECOVERY_ACTION_NODE_REBOOT
    return int(pynvml.NVML_SUCCESS)


def nvmlDeviceGetHandleByIndex_v2(_index: _Unsigned, into: _Pointer) -> int:
    ctypes.c_void_p.from_address(into).value = 1
    return int(pynvml.NVML_SUCCESS)


def test_the_real_module_hands_on_what_a_driver_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    library = _Library(
        nvmlDeviceGetHandleByIndex_v2,
        nvmlDeviceGetGpuFabricInfoV,
        nvmlDeviceGetSramEccErrorStatus,
        nvmlDeviceGetFieldValues,
    )
    monkeypatch.setattr(pynvml, "nvmlLib", library)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    known = read(Nvml(pynvml), 0)
    assert known.fabric == Fabric(is_joined=True, is_route_bad=True)
    assert known.is_sram_worn is True
    assert known.recovery_action == pynvml.NVML_GPU_RECOVERY_ACTION_NODE_REBOOT
    # Nothing else is in that library: it is as unknown as with a driver that is too old.
    assert (known.temperature_c, known.is_mig, known.holders) == (None, None, ())
    assert known.unreadable == ()
