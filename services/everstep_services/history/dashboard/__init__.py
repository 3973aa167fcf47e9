"""The dashboard: pages for people, made of what REST answers."""
