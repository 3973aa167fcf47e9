"""Checkpoints on this node: facts about those of its ranks, and states held in memory.

The life of a state in memory:

    a rank writes it below `own/` ──▶ `images`: it is whole ──▶ `transmitter` sends it to holders
                                                                        │
    `fetcher` asks other nodes ◀── a round begins without it       `server` ──▶ `store` on a holder
            │
            └──▶ `store` ──▶ an offer, which the ranks read before they restore

`NodeStates` is opened before the ranks; `NodeCheckpoints` is the only part that the agent calls.
`ReplicaManager` runs the loops, `recorder` makes the facts, `protocol` has the messages.
"""
