"""Everstep under Kubernetes: manifests of trainings."""
