"""Which ranks have stalled: judged on this node alone, from pages and from the kernel."""
