"""Which variant a tenant or a request gets: a keyed hash, so nothing is stored or asked for.

Weighted rendezvous hashing (Thaler and Ravishankar 1998; weights as in Schindelhauer and
Schomaker 2005): every variant draws a number in (0, 1] from the hash of key, unit and variant,
and the smallest -log(number) / weight wins. These are exponential clocks whose rates are the
weights, so a variant wins with the share of its weight; raising one weight moves units to that
variant alone, and no more of them than the shares ask for.
"""

import hashlib
import math
from collections.abc import Mapping


def uniform(key: bytes, *parts: str) -> float:
    """A number in (0, 1] that depends on the key and the parts alone."""
    digest = hashlib.blake2b(digest_size=8, key=hashlib.sha256(key).digest())
    for part in parts:
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(8, "big") + encoded)
    return ((int.from_bytes(digest.digest(), "big") >> 11) + 1) / 2**53


def assign(key: bytes, unit: str, weights: Mapping[str, float]) -> str:
    """The variant of a unit. Raises ValueError when no weight is positive or one is negative."""
    if any(not weight >= 0 or math.isinf(weight) for weight in weights.values()):
        raise ValueError("weights: must be finite and not negative")
    clocks = {
        name: -math.log(uniform(key, unit, name)) / weight
        for name, weight in weights.items()
        if weight > 0
    }
    if not clocks:
        raise ValueError("weights: one must be positive")
    return min(clocks, key=lambda name: (clocks[name], name))
