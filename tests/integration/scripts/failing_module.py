"""Cannot be imported."""


def broken() -> None:
    raise ValueError("é" * 10_000)


broken()
