"""What no single field can tell: contradictions between fields, with the data and with DeepSpeed's JSON.

Whatever contradicts something else is named with both values; so is a key that nothing would read beside
another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from wm_ds.config.durations import parse_duration, parse_tokens, to_steps
from wm_ds.config.schema import PASSES, PLAIN_FAMILIES, Config, ConfigError, Model, Section
from wm_ds.config.stages import Plan, check_ranks, effective

MOST_PROFILED = 20  # steps


def contradictions(config: Config) -> list[str]:
    """Pairs of fields that cannot both be meant, one line each."""
    found = _of_one_stage(config) + _of_lengths(config) + _of_stages(config) + _of_beginning(config)
    if config.precision == "fp16":
        why = "gradients would carry a loss scale that clipping, norms and checkpoints here do not know"
        if config.optim.name == "muon":
            why = "optim.name = muon orthogonalises its updates, which have no loss scale"
        found.append(f"precision = fp16: {why}; use autocast or bf16")
    found += [
        f"data.skip: [{first}, {last}] is no span of steps; write [from_step, to_step], counted from 1"
        for first, last in config.data.skip
        if not 1 <= first <= last
    ]
    found += _of_rollbacks(config) + _of_profiles(config) + _of_tasks(config)
    if not all(0 <= b < 1 for b in config.optim.betas):
        found.append(f"optim.betas = {list(config.optim.betas)} must lie in [0, 1)")
    return found


def _of_one_stage(config: Config) -> list[str]:
    """Of what a stage may change."""
    found = _of_model(config) + _of_recomputation(config)
    if config.sequence_parallel > 1:
        found += _sequence_contradictions(config)
    return found


def _of_stages(config: Config) -> list[str]:
    """Of each stage by itself, and of what all but the last must say."""
    found: list[str] = []
    known = _of_one_stage(config)
    stages = config.stages or []
    for index, stage in enumerate(stages):
        name, is_last = f"stages.{index}", index + 1 == len(stages)
        if is_last and stage.until is not None:
            found.append(f"{name}.until = {stage.until!r}: the last stage ends with the run and has none")
        elif not is_last and stage.until is None:
            found.append(f"{name}.until is required: only the last stage ends with the run")
        elif stage.until is not None:
            parse_duration(f"{name}.until", stage.until)
        passes = {} if stage.passes is None else stage.passes.model_dump()
        said = [key for key in PASSES if passes[key] is not None] if passes else []
        if said and config.model.family in PLAIN_FAMILIES:
            found.append(
                f"{name}.passes.{said[0]} = {passes[said[0]]}: model.family = {config.model.family} has "
                "no passes"
            )
            continue
        of_it = _of_one_stage(effective(config, stage))
        found += [f"{name}: {problem}" for problem in of_it if problem not in known]
    return found


def _of_lengths(config: Config) -> list[str]:
    found = []
    if (config.steps is None) == (config.tokens is None):
        found.append(f"give either steps or tokens, got steps = {config.steps} and tokens = {config.tokens}")
    elif config.tokens is not None:
        parse_tokens("tokens", config.tokens)
    for name in ("warmup", "decay"):
        to_steps(f"optim.{name}", getattr(config.optim, name), 10**9, lambda tokens: tokens)
    c = config.checkpoint
    if c.keep_every is not None and (c.every is None or c.keep_every % c.every):
        found.append(f"checkpoint.keep_every = {c.keep_every} is no multiple of checkpoint.every = {c.every}")
    kept = c.mirror_keep_every
    if c.mirror is not None and kept is not None and (c.every is None or kept % c.every):
        found.append(f"checkpoint.mirror_keep_every = {kept} is no multiple of checkpoint.every = {c.every}")
    return found


def _of_beginning(config: Config) -> list[str]:
    try:
        branch = config.run.branch_point
    except ConfigError as error:
        return [str(error)]
    if branch is not None and config.checkpoint.resume is not None:
        return [
            f"run.branch_from = {config.run.branch_from} and checkpoint.resume = {config.checkpoint.resume} "
            "are two beginnings; leave one out"
        ]
    return []


def _of_rollbacks(config: Config) -> list[str]:
    spikes, guard, kept = config.guard.rollback, config.guard, config.checkpoint
    if spikes is None:
        return []
    if kept.every is None:
        return [f"guard.rollback = {spikes} has no checkpoint to go back to with checkpoint.every = null"]
    found = []
    within = -(-(spikes - 1) // kept.every)  # checkpoints that spikes in a row can lie between
    if kept.keep_last <= within:
        found.append(
            f"guard.rollback = {spikes}: the checkpoint from before so many spikes would be gone with "
            f"checkpoint.every = {kept.every} and checkpoint.keep_last = {kept.keep_last}; keep "
            f"{within + 1} or more"
        )
    if guard.skip_spikes and spikes >= guard.max_skipped:
        found.append(
            f"guard.rollback = {spikes} never comes: with guard.skip_spikes the run fails after "
            f"guard.max_skipped = {guard.max_skipped} spikes in a row"
        )
    return found


def _of_tasks(config: Config) -> list[str]:
    e, every = config.evaluate, config.checkpoint.every
    if not e.tasks:
        return []
    if e.tasks_every is None:
        return [f"evaluate.tasks = {e.tasks}: evaluate.tasks_every says at which steps; it is not set"]
    if every is None or e.tasks_every % every:
        return [
            f"evaluate.tasks_every = {e.tasks_every} is no multiple of checkpoint.every = {every}: tasks are "
            "scored on saved checkpoints"
        ]
    return []


def _of_profiles(config: Config) -> list[str]:
    p, found = config.profile, []
    if p.steps is not None:
        (first, last), said = p.steps, f"profile.steps = {list(p.steps)}"
        if not 1 <= first <= last:
            found.append(f"{said}: write [first, last], counted from 1")
        elif last - first >= MOST_PROFILED:
            found.append(f"{said}: a trace of {last - first + 1} steps is huge; {MOST_PROFILED} at most")
        if config.steps is not None and last > config.steps:
            found.append(f"{said}: the run has steps = {config.steps}")
    if min(p.ranks) < 0:
        found.append(f"profile.ranks = {p.ranks}: ranks are numbered from 0")
    return found


def _of_model(config: Config) -> list[str]:
    found, m = [], config.model
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
    elif (m.num_kv_channels or 0) > m.num_hidden_layers:
        found.append(
            f"model.num_kv_channels = {m.num_kv_channels} exceeds "
            f"model.num_hidden_layers = {m.num_hidden_layers}"
        )
    if m.family == "whitematter" and (m.router_stride or 1) > m.num_hidden_layers:
        found.append(
            f"model.router_stride = {m.router_stride} exceeds model.num_hidden_layers = {m.num_hidden_layers}"
        )
    return found


def _of_recomputation(config: Config) -> list[str]:
    found, m = [], config.model
    plain = m.family in PLAIN_FAMILIES
    if plain and config.recompute in ("group", "group+layer"):
        found.append(
            f"recompute = {config.recompute} needs groups of tokens, and model.family = {m.family} "
            "has none; use none or layer"
        )
    if config.entries_on_host and (plain or m.feedback is False):
        found.append(
            f"entries_on_host = true needs passes over a pool, and model.family = {m.family}"
            f"{' with feedback = false' if m.feedback is False else ''} has none; use entries_on_host = false"
        )
    if config.zero3.gather == "traversal" and not plain and "layer" not in config.recompute:
        found.append(
            f"zero3.gather = traversal with recompute = {config.recompute} keeps every layer gathered in "
            "backward; use recompute layer or group+layer, or zero3.gather step"
        )
    return found


def _sequence_contradictions(config: Config) -> list[str]:
    n, m = config.sequence_parallel, config.model
    if m.family != "whitematter":
        return [
            f"sequence_parallel = {n} divides the one pool of all layers among ranks, and model.family = "
            f"{m.family} has none; use family whitematter, or sequence_parallel 1"
        ]
    found = []
    if m.feedback is False:
        found.append(
            f"sequence_parallel = {n} divides the pool between steps of the schedule, and model.feedback = "
            "false has none; use sequence_parallel 1"
        )
    if m.schedule not in (None, "cyclic"):
        found.append(
            f"sequence_parallel = {n} needs steps that are spread over the whole row, and those of "
            f"model.schedule = {m.schedule} lie on few ranks; use cyclic"
        )
    if config.log.samples is not None:
        found.append(
            f"sequence_parallel = {n} divides rows among ranks, and log.samples needs whole ones: leave the "
            "samples out, or use sequence_parallel 1"
        )
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(m, name)
        if heads % n:
            choices = [i for i in range(1, heads + 1) if m.num_key_value_heads % i == 0]
            found.append(
                f"sequence_parallel = {n} does not divide model.{name} = {heads}, and attention is divided "
                f"by heads; use one of {', '.join(map(str, choices))}"
            )
    return found


# Keys that another one decides about: which, why nothing reads them, and the value that says what happens
# anyhow.
Idle = tuple[str, str, Any]


def without_effect(config: Config) -> list[str]:
    """Keys that the run sets to something else than their default and that nothing would read, one line each.

    For what a person has written; a run's own record has all keys. What is switched off by its own key
    (`optim.clip` 0, no `checkpoint.every`) may keep its settings, for when it is switched on again. In a run
    with stages, what some stage reads has an effect, and what a stage itself says must have one in it.
    """
    stages = [(stage, effective(config, stage)) for stage in config.stages or []]
    idle = [set(_without_effect(own)) for _, own in stages]
    found = [line for line in _without_effect(config) if all(line in lines for lines in idle)]
    for index, (stage, own) in enumerate(stages):
        said = {} if stage.passes is None else stage.passes.model_dump(exclude_none=True)
        for keys, reason, same in _idle_in_model(own.model):
            found += [
                f"stages.{index}.passes.{key} = {said[key]} has no effect {reason}: leave it out"
                for key in keys.split()
                if key in said and said[key] != same
            ]
    return found


def _without_effect(config: Config) -> list[str]:
    """Of the run's own sections."""
    found: list[str] = []
    sections: list[tuple[str, Section, list[Idle]]] = [
        ("optim", config.optim, _idle_in_optim(config)),
        ("model", config.model, _idle_in_model(config.model) + _idle_in_routing(config.model)),
    ]
    for name, section, idle in sections:
        for keys, reason, same in idle:
            for key in keys.split():
                value, default = getattr(section, key), type(section).model_fields[key].default
                if key in section.model_fields_set and value not in (default, None, same):
                    other = "null" if default is None else default
                    found.append(
                        f"{name}.{key} = {value} has no effect {reason}: leave it out, or set it to {other}"
                    )
    return found


def _idle_in_optim(config: Config) -> list[Idle]:
    o, found = config.optim, []
    if o.name != "muon":
        muon = "momentum update_scale ns_steps ns_dtype embedding_rule head_rule"
        found.append((muon, f"with optim.name = {o.name}", None))
    elif config.model.tie_word_embeddings:
        reason = "with model.tie_word_embeddings = true, where the head is the embedding"
        found.append(("head_rule", reason, None))
    if o.schedule != "wsd":
        found.append(("decay", f"with optim.schedule = {o.schedule}", None))
    if o.schedule == "constant":
        found.append(("floor", "with optim.schedule = constant", None))
    return found


def _idle_in_model(m: Model) -> list[Idle]:
    if m.family in PLAIN_FAMILIES:
        return []  # what they do not have is refused as another family's
    if m.feedback is False:
        reason = "with model.feedback = false, where one pass is exact"
        return [
            ("schedule chunk_size relaxation prefill_groups", reason, None),
            ("start_missing start_grad", reason, None),
            ("start prefill_start", reason, "embedding"),
            ("num_groups", reason, 8),
            ("no_grad_passes", reason, 0),
            ("grad_passes prefill_passes", reason, 1),
        ]
    found: list[Idle] = []
    if m.schedule not in ("chunked", "wavefront"):
        found.append(("chunk_size", f"with model.schedule = {m.schedule or 'cyclic'}", None))
    if m.schedule == "exact":
        passes = "num_groups no_grad_passes grad_passes relaxation prefill_passes prefill_groups"
        reason = "with model.schedule = exact, which has neither passes nor groups"
        found.append((passes, reason, None))
        found.append(("start prefill_start", reason, "embedding"))
    if "layerwise" not in (m.start, m.prefill_start):
        reason = f"with model.start = {m.start or 'embedding'}"
        found.append(("start_missing", reason, "newest"))
        found.append(("start_grad", reason, False))
    return found


def _idle_in_routing(m: Model) -> list[Idle]:
    found: list[Idle] = []
    if m.routing not in (None, "dynamic"):
        found.append(("router_stride", f"with model.routing = {m.routing}, which has no router", 2))
    if m.routing == "softmax":
        reason = "with model.routing = softmax, which starts from equal weights"
        found.append(("router_init", reason, "auto"))
    return found


_POOL, _PASSES = ("whitematter",), ("whitematter", "lckv")
_BELONGS = {
    "num_kv_channels": _POOL,
    "router_stride": _POOL,
    "router_init": _POOL,
    "routing": _POOL,
    "feedback": _POOL,
    "warmup_layers": ("lckv",),
    "layers_per_kv": ("cla",),
    "own_kv_layers": ("yoco", "fusedkv"),
    "schedule": _PASSES,
    "chunk_size": _PASSES,
    "relaxation": _PASSES,
    "attention": _PASSES,
    "num_groups": _PASSES,
    "no_grad_passes": _PASSES,
    "grad_passes": _PASSES,
    "start": _POOL,
    "start_missing": _POOL,
    "start_grad": _POOL,
    "prefill_start": _POOL,
    "prefill_passes": _PASSES,
    "prefill_groups": _PASSES,
}


def check_stages(plan: Plan, vocab_size: int, num_groups: Callable[[Model], int]) -> None:
    """Raise ConfigError, naming the stage, where one does not fit the data's vocabulary or row length.

    `num_groups`: of a model, its family's default where the run sets none.
    """
    for stage in plan.stages:
        for length in {stage.seq_len, plan.packed}:  # of the rows that it trains on, and of held-out ones
            try:
                check_against_data(
                    stage.config,
                    vocab_size=vocab_size,
                    seq_len=length,
                    num_groups=num_groups(stage.config.model),
                )
            except ConfigError as error:
                raise ConfigError(f"{stage.name}: {error}" if plan.staged else str(error)) from None


def check_against_data(
    config: Config, *, vocab_size: int, seq_len: int, sequences: int = 1, num_groups: int
) -> None:
    """Raise ConfigError where the run does not fit its packed data (sizes from the manifest).

    `num_groups`: the model's token groups, its default where the run sets none.
    """
    rows = config.model.vocab_size
    if rows is not None and rows < vocab_size:
        raise ConfigError(
            f"model.vocab_size = {rows} is smaller than the data's tokenizer ({vocab_size} tokens); "
            f"set it to {vocab_size} or more, or leave it out"
        )
    n = config.sequence_parallel
    if n > 1 and seq_len % (n * num_groups):
        raise ConfigError(
            f"sequence_parallel = {n} x model.num_groups = {num_groups} does not divide the data's rows of "
            f"{seq_len} tokens: a group's tokens must be spread evenly over the ranks"
        )
    if sequences < 1:
        raise ConfigError("the training split has no sequences")


# DeepSpeed's JSON (what it may hold: deepspeed_json.py)


def check_against_deepspeed(config: Config, json: dict[str, Any]) -> None:
    """What the run and DeepSpeed's checked JSON contradict each other in. Raises ConfigError."""
    stage = json.get("zero_optimization", {}).get("stage", 0)
    if config.zero3.gather is not None and stage != 3:
        raise ConfigError(
            f"zero3.gather = {config.zero3.gather} has no effect at stage {stage} of {config.deepspeed}: set "
            "zero3.gather=null, or a file of stage 3"
        )
    if config.compile and stage == 3:
        raise ConfigError(
            f"compile = true does not go with stage 3 of {config.deepspeed}: its hooks gather parameters in "
            "the midst of compiled blocks; use compile = false, or stage 2"
        )


def check_against_launch(config: Config, json: dict[str, Any], ranks: int) -> None:
    """What the run and DeepSpeed's checked JSON contradict the number of ranks in. Raises ConfigError."""
    check_ranks(config, ranks)
    if config.profile.steps is not None and max(config.profile.ranks) >= ranks:
        raise ConfigError(
            f"profile.ranks = {config.profile.ranks}: the launch has {ranks} rank{'s' * (ranks != 1)}, "
            "numbered from 0"
        )
    node = json.get("zero_optimization", {}).get("zero_hpz_partition_size", "auto")
    if node != "auto" and ranks % node:
        raise ConfigError(
            f"{config.deepspeed}: zero_optimization.zero_hpz_partition_size = {node} does not divide the "
            f'{ranks} ranks; give the number of ranks of a node, or "auto"'
        )
