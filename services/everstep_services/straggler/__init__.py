"""Which ranks are slow, why, and what they cost. So far for traces; the service comes later."""
