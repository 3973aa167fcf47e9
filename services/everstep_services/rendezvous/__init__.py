"""Decides who trains with whom: forms rounds, ends them, and sends every order."""
