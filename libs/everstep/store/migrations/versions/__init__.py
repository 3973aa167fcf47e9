"""One module a step, in the order of its `down_revision`."""
