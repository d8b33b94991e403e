"""What `generate` must know about models that cache a pool of KV channels."""

from typing import Any

from torch import nn
from transformers import GenerationConfig, GenerationMixin
from transformers.generation import LogitsProcessorList, SuppressTokensLogitsProcessor

from .cache import CACHE_FIELD, WhiteMatterCache

PREFILL_SETTINGS = ("prefill", "prefill_passes", "prefill_groups", "prefill_tolerance")


class PoolGenerationMixin(GenerationMixin):
    """transformers' generation with a cache of channels, prefill settings and a padded vocabulary.

    Prefill settings are arguments of `generate` or fields of a GenerationConfig (saved and loaded with it).
    They take the place of the configuration's fields of the same names.
    """

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """The model makes its own cache: k channels instead of L layers."""
        return False

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        kind = generation_config.cache_implementation
        if kind not in (None, "dynamic", "dynamic_full"):
            raise ValueError(
                f"cache_implementation={kind!r} is not supported: this model caches KV channels that all "
                "layers share, not layers. Leave it unset; the cache is already k/L of a per-layer one"
            )
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        if generation_config.use_cache is not False and model_kwargs.get(CACHE_FIELD) is None:
            model_kwargs[CACHE_FIELD] = WhiteMatterCache()
        for name in PREFILL_SETTINGS:
            value = getattr(generation_config, name, None)
            if value is not None and model_kwargs.get("schedule") is None:
                model_kwargs.setdefault(name, value)

    def _get_logits_processor(self, *args: Any, **kwargs: Any) -> LogitsProcessorList:
        processors = super()._get_logits_processor(*args, **kwargs)
        first = self.config.tokenizer_size
        if first is not None and first < self.config.vocab_size:
            # First of all: after top-k or top-p, ids without a token could be all that is left.
            padded = list(range(first, self.config.vocab_size))
            processors.insert(0, SuppressTokensLogitsProcessor(padded, device=str(self.device)))
        return processors

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """transformers' method.

        A generation config marked as made from the model's config would lose its prefill settings on loading.
        """
        self.generation_config._from_model_config = None
        super().save_pretrained(*args, **kwargs)

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, *args: Any, **kwargs: Any
    ) -> nn.Embedding:
        """transformers' method; afterwards every id below `new_num_tokens` counts as a token."""
        embeddings = super().resize_token_embeddings(new_num_tokens, *args, **kwargs)
        if new_num_tokens is not None:
            self.config.tokenizer_size = new_num_tokens
        return embeddings


__all__ = ["PREFILL_SETTINGS", "PoolGenerationMixin"]
