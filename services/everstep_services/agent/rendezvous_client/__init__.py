"""The requests of an agent to rendezvous, for itself and on behalf of scripts."""
