"""The endpoints, a module for each resource."""
