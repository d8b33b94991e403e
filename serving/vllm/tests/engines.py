"""vLLM and Hugging Face on the same exported folder, and the comparison of the two."""

import gc
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import exports
import torch
from transformers.dynamic_module_utils import get_class_from_dynamic_module

MODEL_LENGTH = 256
BLOCK = 32
SEATS = 8


class Engines:
    """One engine at a time, kept as long as the same one is asked for; folders and references for good."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folders: dict[str, Path] = {}
        self.references: dict[tuple[str, torch.dtype], Any] = {}
        self.key: Any = None
        self.llm: Any = None

    def folder(self, name: str, **fields: Any) -> Path:
        """The export `name`: "trained", or a family with random weights and these fields in its config."""
        key = json.dumps([name, fields], sort_keys=True)
        if key not in self.folders:
            folder = self.root / f"export{len(self.folders)}"
            make = exports.trained if name == "trained" else exports.random_export
            self.folders[key] = make(folder) if name == "trained" else make(folder, name, **fields)
        return self.folders[key]

    def engine(self, folder: Path, **settings: Any) -> Any:
        """vLLM on a folder; float32, blocks of 32 tokens and 8 seats unless the settings say otherwise."""
        from vllm import LLM

        key = json.dumps([str(folder), settings], sort_keys=True)
        if key != self.key:
            self.close()
            usual = {
                "dtype": "float32",
                "enforce_eager": True,
                "max_num_seqs": SEATS,
                "block_size": BLOCK,
                "num_gpu_blocks_override": 200,
                "max_num_batched_tokens": 2048,
                "max_logprobs": 400,
            }
            self.llm, self.key = LLM(model=str(folder), **(usual | settings)), key
        self.llm.reset_prefix_cache()
        return self.llm

    def reference(self, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
        """The export's own code in Hugging Face's hands.

        By its class: AutoModel takes the plugin's configuration for the folder's in a process that has both.
        """
        key = (str(folder), dtype)
        if key not in self.references:
            entry = json.loads((folder / "config.json").read_text())
            if "auto_map" in entry:
                name = entry["auto_map"]["AutoModelForCausalLM"]
                model_class = get_class_from_dynamic_module(name, str(folder))
            else:
                from transformers import Qwen3ForCausalLM as model_class
            self.references[key] = model_class.from_pretrained(folder, dtype=dtype).eval()
        return self.references[key]

    def close(self) -> None:
        """Ends the engine at hand."""
        if self.llm is None:
            return
        from vllm.distributed import cleanup_dist_env_and_memory

        self.llm.llm_engine.engine_core.shutdown()
        self.llm = self.key = None
        gc.collect()
        cleanup_dist_env_and_memory()


def prompts(lengths: Sequence[int], seed: int = 0, vocabulary: int = 384) -> list[list[int]]:
    """Random token ids, one prompt for each length."""
    draw = random.Random(seed)
    return [[draw.randrange(4, vocabulary) for _ in range(length)] for length in lengths]


def generate(llm: Any, tokens: list[list[int]], new: int = 12, **sampling: Any) -> list[Any]:
    """vLLM's outputs, greedy unless the sampling says otherwise, each with the log-probabilities it chose."""
    from vllm import SamplingParams

    settings = {"temperature": 0, "max_tokens": new, "ignore_eos": True, "logprobs": 0} | sampling
    given = [{"prompt_token_ids": row} for row in tokens]
    return llm.generate(given, SamplingParams(**settings), use_tqdm=False)


def chosen(completion: Any) -> tuple[list[int], list[float]]:
    """The tokens of a completion and their log-probabilities."""
    ids = list(completion.token_ids)
    return ids, [entry[token].logprob for entry, token in zip(completion.logprobs, ids)]


@torch.no_grad()
def expected(model: Any, prompt: list[int], answer: list[int], **prefill: Any) -> torch.Tensor:
    """Log-probabilities [answer, V] that Hugging Face gives: the prompt in one prefill, the rest exactly."""
    ids = torch.tensor([prompt])
    first = model(ids, use_cache=True, logits_to_keep=1, **prefill)
    logits = [first.logits[0]]
    if len(answer) > 1:
        cache = first.past_key_values if "past_key_values" in first else first.cache
        exact = {"prefill": "exact"} if hasattr(model.config, "prefill") else {}
        name = "past_key_values" if "past_key_values" in first else "cache"
        rest = model(torch.tensor([answer[:-1]]), use_cache=True, **{name: cache}, **exact)
        logits.append(rest.logits[0])
    return torch.cat(logits).double().log_softmax(-1)


def compare(model: Any, prompt: list[int], completion: Any, **prefill: Any) -> float:
    """The largest difference between the log-probabilities that vLLM reports and Hugging Face's.

    Fails where a greedy token is not Hugging Face's (a tie within 1e-5 apart).
    """
    ids, values = chosen(completion)
    logprobs = expected(model, prompt, ids, **prefill)
    theirs = logprobs[range(len(ids)), ids]
    assert (logprobs.amax(-1) - theirs).max() < 1e-5, f"another greedy token than Hugging Face's: {ids}"
    return float((theirs - torch.tensor(values)).abs().max())


def worst(model: Any, tokens: list[list[int]], outputs: list[Any], **prefill: Any) -> float:
    """`compare` over all prompts."""
    return max(
        compare(model, row, out.outputs[0], **prefill) for row, out in zip(tokens, outputs, strict=True)
    )


def scheduler(llm: Any) -> Any:
    """The engine's scheduler, in this process."""
    return llm.llm_engine.engine_core.engine_core.scheduler
