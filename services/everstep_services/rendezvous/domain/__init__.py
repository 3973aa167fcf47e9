"""What rendezvous decides, without a clock and without a bus."""
