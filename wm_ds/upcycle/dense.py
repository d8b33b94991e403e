"""A dense model to start from: a Qwen3, Qwen2, Llama or Mistral folder, or a vanilla run of this project.

Everything of it that a run's blocks cannot be is refused by name, before a tensor is read.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

from wm_ds import trained
from wm_ds.checkpoint.directory import step_name
from wm_ds.errors import WmError, one_line
from wm_ds.families import family_of

TYPES = ("qwen3", "qwen2", "llama", "mistral")
# Both the folder's and the run's name for them.
SAME = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "rms_norm_eps",
    "tie_word_embeddings",
    "vocab_size",
)


class UpcycleError(WmError, RuntimeError):
    """The weights cannot begin this run; the message is one line."""


@dataclass(frozen=True)
class Dense:
    """A dense model on disk.

    Attributes:
        path: the folder, or the run's checkpoint.
        config: its configuration.
        shapes: of its tensors, by name.
        read: one tensor, in fp32.
        tokenizer: folder of its tokenizer, None where it has none.
        close: lets its files go.
    """

    path: Path
    config: PreTrainedConfig
    shapes: dict[str, tuple[int, ...]]
    read: Callable[[str], Tensor]
    tokenizer: Path | None
    close: Callable[[], None]

    def __enter__(self) -> Dense:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_dense(path: Path, step: int | None = None) -> Dense:
    """The model at `path`: a folder that transformers loads, a vanilla run or one checkpoint of it."""
    if (path / "config.json").is_file():
        if step is not None:
            raise UpcycleError(f"{path} is a folder, which has no step {step_name(step)}")
        return _folder(path)
    source = trained.find(path, step)
    config = source.hf_config()
    if family_of(config).name != "vanilla":
        raise UpcycleError(
            f"{path} is a run of family {config.model_type}; only vanilla ones can be upcycled"
        )
    stack = ExitStack()
    reader = stack.enter_context(source.reader())

    def read(name: str) -> Tensor:
        return reader.tensor(name, dtype=torch.float32)

    return Dense(source.path, config, source.shapes(), read, source.tokenizer_dir(), stack.close)


def model_section(config: PreTrainedConfig) -> dict[str, Any]:
    """The fields of a run's `model` section that say what the dense model's blocks are.

    Raises UpcycleError for what a run's blocks cannot be.
    """
    refused = _refusals(config)
    if refused:
        raise UpcycleError("; ".join(refused))
    rope = dict(config.rope_parameters)
    theta, kind = rope.pop("rope_theta"), rope.get("rope_type", "default")
    rope.pop("partial_rotary_factor", None)
    found = {name: getattr(config, name) for name in SAME}
    head_dim = getattr(config, "head_dim", None)
    return found | {
        "head_dim": head_dim or config.hidden_size // config.num_attention_heads,
        "rope_theta": float(theta),
        "qk_norm": config.model_type == "qwen3",
        "qkv_bias": config.model_type == "qwen2",
        "scaled_rope": None if kind == "default" else rope,
    }


def _refusals(config: PreTrainedConfig) -> list[str]:
    """What the model has that no run's blocks have, a sentence each."""
    kind = config.model_type
    if kind not in TYPES:
        experts = any(hasattr(config, name) for name in ("num_experts", "num_local_experts"))
        why = "a mixture of experts, and blocks here are dense" if experts else "none of those that can"
        return [f"a model of type {kind!r} cannot be upcycled ({', '.join(TYPES)}): it is {why}"]
    found = []
    if getattr(config, "quantization_config", None):
        found.append("its weights are quantized; give the folder that they were made from")
    if config.hidden_act != "silu":
        found.append(f"hidden_act is {config.hidden_act!r}, blocks here have silu")
    for name, what in (("attention_bias", "the output projection"), ("mlp_bias", "the feed-forward network")):
        if getattr(config, name, False):
            found.append(f"{name} is true: {what} has a bias, which blocks here do not have")
    if _slides(config):
        found.append(
            "it attends through a sliding window, which blocks here do not have; if rows stay within the "
            "window, set sliding_window to null (and use_sliding_window to false) in its config.json"
        )
    if getattr(config, "attention_dropout", 0.0):
        found.append(
            f"attention_dropout is {config.attention_dropout}: there is none here; set it to 0 in config.json"
        )
    rope = config.rope_parameters or {}
    if rope.get("rope_type", "default") not in ("default", "linear", "llama3"):
        found.append(f"rope_type is {rope['rope_type']!r}; blocks here know default, linear and llama3")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        found.append(
            f"partial_rotary_factor is {rope['partial_rotary_factor']}, here whole heads are rotated"
        )
    return found


def _slides(config: PreTrainedConfig) -> bool:
    if config.model_type == "mistral":
        return config.sliding_window is not None
    return bool(getattr(config, "use_sliding_window", False)) or (
        "sliding_attention" in (getattr(config, "layer_types", None) or ())
    )


def _folder(path: Path) -> Dense:
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    except (ValueError, OSError, KeyError, TypeError) as error:
        raise UpcycleError(
            f"{path}: transformers cannot read its config.json: {one_line(str(error))}"
        ) from None
    stack = ExitStack()
    files, shapes = {}, {}
    try:
        for name in _weight_files(path):
            file = stack.enter_context(safe_open(name, framework="pt"))
            for key in file.keys():  # noqa: SIM118 (not a mapping)
                files[key] = file
                shapes[key] = tuple(file.get_slice(key).get_shape())
    except (SafetensorError, OSError) as error:
        stack.close()
        raise UpcycleError(f"{name} is damaged: {one_line(str(error))}") from None

    def read(name: str) -> Tensor:
        return files[name].get_tensor(name).float()

    has = any((path / name).is_file() for name in ("tokenizer.json", "tokenizer.model"))
    return Dense(path, config, shapes, read, path if has else None, stack.close)


def _weight_files(path: Path) -> list[Path]:
    index = path / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UpcycleError(f"{index} is damaged: it has no weight_map") from None
        missing = [name for name in names if not (path / name).is_file()]
        if missing:
            raise UpcycleError(f"{path} lacks {missing[0]} ({len(missing)} of {len(names)} weight files)")
        return [path / name for name in names]
    if not (path / "model.safetensors").is_file():
        raise UpcycleError(
            f"{path} has no model.safetensors (nor an index of several files); a folder of another format is "
            "rewritten by transformers: AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW)"
        )
    return [path / "model.safetensors"]
