"""Small random models whose every parameter matters, with the reference's view of the same numbers."""

import torch
from torch import Tensor

from tests.support.reference import Settings
from wm_ds.model import WhiteMatterConfig, WhiteMatterForCausalLM

VOCABULARY = 37

# One row for each thing a row can hold: a lone document, several with one-token documents at the front, in
# the middle and at the end, and filler between and after documents.
ROWS = {
    "one": [0] * 13,
    "several": [0, 1, 1, 1, 1, 2, 3, 3, 3, 3, 3, 3, 4],
    "filler": [0, 0, 0, -1, 1, -1, -1, 2, 2, 2, 2, -1, -1],
}


def build(
    k: int = 3,
    p: int = 2,
    layers: int = 4,
    *,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    randomise: bool = True,
    **fields: object,
) -> WhiteMatterForCausalLM:
    """A model with D=24 != Hq*d=32 and two query heads for each KV head; all parameters drawn at random.

    The routers' scale keeps the content-dependent part of the mixing weights as large as the static part.
    """
    sizes: dict = {
        "vocab_size": VOCABULARY,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000.0,
        "tie_word_embeddings": False,
        "max_position_embeddings": 64,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 0,
        "num_kv_channels": k,
        "router_stride": p,
        "num_groups": 3,
        "no_grad_passes": 1,
        "grad_passes": 2,
        "prefill_passes": 3,
        "prefill_groups": 3,
    }
    torch.manual_seed(seed)
    lm = WhiteMatterForCausalLM(WhiteMatterConfig(**(sizes | fields))).to(dtype)
    if randomise:
        scramble(lm, seed)
    return lm


@torch.no_grad()
def scramble(lm: torch.nn.Module, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed + 1)
    for name, weight in lm.named_parameters():
        noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
        if "norm" in name:
            weight.copy_(1 + 0.3 * noise)
        elif "router_bias" in name or "dummy" in name or "embed_tokens" in name:
            weight.copy_(noise)
        else:
            weight.copy_(noise / weight.shape[-1] ** 0.5)


def settings(lm: WhiteMatterForCausalLM, **changes: object) -> Settings:
    c = lm.config
    fields = {
        "layers": c.num_hidden_layers,
        "channels": c.num_kv_channels,
        "stride": c.router_stride,
        "heads": c.num_attention_heads,
        "kv_heads": c.num_key_value_heads,
        "head_dim": c.head_dim,
        "eps": 1e-6,
        "theta": 1000.0,
    }
    return Settings(**(fields | changes))


def parameters(lm: torch.nn.Module, requires_grad: bool = False) -> dict[str, Tensor]:
    """The reference's own float64 copies; a tied head appears once, under the embedding's name."""
    copies = {name: weight.detach().double().clone() for name, weight in lm.named_parameters()}
    return {name: weight.requires_grad_(requires_grad) for name, weight in copies.items()}


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(1, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def batch(*names: str, seed: int = 0) -> tuple[Tensor, Tensor]:
    """input_ids [B, 13] int64 and document_ids [B, 13] int32 for the named rows."""
    return tokens(len(names), 13, seed=seed), torch.tensor([ROWS[name] for name in names], dtype=torch.int32)


def hidden(lm: WhiteMatterForCausalLM, input_ids: Tensor, document_ids: Tensor, schedule: object) -> Tensor:
    return lm.model(input_ids=input_ids, document_ids=document_ids, schedule=schedule).last_hidden_state
