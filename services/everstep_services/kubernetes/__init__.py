"""Nodes of Kubernetes: cordons and taints become exclusions and drains, and exclusions taints."""
