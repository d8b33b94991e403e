"""The keyed permutation: a bijection, spread evenly, the same for ever."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wm_ds.data import shuffle


@settings(deadline=None)
@given(size=st.integers(1, 3000), seed=st.integers(0, 2**64 - 1))
def test_every_index_exactly_once(size, seed):
    assert sorted(shuffle.permute(np.arange(size), size, seed).tolist()) == list(range(size))


def test_pinned():
    """Runs resume on another machine, years later, with these orders."""
    assert shuffle.permute(np.arange(10), 10, 1).tolist() == PINNED_10
    large = shuffle.permute(np.array([0, 1, 2**40, 2**41 - 1]), 2**41, 7)
    assert large.tolist() == PINNED_LARGE
    assert shuffle.key(1, 2, 3) == PINNED_KEY


PINNED_10 = [2, 6, 4, 8, 5, 7, 0, 9, 3, 1]
PINNED_LARGE = [1901402802568, 1500642218989, 1386995821371, 1555264037819]
PINNED_KEY = 15378950933529109311


def test_parts_agree_with_the_whole():
    whole = shuffle.permute(np.arange(1000), 1000, 5)
    assert shuffle.permute(np.array([[999, 3], [4, 0]]), 1000, 5).tolist() == [
        [whole[999], whole[3]],
        [whole[4], whole[0]],
    ]


def test_more_samples_than_32_bits_count():
    size = 3 * 2**33 + 17
    index = np.concatenate([np.arange(50_000), size - 1 - np.arange(50_000), 2**32 + np.arange(50_000)])
    image = shuffle.permute(index, size, 11)
    assert np.unique(image).size == index.size
    assert image.min() >= 0
    assert image.max() < size
    counts, _ = np.histogram(image, bins=20, range=(0, size))
    expected = index.size / 20
    assert ((counts - expected) ** 2 / expected).sum() < 50, "chi-square, 19 degrees of freedom: p < 1e-4"


@pytest.mark.parametrize("size", [5, 16, 97])
def test_every_place_is_equally_likely(size):
    """Over seeds, index 0 and the pair (0, 1) land everywhere alike."""
    images = np.array([shuffle.permute(np.array([0, 1]), size, shuffle.key(seed)) for seed in range(6000)])
    counts = np.bincount(images[:, 0], minlength=size)
    expected = len(images) / size
    assert ((counts - expected) ** 2 / expected).sum() < size + 6 * np.sqrt(2 * size) + 10
    distance = np.bincount((images[:, 1] - images[:, 0]) % size, minlength=size)
    assert distance[0] == 0
    expected = len(images) / (size - 1)
    assert ((distance[1:] - expected) ** 2 / expected).sum() < size + 6 * np.sqrt(2 * size) + 10


def test_neighbouring_seeds_and_epochs_give_unrelated_orders():
    orders = [
        shuffle.permute(np.arange(1000), 1000, shuffle.key(seed, 0, epoch))
        for seed in (0, 1)
        for epoch in (0, 1)
    ]
    for i, one in enumerate(orders):
        assert (one == np.arange(1000)).sum() < 10
        for other in orders[:i]:
            assert (one == other).sum() < 10
            assert abs(np.corrcoef(one, other)[0, 1]) < 0.15


def test_keys_tell_their_parts_apart():
    parts = [(1, 2), (2, 1), (1, 2, 0), (0, 1, 2), (1, 3), (-1, 2), (2**64 + 1, 2), (1,), ()]
    assert len({shuffle.key(*part) for part in parts}) == len(parts)


def test_outside_is_refused():
    for index in (-1, 10):
        with pytest.raises(IndexError):
            shuffle.permute(np.array([index]), 10, 0)
