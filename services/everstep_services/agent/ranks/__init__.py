"""The processes of ranks: the warden, which is their parent, its client in the agent, the forge."""
