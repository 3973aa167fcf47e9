"""Saves: planned with all ranks, copied into a buffer, and handed to the writer."""
