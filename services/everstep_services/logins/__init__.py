"""Renews the logins of agents and services to the bus."""
