"""The KV cache of a WhiteMatter model: k channels instead of L layers."""

import torch
from torch import Tensor
from transformers import DynamicCache


class WhiteMatterCache(DynamicCache):
    """transformers' DynamicCache with one entry per KV channel.

    It holds rotated, normed keys and raw values, 2·k·G·d numbers a token: k/L of the vanilla model's cache.
    The learned dummy is a parameter of the model and never stored or counted here, so the reported length is
    the number of tokens.
    """

    def __init__(self) -> None:
        super().__init__()


def cached_pool(cache: DynamicCache, channels: int) -> tuple[Tensor, Tensor] | None:
    """Keys and values of the cached tokens, each [k, B, G, P, d]; None when the cache is empty."""
    if cache.get_seq_length() == 0:
        return None
    layers = cache.layers[:channels]
    return torch.stack([layer.keys for layer in layers]), torch.stack([layer.values for layer in layers])


def append(cache: DynamicCache, keys: Tensor, values: Tensor) -> None:
    """Adds the pool entries of new tokens, each [k, B, G, T, d]."""
    for channel in range(keys.shape[0]):
        cache.update(keys[channel], values[channel], channel)
