"""Orders without tables: a keyed permutation of 0 .. n-1 evaluated at any index.

A corpus may have more sequences than memory has room for a table of them, and every rank would hold its own
copy. A Feistel network over the next power of four, walked until it lands below n, is a bijection that costs
a few hundred nanoseconds an index and no memory. It depends on nothing but integer arithmetic, so an order
written down today is the order of any later NumPy.
"""

from __future__ import annotations

import numpy as np

_ROUNDS = 8
_MASK = (1 << 64) - 1


def mix(value: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser: uint64 -> uint64, every input bit moves every output bit."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def key(*parts: int) -> int:
    """One 64-bit key from any integers; `key(1, 2)` and `key(2, 1)` differ."""
    state = np.array([0x9E3779B97F4A7C15], dtype=np.uint64)
    for part in parts:
        low = part & _MASK
        state = mix(state ^ mix(np.array([low], dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15)))
        if part >> 64 not in (0, -1):
            state = mix(state ^ np.array([(part >> 64) & _MASK], dtype=np.uint64))
    return int(state[0])


def permute(index: np.ndarray, size: int, seed: int) -> np.ndarray:
    """Where the permutation of 0 .. size-1 named by `seed` sends each index: int64, the shape of `index`."""
    return _walk(index, size, seed, inverse=False)


def unpermute(value: np.ndarray, size: int, seed: int) -> np.ndarray:
    """The index that `permute` sends to each value: `permute(unpermute(v)) == v`."""
    return _walk(value, size, seed, inverse=True)


def _network(size: int, seed: int) -> tuple[np.uint64, np.ndarray]:
    """Bits of half a number, and the keys of the rounds."""
    half = np.uint64(max(1, (max(size - 1, 1).bit_length() + 1) // 2))
    keys = mix(
        np.uint64(seed & _MASK) + np.arange(1, _ROUNDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    )
    return half, keys


def _walk(index: np.ndarray, size: int, seed: int, inverse: bool) -> np.ndarray:
    """Run the network (or its inverse) over each index until the result lies below `size`."""
    index = np.asarray(index)
    if index.size and (index.min() < 0 or index.max() >= size):
        raise IndexError(f"index outside 0 .. {size - 1}")
    half, keys = _network(size, seed)
    mask = np.uint64((1 << int(half)) - 1)
    value = index.astype(np.uint64).reshape(-1)
    todo = np.arange(value.size)
    while todo.size:
        left, right = value[todo] >> half, value[todo] & mask
        for round_key in keys[::-1] if inverse else keys:
            if inverse:
                left, right = right ^ (mix(left ^ round_key) & mask), left
            else:
                left, right = right, left ^ (mix(right ^ round_key) & mask)
        value[todo] = (left << half) | right
        todo = todo[value[todo] >= np.uint64(size)]
    return value.astype(np.int64).reshape(index.shape)
