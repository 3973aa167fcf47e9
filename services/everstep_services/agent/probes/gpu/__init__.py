"""Checks of GPUs: what NVML reports, NVLink, and a self-test."""
