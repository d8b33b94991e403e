"""A small model and its optimizer as in an engine of one rank at stage 0."""

from __future__ import annotations

import torch

from wm_ds.model import WhiteMatterConfig, WhiteMatterForCausalLM
from wm_ds.optim.muon import MuonAdamW, Settings
from wm_ds.optim.param_rules import parameter_table
from wm_ds.optim.partition import Fragment, Master

SIZES = {
    "vocab_size": 50,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def whitematter(**fields: object) -> WhiteMatterForCausalLM:
    return WhiteMatterForCausalLM(WhiteMatterConfig(**SIZES, num_kv_channels=2, router_stride=2, **fields))


def shapes(lm: torch.nn.Module) -> list:
    return [(name, tuple(p.shape)) for name, p in lm.named_parameters()]


def optimizer(lm: torch.nn.Module, lr: float, **table: object) -> MuonAdamW:
    """As in an engine of one rank at stage 0."""
    parameters = dict(lm.named_parameters())
    rows = parameter_table(shapes(lm), **table)
    found = MuonAdamW(rows, parameters, Settings(lr=lr, ns_dtype=torch.float32))
    names = {id(p): n for n, p in parameters.items()}
    masters, fragments = [], []
    for i, group in enumerate(found.param_groups):
        for p in group["params"]:
            masters.append(Master(p, i, (names[id(p)],)))
            fragments.append(Fragment(names[id(p)], tuple(p.shape), 0, p.numel(), p, 0, i))
    found.attach(masters, fragments, torch.device("cpu"))
    return found
