"""Goodput: what each second of an allocation was spent on."""
