"""What `generate` must know about models that cache a pool of KV channels."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin
from transformers.generation import (
    LogitsProcessor,
    LogitsProcessorList,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from .cache import CACHE_FIELD, WhiteMatterCache

PREFILL_SETTINGS = ("prefill", "prefill_passes", "prefill_groups", "prefill_tolerance", "prefill_start")


class NoPadding(LogitsProcessor):
    """Ids from `tokens` on are padding of the vocabulary: never picked."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        scores[:, self.tokens :] = -float("inf")
        return scores


class PoolGenerationMixin(GenerationMixin):
    """transformers' generation with a cache of channels, prefill settings and a padded vocabulary.

    Prefill settings are arguments of `generate` or fields of a GenerationConfig (saved and loaded with it).
    They take the place of the configuration's fields of the same names.

    A row without a prompt starts from `bos_token_id`: with none given, with no token, or with padding only.
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
        if model_kwargs.get("schedule") is not None:
            return
        kind = model_kwargs.get("prefill") or getattr(generation_config, "prefill", None)
        used = ("prefill", *self.config.prefill_settings(kind))
        for name in PREFILL_SETTINGS:
            value = getattr(generation_config, name, None)
            if value is not None and name in used:  # a file's fields may be meant for another kind
                model_kwargs.setdefault(name, value)

    def _get_logits_processor(self, *args: Any, **kwargs: Any) -> LogitsProcessorList:
        processors = super()._get_logits_processor(*args, **kwargs)
        first = self.config.tokenizer_size
        if first is not None and first < self.config.vocab_size:
            # First of all: after top-k or top-p, ids without a token could be all that is left.
            processors.insert(0, NoPadding(first))
        given = kwargs.get("model_kwargs") or {}
        settings = {name: given[name] for name in (*PREFILL_SETTINGS, "schedule") if name in given}
        for processor in processors:
            if isinstance(processor, UnbatchedClassifierFreeGuidanceLogitsProcessor):
                # Guidance evaluates its negative prompt itself, and would do it by the model's defaults.
                processor.model = partial(self.__call__, **settings)
        return processors

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, *args: Any, inputs_embeds: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """transformers' method, without an argument that its older versions hand to every model."""
        inputs = super().prepare_inputs_for_generation(
            input_ids, *args, inputs_embeds=inputs_embeds, **kwargs
        )
        inputs.pop("cache_position", None)
        return inputs

    def _prepare_model_inputs(
        self,
        inputs: Tensor | None = None,
        bos_token_id: int | None = None,
        model_kwargs: dict[str, Any] | None = None,
    ) -> tuple[Tensor, str, dict[str, Any]]:
        model_kwargs = dict(model_kwargs or {})
        if model_kwargs.get("inputs_embeds") is None:
            if inputs is None:
                inputs = model_kwargs.pop("input_ids", None)
            if inputs is None:
                rows = next((len(x) for x in model_kwargs.values() if isinstance(x, Tensor)), 1)
                inputs = torch.zeros(rows, 0, dtype=torch.long, device=self._entry())
            inputs = _with_start(inputs, bos_token_id, model_kwargs)
        return super()._prepare_model_inputs(inputs, bos_token_id, model_kwargs)

    def _entry(self) -> torch.device:
        """Where inputs go: the weights' device, unless they lie elsewhere until a forward needs them."""
        if self.device.type != "meta":
            return self.device
        hook = getattr(self.get_decoder(), "_hf_hook", None)
        device = getattr(hook, "execution_device", None)
        return torch.device("cpu" if device is None else device)

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


def _with_start(input_ids: Tensor, start: int | None, model_kwargs: dict[str, Any]) -> Tensor:
    """input_ids [B, T], where a row without a token gets one, `start`; the mask in model_kwargs follows."""
    mask = model_kwargs.get("attention_mask")
    if input_ids.shape[1] == 0:
        input_ids = torch.zeros(len(input_ids), 1, dtype=torch.long, device=input_ids.device)
        mask = None if mask is None else torch.zeros_like(input_ids)
        empty_B = torch.ones_like(input_ids[:, 0], dtype=torch.bool)
    elif mask is None or mask.dim() != 2:
        return input_ids
    else:
        input_ids, mask = input_ids.clone(), mask.clone()
        empty_B = ~mask.bool().any(dim=1)
    if not bool(empty_B.any()):
        return input_ids
    if start is None:
        raise ValueError(
            "a prompt is empty, and the generation config has no bos_token_id to start it from: give a "
            "prompt, or bos_token_id"
        )
    input_ids[empty_B, -1] = int(start)
    if mask is not None:
        mask[empty_B, -1] = 1
        model_kwargs["attention_mask"] = mask
    return input_ids


__all__ = ["PREFILL_SETTINGS", "PoolGenerationMixin"]
