"""Commands about one job or all: run it, look at it, change it."""
