"""Finds steps whose result cannot be right, and says what computed them."""

from trainer_sdk.numerics.policy import NumericsPolicy

__all__ = ["NumericsPolicy"]
