"""Which parameter gets which rule.

Muon (muon.py; paper section 4.1) is meant for weight *matrices*: q, o, gate, up, down, each channel's key and
value projection, and the routers' W. Everything else is AdamW. `parameter_table` decides that by an explicit
list of names, never by dimension: a stacked `[k, out, in]` projection is k matrices, while stacked norms,
router biases, fusion weights and the dummy are none although they have two or three dimensions. A trainable
parameter that the list does not name is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from wm_ds.errors import WmError

# Every parameter of every model family, by the end of its name: (pattern, rule, decayed). "matrix" parameters
# are [out, in] or [k, out, in]; for the rest only AdamW makes sense. Weight decay 0.1 of the paper is read
# as: on all matrices, embeddings and head; not on gains (norms, fusion), biases and the dummy, whose zero is
# not a neutral value.
RULES: tuple[tuple[str, str, bool], ...] = (
    (r"embed_tokens\.weight", "embedding", True),
    (r"lm_head\.weight", "head", True),
    (r"self_attn\.(q_proj|k_proj|v_proj|o_proj)\.weight", "matrix", True),
    (r"mlp\.(gate_proj|up_proj|down_proj)\.weight", "matrix", True),
    (r"pool\.(key|value)\.proj", "matrix", True),
    (r"pool\.(key|value)\.router_weight", "matrix", True),
    (r"pool\.(key|value)\.(router_bias|proj_bias)", "other", False),
    (r"self_attn\.(q_proj|k_proj|v_proj)\.bias", "other", False),
    (r"pool\.(key|value)\.(source_norm|channel_norm|head_norm)", "other", False),
    (r"dummy_(key|value)", "other", False),
    (r"self_attn\.fusion\.(key|value)_(bottom|middle)", "other", False),
    (r"(input_layernorm|post_attention_layernorm|q_norm|k_norm|\bnorm)\.weight", "other", False),
)


class OptimizerError(WmError, ValueError):
    """The parameters do not fit the optimizer's rules; the message names the parameter."""


@dataclass(frozen=True)
class Row:
    """One line of the parameter table."""

    name: str
    shape: tuple[int, ...]
    rule: str
    """muon or adamw"""
    decay: float
    scale: float
    """Muon's update is multiplied by this before the learning rate; 1 for AdamW."""

    @property
    def matrices(self) -> int:
        """How many matrices Muon sees in it."""
        return self.shape[0] if len(self.shape) == 3 else 1


def parameter_table(
    shapes: Iterable[tuple[str, tuple[int, ...]]],
    *,
    optimizer: str = "muon",
    weight_decay: float = 0.1,
    update_scale: str = "rms",
    embedding_rule: str = "adamw",
    head_rule: str = "adamw",
) -> list[Row]:
    """The rule for every trainable parameter, in the model's order.

    `shapes`: (name, shape) of the trainable parameters, names relative to the Hugging Face model, tied
    weights once. `optimizer` adamw puts everything on AdamW. `update_scale`: see `muon_scale`.
    Raises OptimizerError for a parameter that no rule names, or one with a matrix rule that is no matrix.
    """
    rows = []
    for name, shape in shapes:
        hits = [(kind, decayed) for pattern, kind, decayed in RULES if re.search(rf"(^|\.){pattern}$", name)]
        if not hits:
            raise OptimizerError(
                f"parameter {name} {list(shape)} has no optimizer rule: add it to RULES in "
                "wm_ds/optim/param_rules.py"
            )
        kind, decayed = hits[0]
        matrix = (
            kind == "matrix"
            or (kind, embedding_rule) == ("embedding", "muon")
            or (kind, head_rule) == ("head", "muon")
        )
        if matrix and len(shape) not in (2, 3):
            raise OptimizerError(
                f"parameter {name} {list(shape)} is listed as a matrix but has {len(shape)} dimensions"
            )
        rule = "muon" if optimizer == "muon" and matrix else "adamw"
        scale = muon_scale(shape[-2], shape[-1], update_scale) if rule == "muon" else 1.0
        rows.append(Row(name, tuple(shape), rule, weight_decay if decayed else 0.0, scale))
    return rows


def muon_scale(rows: int, cols: int, update_scale: str) -> float:
    """Factor on the orthogonalised update of one [rows, cols] matrix.

    rms: 0.2 sqrt(max(rows, cols)), which gives the update AdamW's typical RMS, so that one learning rate
    serves both (Liu et al., 2025; torch's `match_rms_adamw`). spectral: sqrt(max(1, rows / cols)) (Jordan et
    al., 2024).
    """
    if update_scale == "rms":
        return 0.2 * math.sqrt(max(rows, cols))
    return math.sqrt(max(1.0, rows / cols))


def format_table(rows: list[Row]) -> str:
    """The table as text; rows that differ only in the layer's number become one line."""
    folded: dict[tuple, list[str]] = {}
    for row in rows:
        pattern = re.sub(r"\.layers\.\d+\.", ".layers.*.", row.name)
        folded.setdefault((pattern, row.shape, row.rule, row.decay, row.scale), []).append(row.name)
    lines = [f"{'parameter':52} {'count':>5} {'shape':20} {'rule':6} {'decay':>6} {'scale':>7}"]
    for (pattern, shape, rule, decay, scale), names in folded.items():
        lines.append(
            f"{pattern:52} {len(names):>5} {'x'.join(map(str, shape)):20} {rule:6} {decay:>6g} {scale:>7.4g}"
        )
    total = sum(math.prod(r.shape) for r in rows)
    muon = sum(math.prod(r.shape) for r in rows if r.rule == "muon")
    lines.append(f"{total:,} parameters: {muon:,} Muon, {total - muon:,} AdamW")
    return "\n".join(lines)
