"""`everstep inject`: what is wanted, where, when; and who is told."""
