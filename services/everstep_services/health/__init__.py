"""Which nodes are lost: what only somebody who hears all of them can say."""
