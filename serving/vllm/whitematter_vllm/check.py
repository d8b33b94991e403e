"""What is not supported is refused by name, in the process that the user started, before a worker is.

vLLM calls `Check` with the whole of its configuration once that is known.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from vllm.config import VllmConfig
from vllm.model_executor.models.config import VerifyAndUpdateConfig

from whitematter_vllm.configuration import WhiteMatterConfig, refuse_unknown
from whitematter_vllm.sweeps import Schedule, schedule_of

ROUTINGS = ("dynamic", "static", "softmax", "fixed")


class Check(VerifyAndUpdateConfig):
    """Called by vLLM for models of ours."""

    @staticmethod
    def verify_and_update_config(vllm_config: VllmConfig) -> None:
        """Raises ValueError, in one line, for all that is not supported; adds the rule of padded ids."""
        config = vllm_config.model_config.hf_config
        refuse_unknown(config)
        problems = [*model_problems(config), *engine_problems(vllm_config)]
        problems += border_problems(schedule_of(config), vllm_config)
        if problems:
            raise ValueError(
                f"{config.model_type} models are not served with " + "; nor with ".join(problems)
            )
        if (config.tokenizer_size or config.vocab_size) < config.vocab_size:
            ours = "whitematter_vllm.vocabulary:NoPadding"
            given = vllm_config.model_config.logits_processors or []
            vllm_config.model_config.logits_processors = [*given, ours]


def model_problems(config: WhiteMatterConfig) -> Iterator[str]:
    """Fields of the model that have no counterpart here."""
    if not config.qk_norm:
        yield "qk_norm: false"
    if config.qkv_bias:
        yield "qkv_bias: true"
    if config.scaled_rope is not None:
        yield "scaled_rope"
    if config.model_type == "whitematter":
        if not config.feedback:
            yield "feedback: false (the ablation without feedback)"
        if config.routing not in ROUTINGS:
            yield f"routing {config.routing!r}"
    elif (config.prefill_start or config.start) != "embedding":
        yield "start 'layerwise' (their condensed layers have one KV, which the top one makes)"


def engine_problems(vllm_config: VllmConfig) -> Iterator[str]:
    """Settings of the engine that would give wrong results or were never tried."""
    parallel, model, cache = vllm_config.parallel_config, vllm_config.model_config, vllm_config.cache_config
    kv_heads, ranks = model.hf_config.num_key_value_heads, parallel.tensor_parallel_size
    refused = {
        "--pipeline-parallel-size (all layers feed one pool)": parallel.pipeline_parallel_size > 1,
        "--decode-context-parallel-size": parallel.decode_context_parallel_size > 1,
        "--prefill-context-parallel-size": parallel.prefill_context_parallel_size > 1,
        f"--tensor-parallel-size {ranks} (it must divide the {kv_heads} KV heads)": kv_heads % ranks,
        "--enable-dbo": parallel.use_ubatching,
        "speculative decoding": vllm_config.speculative_config,
        "a KV connector": vllm_config.kv_transfer_config,
        "LoRA": vllm_config.lora_config,
        f"quantization {model.quantization!r}": model.quantization,
        f"--kv-cache-dtype {cache.cache_dtype}": cache.cache_dtype not in ("auto", dtype_name(model.dtype)),
        f"--runner {model.runner_type}": model.runner_type != "generate",
        "--enable-prompt-embeds": model.enable_prompt_embeds,
    }
    yield from (name for name, found in refused.items() if found)


def dtype_name(dtype: torch.dtype) -> str:
    """As options name it."""
    return str(dtype).removeprefix("torch.")


def border_problems(schedule: Schedule, vllm_config: VllmConfig) -> Iterator[str]:
    """Where a prompt could be cut elsewhere than at a border, results would depend on the cuts again."""
    if not schedule.border:
        return
    block = vllm_config.cache_config.block_size
    if vllm_config.scheduler_config.enable_chunked_prefill:
        yield "prefill_border and chunked prefill together (add --no-enable-chunked-prefill)"
    if block is not None and block % schedule.border:
        yield f"prefill_border {schedule.border} and --block-size {block} (the border must divide it)"
    if schedule.kind in ("chunked", "wavefront"):
        yield f"prefill_border and the schedule {schedule.kind!r}, which has borders of its own"
