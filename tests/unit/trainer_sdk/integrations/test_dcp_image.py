"""What an image lacks of a tensor is described exactly, so that no load takes it as there."""

import itertools

import pytest

from trainer_sdk.integrations.dcp import DcpReader, DcpWriter
from trainer_sdk.integrations.dcp.image import Box, rest_of

SHAPE = (5, 4, 3)
PARTS: list[tuple[Box, ...]] = [
    (),
    (((0, 0, 0), SHAPE),),
    (((1, 1, 1), (2, 2, 1)),),
    (((0, 0, 0), (2, 4, 3)), ((4, 1, 0), (1, 2, 3))),
    (((5, 0, 0), (0, 4, 3)),),
]


def points(box: Box) -> set[tuple[int, ...]]:
    ranges = [range(begin, begin + size) for begin, size in zip(*box, strict=True)]
    return set(itertools.product(*ranges))


@pytest.mark.parametrize("parts", PARTS)
def test_parts_and_rest_have_each_element_once(parts: tuple[Box, ...]) -> None:
    boxes = [*parts, *rest_of(SHAPE, parts)]
    whole = [point for box in boxes for point in points(box)]
    assert sorted(whole) == sorted(points(((0, 0, 0), SHAPE)))


def test_a_scalar_and_an_empty_tensor_have_no_rest() -> None:
    assert rest_of((), [((), ())]) == []
    assert rest_of((0, 3), []) == []
    assert rest_of((), []) == [((), ())]


def test_a_save_in_memory_only_needs_memory() -> None:
    with pytest.raises(ValueError, match="give keep_memory=True as well"):
        DcpWriter(to_root=False)


def test_a_value_that_is_no_truth_is_refused_by_its_name() -> None:
    with pytest.raises(TypeError, match="keep_memory"):
        DcpReader(keep_memory="yes")  # type: ignore[arg-type]
