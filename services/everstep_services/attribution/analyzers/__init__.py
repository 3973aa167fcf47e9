"""Analyzers: each is an async function from an incident to claims. They know nothing of each other.

ends.py             how ranks and nodes ended
stalls.py           which ranks stopped, in which section, in which state
flight_recorder.py  which ranks never came to a collective
stacks.py           which ranks stand elsewhere while others wait
numerics.py         whose a result is that cannot be right
logs.py             what the logs say failed first
health.py           checks of the nodes
node_state.py       what GPUs, control groups and processes showed
stragglers.py       which ranks had been slow
history.py          the same failure, the same node before
runner.py           runs all of them at once, those of plug-ins too
nvrx.py             analyzers in the shape of NVRx's, as plug-ins
"""
