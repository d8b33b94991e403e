"""What no single field can tell: contradictions between fields and with the data; DeepSpeed's JSON.

Whatever contradicts something else is named with both values.
"""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any

from wm_ds.config.schema import Config, ConfigError, parse_tokens, to_steps


def contradictions(config: Config) -> list[str]:
    """Pairs of fields that cannot both be meant, one line each."""
    found = []
    m = config.model
    if (config.steps is None) == (config.tokens is None):
        found.append(f"give either steps or tokens, got steps = {config.steps} and tokens = {config.tokens}")
    elif config.tokens is not None:
        parse_tokens("tokens", config.tokens)
    for name in ("warmup", "decay"):
        to_steps(f"optim.{name}", getattr(config.optim, name), 10**9, 1)
    if config.precision == "fp16":
        why = "gradients would carry a loss scale that clipping, norms and checkpoints here do not know"
        if config.optim.name == "muon":
            why = "optim.name = muon orthogonalises its updates, which have no loss scale"
        found.append(f"precision = fp16: {why}; use autocast or bf16")
    if m.num_attention_heads % m.num_key_value_heads:
        found.append(
            f"model.num_attention_heads = {m.num_attention_heads} is no multiple of "
            f"model.num_key_value_heads = {m.num_key_value_heads}"
        )
    foreign = [
        k for k, families in _BELONGS.items() if m.family not in families and getattr(m, k) is not None
    ]
    if foreign:
        owners = " or ".join(_BELONGS[foreign[0]])
        found.append(
            f"model.{foreign[0]} = {getattr(m, foreign[0])} belongs to family {owners}, not {m.family}"
        )
    if m.family == "vanilla" and config.recompute in ("group", "group+layer"):
        found.append(
            f"recompute = {config.recompute} needs groups of tokens, which model.family = {m.family} "
            "has not; use none or layer"
        )
    if config.entries_on_host and (m.family == "vanilla" or m.feedback is False):
        found.append(
            f"entries_on_host = true needs passes over a pool, which model.family = {m.family}"
            f"{' with feedback = false' if m.feedback is False else ''} has not"
        )
    if m.family != "vanilla" and m.num_kv_channels is not None and m.num_kv_channels > m.num_hidden_layers:
        found.append(
            f"model.num_kv_channels = {m.num_kv_channels} exceeds "
            f"model.num_hidden_layers = {m.num_hidden_layers}"
        )
    if m.family == "whitematter" and (m.router_stride or 1) > m.num_hidden_layers:
        found.append(
            f"model.router_stride = {m.router_stride} exceeds model.num_hidden_layers = {m.num_hidden_layers}"
        )
    if config.zero3.gather == "traversal" and m.family != "vanilla" and "layer" not in config.recompute:
        found.append(
            f"zero3.gather = traversal with recompute = {config.recompute} keeps every layer gathered in "
            "backward; use recompute layer or group+layer, or zero3.gather step"
        )
    if config.sequence_parallel > 1:
        found += _sequence_contradictions(config)
    c = config.checkpoint
    if c.keep_every is not None and (c.every is None or c.keep_every % c.every):
        found.append(f"checkpoint.keep_every = {c.keep_every} is no multiple of checkpoint.every = {c.every}")
    if not all(0 <= b < 1 for b in config.optim.betas):
        found.append(f"optim.betas = {list(config.optim.betas)} must lie in [0, 1)")
    return found


def _sequence_contradictions(config: Config) -> list[str]:
    n, m = config.sequence_parallel, config.model
    if m.family != "whitematter":
        return [
            f"sequence_parallel = {n} shares out one pool of all layers, which model.family = {m.family} has "
            "not; use family whitematter, or sequence_parallel 1"
        ]
    found = []
    if m.feedback is False:
        found.append(
            f"sequence_parallel = {n} shares out the pool between steps of the schedule, and model.feedback "
            "= false has none; use sequence_parallel 1"
        )
    if m.schedule not in (None, "cyclic"):
        found.append(
            f"sequence_parallel = {n} needs steps that are spread over the whole row, which model.schedule = "
            f"{m.schedule} has not (its steps lie on few ranks); use cyclic"
        )
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(m, name)
        if heads % n:
            choices = [i for i in range(1, heads + 1) if m.num_key_value_heads % i == 0]
            found.append(
                f"sequence_parallel = {n} does not divide model.{name} = {heads}, and attention is shared "
                f"out by heads; use one of {', '.join(map(str, choices))}"
            )
    return found


_POOL, _PASSES = ("whitematter",), ("whitematter", "lckv")
_BELONGS = {
    "num_kv_channels": _POOL,
    "router_stride": _POOL,
    "router_init": _POOL,
    "routing": _POOL,
    "feedback": _POOL,
    "warmup_layers": ("lckv",),
    "num_groups": _PASSES,
    "no_grad_passes": _PASSES,
    "grad_passes": _PASSES,
    "prefill_passes": _PASSES,
    "prefill_groups": _PASSES,
}


def check_against_data(config: Config, *, vocab_size: int, seq_len: int, sequences: int) -> None:
    """Raise ConfigError where the run does not fit its packed data (sizes from the manifest)."""
    rows = config.model.vocab_size
    if rows is not None and rows < vocab_size:
        raise ConfigError(
            f"model.vocab_size = {rows} is smaller than the data's tokenizer ({vocab_size} tokens); "
            f"set it to {vocab_size} or more, or leave it out"
        )
    n, groups = config.sequence_parallel, config.model.num_groups or 8
    if n > 1 and seq_len % (n * groups):
        raise ConfigError(
            f"sequence_parallel = {n} x model.num_groups = {groups} does not divide the data's rows of "
            f"{seq_len} tokens: a group's tokens must be spread evenly over the ranks"
        )
    total = config.total_steps(seq_len)
    tokens = seq_len * config.batch.global_batch
    for name in ("warmup", "decay"):
        to_steps(f"optim.{name}", getattr(config.optim, name), total, tokens)
    if sequences < 1:
        raise ConfigError("the training split has no sequences")


def nearest(name: str, known: list[str], prefix: str = "") -> str:
    """`; did you mean X?` with the most similar known name, or the list of all."""
    match = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if match:
        return f"; did you mean {prefix}{match[0]}?"
    return f"; known here: {', '.join(sorted(known))}"


# DeepSpeed's JSON

# Top-level keys that DeepSpeed 0.19.8 reads. It ignores any other in silence, so we refuse it.
DEEPSPEED_KEYS = (
    "zero_optimization",
    "communication_data_type",
    "prescale_gradients",
    "gradient_predivide_factor",
    "sparse_gradients",
    "disable_allgather",
    "memory_breakdown",
    "wall_clock_breakdown",
    "dump_state",
    "steps_per_print",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
    "comms_logger",
    "flops_profiler",
    "aio",
    "compile",
    "compression_training",
    "data_types",
    "disable_python_gc",
    "graph_harvesting",
    "use_data_before_expert_parallelism",
    "log_level",
    "activation_checkpointing",
)

# What the run decides, and where it says so.
RUN_DECIDES = {
    "train_batch_size": "batch.global_batch",
    "train_micro_batch_size_per_gpu": "batch.micro_batch",
    "gradient_accumulation_steps": "batch (derived)",
    "optimizer": "optim",
    "scheduler": "optim.schedule",
    "gradient_clipping": "optim.clip and optim.clip_rule",
    "fp16": "precision",
    "bf16": "precision",
    "torch_autocast": "precision",
    "amp": "precision",
    "tensorboard": "log.tensorboard",
    "wandb": "log.wandb",
    "csv_monitor": "log",
}


def check_against_deepspeed(config: Config, json: dict[str, Any]) -> None:
    """What the run and DeepSpeed's checked JSON contradict each other in. Raises ConfigError."""
    if config.compile and json.get("zero_optimization", {}).get("stage") == 3:
        raise ConfigError(
            f"compile = true does not go with stage 3 of {config.deepspeed}: its hooks gather parameters in "
            "the midst of compiled blocks; use compile = false, or stage 2"
        )


def load_deepspeed(path: str | Path) -> dict[str, Any]:
    """DeepSpeed's JSON: known top-level keys only, nothing that the run decides. Raises ConfigError."""
    try:
        raw = json.loads(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"deepspeed = {path}: {error.strerror or error}") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: not valid JSON at line {error.lineno}: {error.msg}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: must hold a JSON object")
    for key in raw:
        if key in RUN_DECIDES:
            raise ConfigError(f"{path}: {key} is decided by the run: remove it and set {RUN_DECIDES[key]}")
        if key not in DEEPSPEED_KEYS:
            raise ConfigError(
                f"{path}: unknown top-level key {key!r}{nearest(key, [*DEEPSPEED_KEYS, *RUN_DECIDES])}"
            )
    zero = raw.get("zero_optimization", {})
    stage = zero.get("stage", 0)
    if stage not in (0, 1, 2, 3):
        raise ConfigError(f"{path}: zero_optimization.stage = {stage!r} must be 0, 1, 2 or 3")
    for part, lowest in (("offload_optimizer", 1), ("offload_param", 3)):
        device = zero.get(part, {}).get("device", "none")
        if device not in ("none", "cpu"):
            raise ConfigError(f"{path}: zero_optimization.{part}.device = {device!r}: use cpu or none")
        if device == "cpu" and stage < lowest:
            raise ConfigError(f"{path}: {part} to cpu needs stage {lowest} or more, got stage {stage}")
    return raw
