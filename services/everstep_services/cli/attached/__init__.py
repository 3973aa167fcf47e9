"""The agent of attach mode as a process, which a rank of another launcher starts."""
