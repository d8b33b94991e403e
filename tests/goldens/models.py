"""Goldens of the models alone: fresh weights, logits, losses' gradients, generated tokens, each family."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from . import record
from .record import Entries
from .subject import fresh_model, torch

VOCABULARY, LENGTH = 40, 24
SIZES = {
    "hidden_size": 24,
    "intermediate_size": 36,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.2,
}
PASSES = {"num_groups": 3, "no_grad_passes": 1, "grad_passes": 2}
WHITEMATTER = SIZES | PASSES | {"num_kv_channels": 2, "router_stride": 2}
FAMILIES: dict[str, dict] = {
    "dynamic": WHITEMATTER,
    "static": WHITEMATTER | {"routing": "static"},
    "softmax": WHITEMATTER | {"routing": "softmax", "num_kv_channels": 1},
    "fixed": WHITEMATTER | {"routing": "fixed", "num_kv_channels": 4},
    "k=L": WHITEMATTER | {"num_kv_channels": 4, "tie_word_embeddings": True},
    "no_feedback": WHITEMATTER | {"num_kv_channels": 4, "feedback": False},
    "wavefront": WHITEMATTER | {"schedule": "wavefront", "chunk_size": 8, "relaxation": [0.8, 0.9]},
    "chunked": WHITEMATTER | {"schedule": "chunked", "chunk_size": 8},
    "exact": WHITEMATTER | {"schedule": "exact"},
    "lckv": SIZES | PASSES | {"family": "lckv", "warmup_layers": 1},
    "lckv_w2": SIZES | PASSES | {"family": "lckv", "warmup_layers": 2, "num_groups": 1},
    "vanilla": SIZES | {"family": "vanilla"},
}
POLICIES = ("none", "layer", "group", "group+layer")
# What is differentiated in the quick part: (precision, recompute policy); "": every other family.
FEW: dict[str, list[tuple[str, str]]] = {
    "dynamic": [("fp32", policy) for policy in POLICIES]
    + [("autocast", "none"), ("autocast", "group+layer")],
    "exact": [("fp32", "none")],
    "": [("fp32", "none"), ("autocast", "group+layer")],
}


def seeded(family: str, recompute: str = "none") -> torch.nn.Module:
    """A model in which no parameter has kept a neutral start."""
    lm = fresh_model(FAMILIES[family], seed=3, vocab_size=VOCABULARY, seq_len=LENGTH, recompute=recompute)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return lm


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    """input_ids and document_ids [2, 24]: documents in the middle of a row, and padding at its end."""
    ids = torch.randint(1, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    documents = torch.zeros(2, LENGTH, dtype=torch.int32)
    documents[0, 7:] = 1
    documents[0, 16:] = 2
    documents[1, 21:] = -1
    return ids, documents


def probe(everything: bool) -> Entries:
    """Every family's goldens, on one process; of the gradients a few only, unless everything is wanted."""
    entries: Entries = {}
    for family in FAMILIES:
        ways = itertools.product(("fp32", "autocast"), POLICIES) if everything else FEW.get(family, FEW[""])
        found = _outputs(family) | _gradients(family, ways)
        entries |= {f"model/{family}/{name}": entry for name, entry in found.items()}
    return entries


def _outputs(family: str) -> Entries:
    ids, documents = rows()
    fresh = fresh_model(FAMILIES[family], seed=3, vocab_size=VOCABULARY, seq_len=LENGTH, recompute="none")
    entries: Entries = {"initial_weights": record.of_tensors(fresh.named_parameters())}
    lm = seeded(family).eval()
    left_padded = torch.ones(2, LENGTH, dtype=torch.long)
    left_padded[1, :5] = 0
    with torch.no_grad():
        masked = {} if family == "vanilla" else {"document_ids": documents}
        entries["logits"] = record.of_tensor(lm(input_ids=ids, **masked).logits)
        entries["logits_left_padded"] = record.of_tensor(
            lm(input_ids=ids, attention_mask=left_padded).logits[left_padded.bool()]
        )
        with torch.autocast("cpu", torch.bfloat16):
            entries["logits_autocast"] = record.of_tensor(lm(input_ids=ids, **masked).logits)
        tokens = lm.generate(ids, attention_mask=left_padded, max_new_tokens=8, do_sample=False)
        entries["generated"] = record.of_floats(tokens[:, LENGTH:].flatten().tolist())
        if family in ("dynamic", "no_feedback"):
            lm.config.prefill, lm.config.prefill_tolerance = "converged", 1e-2
            entries["logits_converged"] = record.of_tensor(lm(input_ids=ids, **masked).logits)
            tokens = lm.generate(ids, attention_mask=left_padded, max_new_tokens=8, do_sample=False)
            entries["generated_converged"] = record.of_floats(tokens[:, LENGTH:].flatten().tolist())
    return entries


def _gradients(family: str, ways: Iterable[tuple[str, str]]) -> Entries:
    ids, documents = rows()
    masked = {} if family == "vanilla" else {"document_ids": documents}
    entries: Entries = {}
    for precision, policy in ways:
        if family == "vanilla" and policy not in ("none", "layer"):
            continue
        lm = seeded(family, policy).train()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
            loss = lm(input_ids=ids, labels=ids.masked_fill(documents < 0, -100), **masked).loss
        loss.backward()
        grads = [(name, p.grad) for name, p in lm.named_parameters() if p.grad is not None]
        entries[f"loss/{precision}/{policy}"] = record.of_floats([loss.item()])
        entries[f"gradients/{precision}/{policy}"] = record.of_tensors(grads)
    return entries
