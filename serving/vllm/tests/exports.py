"""Exported folders for the tests: the trained one that is kept here, and models with random weights.

The code in an export is the model's own as it is now; it serves as the reference, and vLLM never runs it.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from wm_ds import model as model_package
from wm_ds.model import LCKVConfig, LCKVForCausalLM, WhiteMatterConfig, WhiteMatterForCausalLM

TRAINED = Path(__file__).parent / "trained"
CODE = Path(model_package.__file__).parent
SHAPE = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
PASSES = {"num_kv_channels": 2, "num_groups": 4, "no_grad_passes": 1, "grad_passes": 1}


def trained(folder: Path) -> Path:
    """A copy of the trained export, with the model's code as it is now."""
    shutil.copytree(TRAINED, folder)
    for file in CODE.glob("*.py"):
        shutil.copyfile(file, folder / file.name)
    return folder


def random_export(folder: Path, family: str = "whitematter", **fields: Any) -> Path:
    """An export of a model with random weights; the tokenizer is the trained one's."""
    classes = {
        "whitematter": (WhiteMatterConfig, WhiteMatterForCausalLM, PASSES),
        "lckv": (LCKVConfig, LCKVForCausalLM, {"warmup_layers": 2, "no_grad_passes": 1, "grad_passes": 1}),
        "vanilla": (Qwen3Config, Qwen3ForCausalLM, {}),
    }
    config_class, model_class, more = classes[family]
    config = config_class(**(SHAPE | more | fields))
    torch.manual_seed(0)
    model = model_class(config).eval()
    randomise(model)
    model.save_pretrained(folder)
    GenerationConfig(bos_token_id=1, eos_token_id=1, pad_token_id=1).save_pretrained(folder)
    for file in TRAINED.glob("tokenizer*"):
        shutil.copyfile(file, folder / file.name)
    if family != "vanilla":
        for file in CODE.glob("*.py"):
            shutil.copyfile(file, folder / file.name)
        entry = json.loads((folder / "config.json").read_text())
        module = {"whitematter": "modeling", "lckv": "lckv"}[family]
        entry["auto_map"] = {
            "AutoConfig": f"configuration.{config_class.__name__}",
            "AutoModelForCausalLM": f"{module}.{model_class.__name__}",
        }
        (folder / "config.json").write_text(json.dumps(entry))
    return folder


@torch.no_grad()
def randomise(model: PreTrainedModel) -> None:
    """Draws every parameter, also those that start at zero or one, so large that each moves the logits."""
    generator = torch.Generator().manual_seed(1)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if "norm" in name:
            weight.copy_(1 + 0.3 * noise)
        elif "router_bias" in name or "dummy" in name:
            weight.copy_(0.5 * noise)
        elif "embed_tokens" in name:
            weight.copy_(0.2 * noise)
        else:
            weight.copy_(0.6 * noise / weight.shape[-1] ** 0.5)
