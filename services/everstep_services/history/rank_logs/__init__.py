"""The output of ranks, from the log store: lines, searches, and NVRx's file of a cycle."""
