"""Checks of the network: ports of the node, and bandwidth between pairs of nodes."""
