"""Saves: planned with all ranks, copied into a buffer, and passed to the writer.

`../README.md` has a picture of the life of a save.
"""
