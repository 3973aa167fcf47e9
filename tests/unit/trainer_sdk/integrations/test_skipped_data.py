"""Numbers of batches where some are passed over, and a loader without them."""

import pytest
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from trainer_sdk.integrations.skipped_data import (
    ShortenedSampler,
    merged,
    number_after,
    shorten,
    skipped,
    used_before,
)

SPANS = ((3, 5), (8, 12), (12, 13), (9, 10))
EACH = [number for number in range(30) if not skipped(number, number + 1, merged(SPANS))]


def test_spans_that_touch_or_overlap_are_merged() -> None:
    assert merged(SPANS) == ((3, 5), (8, 13))


@pytest.mark.parametrize("used", range(len(EACH)))
def test_the_number_after_those_that_were_used(used: int) -> None:
    assert number_after(used, merged(SPANS)) == EACH[used]
    assert used_before(EACH[used], merged(SPANS)) == used


@pytest.mark.parametrize(
    ("epoch", "used", "expected"),
    [(0, 0, [0, 1, 2, 5]), (0, 3, [5]), (1, 0, [6, 7]), (1, 1, [7]), (2, 0, [13, 14, 15, 16, 17])],
)
def test_a_pass_has_neither_skipped_batches_nor_those_already_used(
    epoch: int, used: int, expected: list[int]
) -> None:
    """Epochs of six batches; the third has its first one skipped."""
    loader: DataLoader[int] = DataLoader(list(range(12)), batch_size=2)  # type: ignore[arg-type]
    first = 6 * epoch
    is_shortened = shorten(
        loader, lambda batches: ShortenedSampler(batches, merged(SPANS), lambda: (first, used))
    )
    assert is_shortened
    assert [first + int(batch[0]) // 2 for batch in loader] == expected


def test_the_batches_of_one_step_share_a_number() -> None:
    batches = BatchSampler(SequentialSampler(range(14)), 2, drop_last=False)
    shortened = ShortenedSampler(batches, ((1, 2),), lambda: (0, 0), per_number=3)
    assert [batch[0] for batch in shortened] == [0, 2, 4, 12]
    assert shortened.batch_size == 2
