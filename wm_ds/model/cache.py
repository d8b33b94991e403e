"""The KV cache of a WhiteMatter model: k channels instead of L layers."""

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast

# transformers renamed the argument and output field `past_key_values` to `cache` within version 5.
CACHE_FIELD = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"


class WhiteMatterCache(DynamicCache):
    """transformers' DynamicCache with one entry per KV channel.

    It holds rotated, normed keys and raw values, 2·k·G·d numbers a token: k/L of the vanilla model's cache.
    The learned dummy is a parameter of the model and never stored or counted here, so the reported length is
    the number of columns of the attention mask. Selecting, repeating and reordering rows and cropping are
    DynamicCache's own. A DynamicCache that the caller made serves as well: only its first k entries are used.
    """

    def __init__(self) -> None:
        super().__init__()


def cached_tokens(cache: Cache | None, channels: int) -> int:
    """P, how many tokens the cache holds.

    Raises:
        TypeError: a cache of another kind. ValueError: one that another model has filled.
    """
    if cache is None:
        return 0
    if not isinstance(cache, DynamicCache) or cache.offloading:
        kind = (
            f"an offloaded {type(cache).__name__}"
            if isinstance(cache, DynamicCache)
            else type(cache).__name__
        )
        raise TypeError(
            f"{kind} cannot hold this model's KV: it caches channels, not layers. Leave "
            "cache_implementation unset, or pass a WhiteMatterCache or a DynamicCache"
        )
    length = cache.get_seq_length()
    filled = [layer.get_seq_length() for layer in cache.layers if layer.get_seq_length() > 0]
    if length and filled != [length] * channels:
        raise ValueError(
            f"the cache holds {len(filled)} channels, this model has {channels}: it was filled by another "
            f"model, or made for one KV per layer (prefix tuning: num_layers={channels} in its configuration)"
        )
    return length


def cached_pool(cache: DynamicCache, channels: int) -> tuple[Tensor, Tensor]:
    """Keys and values of the cached tokens, each [k, B, G, P, d]: a copy."""
    filled = cache.layers[:channels]
    return torch.stack([layer.keys for layer in filled]), torch.stack([layer.values for layer in filled])


def append(cache: DynamicCache, keys: Tensor, values: Tensor) -> None:
    """Adds the pool entries of new tokens, each [k, B, G, T, d]."""
    for channel in range(keys.shape[0]):
        cache.update(keys[channel], values[channel], channel)


__all__ = ["CACHE_FIELD", "WhiteMatterCache", "append", "cached_pool", "cached_tokens"]
