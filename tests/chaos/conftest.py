"""What tests at random share."""

import random

import pytest


@pytest.fixture
def dice() -> random.Random:
    seed = random.randrange(10**9)
    print(f"seed {seed}")
    return random.Random(seed)
