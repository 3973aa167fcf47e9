"""Each part of the control plane, and each two, stay away for long: a training never notices.

Parts are to stay away for 10 minutes, NATS also for 2 hours; here each for a minute at most, or for
as many seconds as the environment's `EVERSTEP_TEST_AWAY_S` allows: 7200 tests the whole, in hours.
"""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import combinations
from pathlib import Path

import pytest

from tests.chaos.outages import DATABASE, PARTS, Site
from tests.e2e.postgres import Postgres

pytestmark = pytest.mark.chaos
MINUTE_S = 60.0
AWAY_S = 10 * MINUTE_S
BESIDES_S = 15 * MINUTE_S
SEEN_BEFORE, SEEN_AFTER = 40, 120
NAMES = [(name,) for name in PARTS] + list(combinations(PARTS, 2))
NewSite = Callable[[tuple[str, ...]], Site]


def away(for_s: float) -> float:
    return min(for_s, float(os.environ.get("EVERSTEP_TEST_AWAY_S", MINUTE_S)))


@pytest.fixture
def new_site(tmp_path: Path, job: str) -> Iterator[NewSite]:
    """Makes the site of a test; its record is in PostgreSQL if the database will be taken away."""
    with ExitStack() as stack:

        def make(names: tuple[str, ...]) -> Site:
            postgres = None
            if DATABASE in names:
                # Not below pytest's own folder: as root, the server runs as another user.
                postgres = Postgres(Path(tempfile.mkdtemp(prefix="everstep-pg-")))
                stack.callback(postgres.stop)
            site = Site(tmp_path, job, postgres)
            stack.callback(site.close)
            return site

        yield make


def is_away(site: Site, names: tuple[str, ...], for_s: float) -> None:
    """Away once, and back; then all works again, as before."""
    site.further(SEEN_BEFORE)
    consumers = site.consumers()
    site.take_away(*names)
    site.trains_for(for_s)
    site.bring_back(*names)
    site.until_all_are_back()
    comes_to_its_end(site, consumers)


def comes_to_its_end(site: Site, consumers: int) -> None:
    """All works as before, and nothing is missing."""
    site.has_a_save_asked_for()
    site.further(SEEN_AFTER)
    site.until_consumers(consumers)
    site.finish()
    site.has_lost_nothing()


@pytest.mark.timeout(away(AWAY_S) + BESIDES_S)
@pytest.mark.parametrize("names", NAMES, ids="+".join)
def test_nothing_is_lost_while_parts_are_away(new_site: NewSite, names: tuple[str, ...]) -> None:
    """One round, every step once, and no fact lost or doubled (A15.1)."""
    site = new_site(names)
    site.start(pace_s=0.25, fact_every_s=0.2)
    is_away(site, names, away(AWAY_S))


@pytest.mark.parametrize(
    ("minutes", "pace_s", "fact_every_s"),
    [
        pytest.param(5, 0.1, 0.01, marks=pytest.mark.timeout(away(5 * MINUTE_S) + BESIDES_S)),
        pytest.param(120, 0.5, 0.2, marks=pytest.mark.timeout(away(120 * MINUTE_S) + BESIDES_S)),
    ],
)
def test_nothing_is_lost_while_the_bus_is_away(
    new_site: NewSite, minutes: int, pace_s: float, fact_every_s: float
) -> None:
    """One round, no stall found, and no fact lost or doubled (A3.7, A14.1)."""
    site = new_site(("nats",))
    site.start(pace_s=pace_s, fact_every_s=fact_every_s)
    is_away(site, ("nats",), away(minutes * MINUTE_S))


@pytest.mark.timeout(30 * MINUTE_S)
def test_nothing_is_lost_while_the_bus_is_away_fifty_times(new_site: NewSite) -> None:
    """And there are as many consumers as before (A14.1)."""
    site = new_site(("nats",))
    site.start(pace_s=0.1, fact_every_s=0.01)
    consumers = site.consumers()
    for _ in range(50):
        site.take_away("nats")
        site.trains_for(1.0)
        site.bring_back("nats")
        site.until_all_are_back()
    comes_to_its_end(site, consumers)
