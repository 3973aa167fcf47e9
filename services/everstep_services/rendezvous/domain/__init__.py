"""The decisions of rendezvous, without a clock and without a bus."""
