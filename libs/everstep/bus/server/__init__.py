"""The nats-server program: its configuration, and a server that runs as our own child."""
