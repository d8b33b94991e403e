"""Ids without a token: an export's vocabulary may be padded, and such ids are never picked."""

from torch import Tensor, device
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor


class NoPadding(LogitsProcessor):
    """Sampling never picks an id from `tokenizer_size` on. Log-probabilities stay the model's own."""

    def __init__(self, vllm_config: VllmConfig, device: device, is_pin_memory: bool) -> None:
        config = vllm_config.model_config.hf_config
        self.tokens = config.tokenizer_size or config.vocab_size

    def apply(self, logits: Tensor) -> Tensor:
        """[requests, V], in place."""
        logits[:, self.tokens :] = float("-inf")
        return logits

    def is_argmax_invariant(self) -> bool:
        """Greedy sampling must not pick them either."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Nothing depends on the requests."""
