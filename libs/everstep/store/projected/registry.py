"""Every projected table, and the version of all of them.

Times are microseconds since 1970 in UTC (`_us`): one number that sorts, and is the same in
every database. `…_fact` is the id of the fact that a group of columns comes from: it is the
evidence, and it decides between two facts that both claim to be the latest. `…_n` is a place in
the log, where the fact recorded last wins.
"""

from everstep.store.projected.incidents import ACTIONS, CORRECTIONS, EVIDENCE, INCIDENTS, VERDICTS
from everstep.store.projected.jobs import ALLOCATIONS, EXITS, JOBS, MEMBERS, ROUNDS
from everstep.store.projected.nodes import LIMITS, LOCATED, NODE_CHECKS, NODES, STALLS, WATCHES
from everstep.store.projected.numerics import COMPARED_RESULTS, NUMERICS_ACTS, NUMERICS_CASES
from everstep.store.projected.saves import DELAYS, RESTORES, SAVES
from everstep.store.projected.stragglers import STEP_SHIFTS, STRAGGLERS

VERSION = 25
"""Raise it with every change of a table or of how a projection reads a fact. The tables are
then rebuilt from the log when the first process of the newer release starts."""

PROJECTED = (
    JOBS,
    ALLOCATIONS,
    ROUNDS,
    MEMBERS,
    EXITS,
    STALLS,
    NODES,
    INCIDENTS,
    ACTIONS,
    EVIDENCE,
    NODE_CHECKS,
    WATCHES,
    LIMITS,
    LOCATED,
    SAVES,
    DELAYS,
    RESTORES,
    STRAGGLERS,
    STEP_SHIFTS,
    VERDICTS,
    CORRECTIONS,
    NUMERICS_CASES,
    NUMERICS_ACTS,
    COMPARED_RESULTS,
)
