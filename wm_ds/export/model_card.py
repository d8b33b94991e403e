"""The README.md of an exported model, written from the facts of its run."""

from typing import Any

import torch

from wm_ds.families import cache_bytes, cached_kvs, family_of, has_passes

WHAT = (
    "Every layer attends to {channels} mixed from the states of *all* {layers} layers of past tokens. "
    "That makes the forward pass a fixed-point problem, solved by a few cyclic passes over strided groups "
    "of tokens."
)
WITHOUT_FEEDBACK = (
    "Every layer attends to a KV channel mixed from the states of all layers *below* it (the ablation "
    "without feedback): one pass is exact."
)
LCKV = (
    "An LCKV sandwich: {warmup} of its {layers} layers have KV of their own, and all between share the KV of "
    "the topmost of them, which past tokens have and the token itself does not have yet."
)
CLA = "Cross-layer attention: every {share} consecutive layers share the KV of the lowest of them."
YOCO = (
    "YOCO's sharing: {own} of the {layers} layers have KV of their own, and all above share one KV, which is "
    "made from the state that leaves these."
)
FUSEDKV = (
    "FusedKV: {own} of the {layers} layers have KV of their own, and each of those above reads a learned "
    "mixture of the first and the last of them."
)
CODE = (
    "The model's code is in this folder; `trust_remote_code=True` allows transformers to run it. The "
    "tokenizer needs no code: where `AutoTokenizer` asks whether to run the model's, answer no, or give "
    "`trust_remote_code=False`."
)
HOW = (
    "A prompt is read with {passes} passes over {groups}{start} (`prefill`, `prefill_passes`, "
    "`prefill_groups` and `prefill_start` in `config.json`; more passes come closer to exact evaluation), "
    "and every generated token is evaluated exactly."
)
CACHE = (
    "The cache holds {k} KV channels, {k}/{layers} of what a model of this depth usually keeps: {size:,} "
    "bytes a token in {dtype}."
)
SHAPE = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "tie_word_embeddings",
)


def render(facts: dict[str, Any], config: Any) -> str:
    """Markdown with YAML front matter. `facts` as Trained.facts() gives them, plus "dtype"."""
    run, batch, optim = (facts["config"][key] for key in ("run", "batch", "optim"))
    iterates = has_passes(config)
    remote = ", trust_remote_code=True" if family_of(config).own_code else ""
    lines = [
        "---",
        "library_name: transformers",
        "pipeline_tag: text-generation",
        "tags:",
        f"- {config.model_type}",
        "---",
        "",
        f"# {facts['run']}",
        "",
    ]
    lines += [_kind(config), ""]
    lines += [
        "## Use",
        "",
        "```python",
        "from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast",
        "",
        f'model = AutoModelForCausalLM.from_pretrained("PATH"{remote})',
        'tokenizer = PreTrainedTokenizerFast.from_pretrained("PATH")',
        'inputs = tokenizer("Once upon a time", return_tensors="pt")',
        "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=40)[0]))",
        "```",
        "",
    ]
    if remote:
        how = [CODE]
        if iterates:
            usual = config.prefill_schedule("cyclic")
            how += [HOW.format(passes=usual.passes, groups=_groups(usual.groups), start=_start(usual))]
        size = cache_bytes(config, getattr(torch, facts["dtype"]))
        sizes = {"k": cached_kvs(config), "layers": config.num_hidden_layers}
        how += [CACHE.format(**sizes, size=size, dtype=facts["dtype"])]
        lines += [" ".join(how), ""]
    lines += ["## Model", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in _shape(config).items()]
    lines += [f"| weights | {facts['dtype']}, rounded once from fp32 masters |", ""]
    data = facts["data"]
    lines += ["## Training", "", "| | |", "|---|---|"]
    trained = {
        "steps": facts["step"],
        "weights averaged over": _averaged(facts.get("averaged")),
        "tokens": None if facts["tokens"] is None else f"{facts['tokens']:,}",
        "batch": f"{batch['global_batch']} sequences of {data['seq_len']} tokens",
        "stages before": _stages(facts.get("stages", [])[:-1]),
        "data": _data(data),
        "optimizer": f"{optim['name']}, peak learning rate {optim['lr']:g}, {optim['schedule']} schedule",
        "precision": facts["config"]["precision"],
        "ranks": f"{facts['world_size']}, ZeRO stage {facts['zero_stage']}",
        "seed": run["seed"],
        "last training loss": _loss(facts["train_loss"]),
        "held-out loss": _loss(facts["holdout_loss"]),
    }
    if iterates:
        trained["schedule"] = _schedule(config)
    lines += [f"| {name} | {value} |" for name, value in trained.items() if value is not None]
    if iterates:
        lines += ["", "Losses are in nats per token; the held-out loss is at the training schedule's passes."]
    return "\n".join(lines) + "\n"


def _kind(config: Any) -> str:
    if not family_of(config).own_code:
        return "A Qwen3 language model (transformers' own architecture)."
    layers = config.num_hidden_layers
    if config.model_type == "lckv":
        return LCKV.format(warmup=config.warmup_layers, layers=layers)
    if config.model_type == "cla":
        return CLA.format(share=config.layers_per_kv)
    if config.model_type in ("yoco", "fusedkv"):
        words = YOCO if config.model_type == "yoco" else FUSEDKV
        return words.format(own=config.own_kv_layers, layers=layers)
    if not config.feedback:
        return f"A WhiteMatter language model. {WITHOUT_FEEDBACK}"
    k = config.num_kv_channels
    channels = "one KV channel that is" if k == 1 else f"{k} KV channels that are"
    return f"A WhiteMatter language model. {WHAT.format(channels=channels, layers=layers)}"


def _groups(count: int) -> str:
    return f"{count} groups" if count > 1 else "all tokens at once"


def _schedule(config: Any) -> str:
    """The passes of a training step in words."""
    if config.schedule == "exact":
        return "exact, one token after another"
    chunks = f" in chunks of {config.chunk_size}" if config.schedule in ("chunked", "wavefront") else ""
    return (
        f"{config.schedule}{chunks}, {_groups(config.num_groups)}, {config.no_grad_passes} passes without "
        f"gradient and {config.grad_passes} with{_start(config.training_schedule())}"
    )


def _start(schedule: Any) -> str:
    return ", from a layerwise start" if schedule.start.sweeps else ""


def _shape(config: Any) -> dict[str, Any]:
    names = [*SHAPE]
    if family_of(config).has_pool:
        names += ["num_kv_channels", "router_stride", "router_init"]
    return {name: getattr(config, name) for name in names}


def _stages(before: list[dict[str, Any]]) -> str | None:
    """What the run did before its last stage, which the other lines are of."""
    if not before:
        return None
    return "; ".join(
        f"steps {stage['first']} to {stage['last']}: {stage['global_batch']} sequences of {stage['seq_len']}"
        for stage in before
    )


def _data(data: dict[str, Any]) -> str | None:
    if data.get("tokens") is None:
        return None
    return f"{data['tokens']:,} tokens in {data['documents']:,} documents, starts aligned to {data['align']}"


def _averaged(how: dict[str, Any] | None) -> str | None:
    if how is None:
        return None
    return f"the checkpoints of steps {', '.join(map(str, how['steps']))} ({how['rule']} weights)"


def _loss(value: float | None) -> str | None:
    return None if value is None else f"{value:.4f}"
