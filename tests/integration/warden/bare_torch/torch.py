"""What the forge asks of torch, for tests about anything else: the real one takes seconds."""


class cuda:  # noqa: N801
    is_initialized = bool


class default_generator:  # noqa: N801
    seed = int
