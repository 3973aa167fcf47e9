"""The hash of stored content: blobs on the bus, shards, manifests and images of checkpoints.

Nothing else names the algorithm. Digests of text, which make ids, are in `everstep.ids`; proofs and
passwords use SHA-256 where they are checked.
"""

import xxhash

ALGORITHM = "xxh3-128"
Hasher = xxhash.xxh3_128
"""Takes bytes as they come: `update`, `copy`, `hexdigest`."""
hash_of = xxhash.xxh3_128_hexdigest
"""The hash of bytes, in hex."""
