"""Checks of shared file systems."""
