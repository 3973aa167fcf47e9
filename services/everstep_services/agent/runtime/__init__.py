"""What an agent runs: its process, its loops, its ranks and its folders.

The way of an order to a rank, and of the events back:

    rendezvous ─ order ─▶ service ─▶ core.Agent ─ action ─▶ RankRunner ─▶ WardenClient ─▶ warden
                                         ▲                                                   │
    rendezvous ◀─ report ─ service ◀─────┤                                                 ranks
                                         │                                                   │
                                     RankEvents ◀── one queue of events ◀── RoundWatch ◀─────┘

`main` opens what lives as long as the process: the warden, the folder, the bus. `AgentService` is
the only place where the parts of an agent are put together. The service puts actions about ranks
into the queue of the runner; `RankEvents` has them carried out, one round after the other. The
warden client puts everything that it hears into one queue of events. `RankEvents` reads that queue,
tells the agent's core, and tells the parts that only record and watch.
"""
