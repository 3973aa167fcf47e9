"""States in parts: any as many as are needed give the same bytes back."""

import random
from itertools import combinations
from pathlib import Path

import pytest
import xxhash

from everstep_services.agent.replicas.erasure_code import Decode, Encode, decode, encode


@pytest.mark.parametrize("size", [1, 1000, (256 << 10) * 4, (256 << 10) * 5 + 3])
@pytest.mark.parametrize(("needed", "parts"), [(2, 3), (4, 5), (4, 6)])
def test_any_as_many_parts_as_are_needed_give_it_back(
    tmp_path: Path, needed: int, parts: int, size: int
) -> None:
    if parts > needed + 1:
        pytest.importorskip("pyeclib")
    octets = random.Random(size).randbytes(size)
    image, back = tmp_path / "image", tmp_path / "back"
    image.write_bytes(octets)
    paths = [tmp_path / str(number) for number in range(parts)]
    made = encode(
        Encode(
            needed=needed,
            parts=parts,
            image=str(image),
            size_bytes=size,
            paths=tuple(map(str, paths)),
        )
    )
    assert made.sizes_bytes == tuple(path.stat().st_size for path in paths)
    assert made.hashes == tuple(xxhash.xxh3_128_hexdigest(path.read_bytes()) for path in paths)
    for alive in combinations(range(parts), needed):
        back.write_bytes(bytes(size))
        read = decode(
            Decode(
                needed=needed,
                parts=parts,
                numbers=alive,
                paths=tuple(str(paths[number]) for number in alive),
                image=str(back),
                size_bytes=size,
            )
        )
        assert back.read_bytes() == octets
        assert read.hashes == (xxhash.xxh3_128_hexdigest(octets),)


def test_without_the_library_more_than_one_spare_part_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyeclib.ec_iface", None)
    asked = Encode(needed=4, parts=6, image=str(tmp_path), size_bytes=1, paths=())
    with pytest.raises(SystemExit, match=r"pip install everstep\[ec\]"):
        encode(asked)
