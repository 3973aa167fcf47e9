"""Finds steps whose result cannot be right, and says what computed them."""
