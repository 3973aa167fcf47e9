"""Commands about the services, the bus and the API."""
