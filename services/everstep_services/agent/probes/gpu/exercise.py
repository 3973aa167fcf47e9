"""A program that computes and remembers on each GPU, and reports whether the results are right.

    python -m everstep_services.agent.probes.gpu.exercise SECONDS [DEVICE …]

It prints one line of JSON when it has begun, and one for each device. It is the only module here
that imports torch.
"""

import json
import sys
import time
from functools import cache
from typing import Any

_STARTED = time.monotonic()
_MATRIX = {"cuda": 8192, "cpu": 256}
_MOST_BYTES = {"cuda": 8 << 30, "cpu": 8 << 20}
_PART_OF_FREE = 0.5
_PATTERNS = (0x00, 0xFF, 0x55, 0xAA)
_VECTORS = 16
"""Each vector finds a wrong element of a product with probability 1/2 or more."""
NOTHING_TO_DO = 3


def main(arguments: list[str]) -> int:
    """Exit with code 3 if there is nothing to exercise."""
    try:
        import torch
    except ImportError as error:
        _say(missing=f"torch cannot be imported: {error}")
        return NOTHING_TO_DO
    devices = arguments[1:] or [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    if not devices:
        _say(missing="torch sees no CUDA device")
        return NOTHING_TO_DO
    _say(began=devices)
    for device in devices:
        _say(at=device, after_s=time.monotonic() - _STARTED)
        figures = _exercised(torch, device, float(arguments[0]) / len(devices))
        _say(**figures)
        if "error" in figures:
            break  # after an error of CUDA, no result of this process can be trusted
    return 0


def _say(**line: Any) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def _exercised(torch: Any, name: str, seconds: float) -> dict[str, Any]:
    device = torch.device(name)
    figures: dict[str, Any] = {"device": name, "name": _named(torch, device), "wrong": ""}
    try:
        figures |= _memory(torch, device, seconds / 2)
        figures |= _matrices(torch, device, seconds / 2)
    except torch.cuda.OutOfMemoryError as error:
        figures["full"] = str(error).splitlines()[0]
    except RuntimeError as error:  # all that CUDA reports: illegal access, ECC, launch failure
        figures["error"] = str(error).splitlines()[0]
    return figures


def _named(torch: Any, device: Any) -> str:
    return str(torch.cuda.get_device_name(device)) if device.type == "cuda" else device.type


def _memory(torch: Any, device: Any, seconds: float) -> dict[str, Any]:
    """Write patterns to a part of the free memory, copy them, and read them back."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 1 << 40
    half = min(int(free * _PART_OF_FREE), _MOST_BYTES[device.type]) // 2
    source = torch.empty(half, dtype=torch.uint8, device=device)
    other = torch.empty_like(source)
    until, moved, took_s, wrong = time.monotonic() + seconds, 0, 0.0, ""
    for pattern in _PATTERNS:
        source.fill_(pattern)
        took_s += _timed(torch, device, lambda: other.copy_(source))
        moved += 2 * half
        if errors := int((other != pattern).sum()) + int((source != pattern).sum()):
            wrong = f"{errors} of {2 * half} bytes of memory were not {pattern:#04x} when read"
        if wrong or time.monotonic() > until:
            break
    return {"tested_mib": 2 * half >> 20, "gib_s": moved / took_s / 2**30, "wrong": wrong}


def _matrices(torch: Any, device: Any, seconds: float) -> dict[str, Any]:
    """Multiply matrices of small integers, whose every exact product is known.

    The first product is checked on the host with random vectors (Freivalds), all others against
    the first, bit for bit.
    """
    size = _MATRIX[device.type]
    left, right, vectors, expected = _problem(torch, size)
    a, b = (matrix.to(device, torch.bfloat16) for matrix in (left, right))
    first = a @ b
    if not torch.equal(first.cpu().double() @ vectors, expected):
        return {"wrong": f"a product of two {size} × {size} matrices was wrong"}
    until, rounds, took_s = time.monotonic() + seconds, 0, 0.0
    product = torch.empty_like(first)
    while not rounds or time.monotonic() < until:
        took_s += _timed(torch, device, lambda: torch.mm(a, b, out=product))
        rounds += 1
        if not torch.equal(product, first):
            return {"wrong": f"the same product had another result in round {rounds}"}
    return {"rounds": rounds, "tflops": 2 * size**3 * rounds / took_s / 1e12}


@cache
def _problem(torch: Any, size: int) -> tuple[Any, Any, Any, Any]:
    """Two matrices, vectors, and the product of all of them.

    Five elements in six are 0, so that the sums stay below 256, where bfloat16 is exact.
    """
    generator = torch.Generator().manual_seed(0)
    left, right = (
        torch.randint(-1, 2, (size, size), generator=generator, dtype=torch.int8)
        * (torch.rand(size, size, generator=generator) < 0.25)
        for _ in range(2)
    )
    vectors = torch.randint(0, 2, (size, _VECTORS), generator=generator).double()
    return left, right, vectors, left.double() @ (right.double() @ vectors)


def _timed(torch: Any, device: Any, work: Any) -> float:
    """The seconds until the work is done."""
    wait = torch.cuda.synchronize if device.type == "cuda" else _nothing
    wait(device)
    began = time.monotonic()
    work()
    wait(device)
    return max(time.monotonic() - began, 1e-9)


def _nothing(_: Any) -> None:
    """Whether the processor has done the work when the call returns."""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
