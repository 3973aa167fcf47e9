"""Everstep in training frameworks: each module serves one framework, and only it imports that.

None of them is imported by the rest of the SDK, and none imports another framework.
"""
