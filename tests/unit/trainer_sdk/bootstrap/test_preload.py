"""Which open devices make a fork unsafe: CUDA's do, and NVML's way to count devices does not."""

import pytest

from trainer_sdk.bootstrap import preload


@pytest.mark.parametrize(
    ("opened", "reason"),
    [
        (["/dev/null"], ""),
        (["/dev/nvidiactl"], ""),  # NVML, by `torch.cuda.is_available()`
        (["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia0"], "it has opened /dev/nvidia-uvm"),
        (["/dev/nvidiactl", "/dev/nvidia0"], "it has opened /dev/nvidia0"),
        (["/dev/kfd"], "it has opened /dev/kfd"),
    ],
)
def test_devices_that_a_module_opens_when_it_is_imported(
    monkeypatch: pytest.MonkeyPatch, opened: list[str], reason: str
) -> None:
    monkeypatch.setattr(preload, "_open_files", lambda: iter(opened))
    monkeypatch.setattr("os.listdir", lambda _: ["the only thread"])
    assert preload.why_unsafe() == reason
