"""A fleet of simulated agents before the real health service: what it costs, whom it finds lost.

    python -m benchmarks.fleet
    python -m benchmarks.fleet --nodes 4000 --seconds 60

Simulated are the agents: a few processes make the beats of all, of 8 ranks each, before it begins,
send them once a second, and leave 5 % of them out. nats-server, health and its findings are real.
Some nodes fall silent; their training stands for 8 s, and goes on with another node in the slot.
Health is stopped for 0.3 s now and then. Detection counts from a node's death until the fact is on
the bus.

Then the same for ten minutes of virtual time, before health's pure domain alone: with beats that
are lost, and without.
"""

import argparse
import asyncio
import os
import statistics
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.fleets.jobs import RANKS, Crowd
from benchmarks.fleets.real import Seen, observed
from benchmarks.fleets.virtual import watched
from benchmarks.restarts.options import end_in_order
from benchmarks.rig import HEAD, row
from everstep_services.health.settings import HealthSettings

LATE_S = 0.5
"""Senders that are later than this did not send what they should: the machine is too small."""


def main() -> None:
    asked = _asked()
    end_in_order()
    settings = HealthSettings()
    crowd = Crowd(
        nodes=asked.nodes,
        job_nodes=100,
        step_s=0.5,
        losses=asked.losses,
        seconds=asked.seconds,
        lost_beats=0.05,
        seed=asked.seed,
    )
    if asked.seconds:
        _show_real(crowd, asyncio.run(observed(crowd, settings, asked.senders, pauses=True)))
    if asked.virtual_seconds:
        long = replace(crowd, seconds=asked.virtual_seconds, losses=asked.virtual_losses)
        for lost_beats in (0.05, 0.0):
            _show_virtual(replace(long, lost_beats=lost_beats), settings)


def _asked() -> argparse.Namespace:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--nodes", type=int, default=12_500, help="in jobs of 100 (12500)")
    made.add_argument("--seconds", type=float, default=60.0, help="for real; 0 for none (60)")
    made.add_argument("--losses", type=int, default=40, help="nodes that die meanwhile (40)")
    made.add_argument("--senders", type=int, default=2, help="processes that send beats (2)")
    made.add_argument("--virtual-seconds", type=float, default=600.0, help="0 for none (600)")
    made.add_argument("--virtual-losses", type=int, default=300, help="(300)")
    made.add_argument("--seed", type=int, default=7)
    return made.parse_args()


def _show_real(crowd: Crowd, seen: Seen) -> None:
    died = {node: at for sent in seen.sent for node, at in sent.died.items()}
    sent = sum(one.beats for one in seen.sent)
    late_s = max(one.late_s for one in seen.sent)
    print(
        f"{crowd.nodes} agents, {crowd.nodes * RANKS} ranks, {crowd.seconds:g} s, "
        f"seed {crowd.seed}, load {os.getloadavg()[0]:.1f}: {sent / crowd.seconds:,.0f} beats a "
        f"second sent, {seen.heard / crowd.seconds:,.0f} heard, {seen.dropped:.0f} dropped; "
        f"{sum(one.answers for one in seen.sent)} asked for; "
        f"{seen.pauses} pauses, {seen.blind_s:.1f} s blind"
    )
    if late_s > LATE_S:
        print(f"  the senders were late by up to {late_s:.1f} s: fewer nodes, or more cores")
    for name, usage in seen.usage.items():
        print(f"  {name}: {usage.processor_ratio:.0%} of a core, {usage.peak_mib:.0f} MiB")
    spent_s = seen.usage["health"].processor_ratio * crowd.seconds
    print(f"  health: {1e6 * spent_s / max(1.0, seen.heard):.1f} us of processor time a beat")
    false = [reason for node, (_, reason) in seen.lost.items() if node not in died]
    found = [seen.lost[node][0] - at for node, at in died.items() if node in seen.lost]
    _show_found(len(died), found, false)


def _show_virtual(crowd: Crowd, settings: HealthSettings) -> None:
    found = watched(crowd, settings)
    print(
        f"\nvirtual, {crowd.nodes} agents, {crowd.seconds:g} s, {crowd.lost_beats:.0%} of beats "
        f"lost: {found.beats:,} beats, {found.hails:,} asked for, "
        f"{found.probes:,} connections probed"
    )
    _show_found(found.deaths, found.detected_s, found.false)


def _show_found(deaths: int, detected_s: Sequence[float], false: Sequence[str]) -> None:
    print(f"  {deaths} nodes died, {len(detected_s)} were found; {len(false)} false findings")
    for reason in false[:3]:
        print(f"    {reason}")
    if len(detected_s) > 1:
        p99_s = statistics.quantiles(detected_s, n=100, method="inclusive")[98]
        print(HEAD)
        print(
            row("  until found", [1000 * one for one in detected_s], f"ms  p99 {1000 * p99_s:,.0f}")
        )


if __name__ == "__main__":
    main()
