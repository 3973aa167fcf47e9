"""What an agent asks rendezvous, on its own behalf and on behalf of scripts."""
