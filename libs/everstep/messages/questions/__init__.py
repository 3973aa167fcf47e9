"""Questions to services and their replies, a module for each service that answers."""
