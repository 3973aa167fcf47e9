"""Takes this number of MiB of memory, and uses them."""

import sys

taken = [bytearray(b"x" * (1 << 20)) for _ in range(int(sys.argv[1]))]
