"""A state whose tensors can be taken out and put back."""

import pytest
import torch

from trainer_sdk.nvrx.tensor_state import BasicTensorAwareStateDict, nested_values


def made() -> BasicTensorAwareStateDict:
    return BasicTensorAwareStateDict(
        {"a": torch.ones(2), "b": [torch.zeros(3), {"c": 7}], "d": {"e": torch.tensor(5)}}
    )


def test_tensors_come_out_and_go_back() -> None:
    state = made()
    tensors = state.pop_tensors()
    assert [tensor.tolist() for tensor in tensors] == [[1, 1], [0, 0, 0], 5]
    assert state.is_hollow
    assert not any(isinstance(each, torch.Tensor) for each in nested_values(state.state_dict))
    state.insert_tensors(tensors)
    assert list(state.tensors) == tensors
    assert state.to_state_dict()["b"][0] is tensors[1]
    state.pop_tensors()
    state.init_tensors()
    assert [(one.shape, one.dtype) for one in state.tensors] == [
        (one.shape, one.dtype) for one in tensors
    ]


def test_copies_are_not_changed_by_the_training() -> None:
    state = made()
    original = next(iter(state.tensors))
    state.copy_tensors_to_cpu()
    original.zero_()
    assert next(iter(state.tensors)).tolist() == [1, 1]
    state.restore_tensor_device()
    assert next(iter(state.tensors)).device.type == "cpu"


def test_misuse_is_an_error_with_its_remedy() -> None:
    state = made()
    with pytest.raises(RuntimeError, match="pop_tensors takes them out"):
        state.insert_tensors([])
    state.pop_tensors()
    with pytest.raises(RuntimeError, match="insert_tensors puts them back"):
        state.pop_tensors()
    with pytest.raises(ValueError, match="places for 3 tensors, and 1 came"):
        state.insert_tensors([torch.ones(1)])
