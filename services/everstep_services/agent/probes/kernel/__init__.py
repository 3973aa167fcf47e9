"""Checks of the kernel's log: Xids, hardware errors, processes killed for memory."""
