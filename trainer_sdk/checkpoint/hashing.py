"""The hash of all that a checkpoint keeps: which algorithm it is, nothing else names."""

import xxhash

ALGORITHM = "xxh3-128"
Hasher = xxhash.xxh3_128
"""Takes bytes as they come: `update`, `copy`, `hexdigest`."""
hash_of = xxhash.xxh3_128_hexdigest
"""The hash of these bytes, in hex."""
