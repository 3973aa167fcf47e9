"""The REST API as the commands see it: where it is, and a client for it."""
