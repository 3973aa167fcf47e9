"""What a replica reads from its package, it reads at its start: an upgrade changes the files."""

from everstep.bus import BusSettings
from everstep_services.agent.probes.kernel import xid
from everstep_services.attribution.domain import weights
from everstep_services.attribution.log_analysis import rules as log_rules
from everstep_services.attribution.replica import opened
from everstep_services.attribution.settings import AttributionSettings
from everstep_services.attribution.stack_analysis import rules as stack_rules


def test_all_rules_are_read_at_the_start() -> None:
    tables = (log_rules.shipped, stack_rules.shipped, weights.shipped, xid.table)
    for table in tables:
        table.cache_clear()
    opened(AttributionSettings(), BusSettings())
    assert [table.cache_info().currsize for table in tables] == [1, 1, 1, 1]
