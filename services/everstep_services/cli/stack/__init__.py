"""Everything in one process, on this machine: what `everstep up` runs."""
