"""No public function of the model takes an argument that it then ignores.

Every argument of every public function has an entry here that shows its effect, or that it is refused; an
argument without an entry fails the test, so a new one comes with its proof.
"""

import inspect
from collections.abc import Callable

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedConfig

from tests.model import test_lckv, test_sharing
from tests.support.tiny import VOCABULARY, build, tokens
from wm_ds.model import (
    LAYERWISE,
    CLAConfig,
    CLAForCausalLM,
    CLAModel,
    Converged,
    FusedKVConfig,
    LCKVConfig,
    LCKVForCausalLM,
    LCKVModel,
    Schedule,
    WhiteMatterConfig,
    WhiteMatterForCausalLM,
    WhiteMatterModel,
    YOCOConfig,
)

ROW = tokens(2, 7)
MASK = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])
FORWARD = {
    "input_ids": {"input_ids": tokens(2, 7, seed=1)},
    "inputs_embeds": {"input_ids": None, "inputs_embeds": torch.ones(2, 7, 24, dtype=torch.float64)},
    "attention_mask": {"attention_mask": MASK},
    "position_ids": {"position_ids": torch.arange(7)[None] * 2},
    "past_key_values": {"past_key_values": "filled"},
    "cache": {"cache": "filled"},
    "use_cache": {"use_cache": False},
    "document_ids": {"document_ids": torch.tensor([[0, 0, 0, 1, 1, 1, 1]] * 2)},
    "schedule": {"schedule": Schedule.jacobi(1)},
    "output_hidden_states": {"output_hidden_states": True},
    "output_attentions": {"output_attentions": True},
    "return_dict": {"return_dict": False},
    "kwargs": {"labls": ROW},
}
HEAD = FORWARD | {
    "labels": {"labels": ROW},
    "logits_to_keep": {"logits_to_keep": 2},
    "prefill": {"prefill": "exact"},
    "prefill_passes": {"prefill_passes": 1},
    "prefill_groups": {"prefill_groups": 1},
    "prefill_tolerance": {"prefill": "converged", "prefill_tolerance": 10.0},
    "prefill_start": {"prefill_start": "layerwise", "prefill_passes": 1},
    # Beside labels; alone there is nothing to divide.
    "num_items_in_batch": {"labels": ROW, "num_items_in_batch": 3},
}


def parameters_of(function: Callable) -> set[str]:
    return set(inspect.signature(function).parameters) - {"self"}


def flat(output: object) -> list:
    """Everything that a forward returns, in an order that makes two of them comparable."""
    values = [type(output).__name__, *output.keys()] if hasattr(output, "keys") else [type(output).__name__]
    for value in output.values() if hasattr(output, "values") else output:
        if isinstance(value, DynamicCache):
            values += [layer.keys for layer in value.layers]
        else:
            values += list(value) if isinstance(value, tuple) else [value]
    return values


def equal(one: list, other: list) -> bool:
    def same(a: object, b: object) -> bool:
        return torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a is b

    return len(one) == len(other) and all(
        same(a, b) or (type(a) is str and a == b) for a, b in zip(one, other)
    )


@pytest.mark.parametrize("kind", ["model", "head"])
def test_every_argument_of_a_forward_has_an_effect_or_is_refused(kind: str) -> None:
    lm = build().eval()
    model, table = (lm, HEAD) if kind == "head" else (lm.model, FORWARD)
    heads = (WhiteMatterForCausalLM, LCKVForCausalLM, CLAForCausalLM)
    for cls in heads if kind == "head" else (WhiteMatterModel, LCKVModel, CLAModel):
        assert parameters_of(cls.forward) == set(table), "an argument without a proof of its effect"
    with torch.no_grad():
        plain = flat(model(input_ids=ROW))
        filled = lm(tokens(2, 3)).get("cache") or lm(tokens(2, 3)).get("past_key_values")
        for name, given in table.items():
            given = {
                key: filled if isinstance(value, str) and value == "filled" else value
                for key, value in given.items()
            }
            arguments = {"input_ids": ROW} | given
            before = plain
            if len(given) > 1 and name not in ("inputs_embeds",):  # what it needs beside it
                before = flat(model(**{key: value for key, value in arguments.items() if key != name}))
            try:
                after = flat(model(**arguments))
            except (TypeError, ValueError) as error:
                refusal = str(error)
            else:
                refusal = ""
            if refusal:
                assert name in refusal or name == "kwargs"
                continue
            assert not equal(before, after), f"{name} changes nothing"


ONE_PASS = {"no_grad_passes": 0, "grad_passes": 1}  # more of them forget where they started
CONFIG: dict[str, dict] = {
    "vocab_size": {"vocab_size": 50},
    "hidden_size": {"hidden_size": 32},
    "intermediate_size": {"intermediate_size": 16},
    "num_hidden_layers": {"num_hidden_layers": 5},
    "num_attention_heads": {"num_attention_heads": 2},
    "num_key_value_heads": {"num_key_value_heads": 4},
    "head_dim": {"head_dim": 4},
    "rms_norm_eps": {"rms_norm_eps": 0.1},
    "rope_theta": {"rope_theta": 10.0},
    "scaled_rope": {"scaled_rope": {"rope_type": "linear", "factor": 4.0}},
    "qk_norm": {"qk_norm": False},
    "qkv_bias": {"qkv_bias": True},
    "initializer_range": {"initializer_range": 0.5},
    "tie_word_embeddings": {"tie_word_embeddings": True},
    "num_kv_channels": {"num_kv_channels": 2},
    "router_stride": {"router_stride": 1},
    "router_init": {"router_init": "top"},
    "routing": {"routing": "static"},
    "feedback": {"feedback": False, "num_kv_channels": 4},
    "schedule": {"schedule": "exact"},
    "num_groups": {"num_groups": 1},
    "no_grad_passes": {"no_grad_passes": 0},
    "grad_passes": {"grad_passes": 1},
    "chunk_size": {"schedule": "chunked", "num_groups": 2, "chunk_size": 3},
    "relaxation": {"relaxation": 0.5},
    "start": {"start": "layerwise"} | ONE_PASS,
    "start_missing": {"start": "layerwise", "start_missing": "embedding"} | ONE_PASS,
    "start_grad": {"start": "layerwise", "start_grad": True} | ONE_PASS,
    "prefill": {"prefill": "exact"},
    "prefill_passes": {"prefill_passes": 1},
    "prefill_groups": {"prefill_groups": 1},
    "prefill_tolerance": {"prefill": "converged", "prefill_tolerance": 10.0},
    "prefill_start": {"prefill_start": "layerwise", "prefill_passes": 1},
    "tokenizer_size": {"tokenizer_size": 3},
    "attention": {"attention": "flex"},
    "use_cache": {"use_cache": False},
    "bos_token_id": {"bos_token_id": 9},
    "eos_token_id": {"eos_token_id": list(range(VOCABULARY))},
    "pad_token_id": {"pad_token_id": 9},
}
# What a configuration tells others: how long rows were in training.
TOLD = {"max_position_embeddings"}
BASE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_kv_channels": 3,
    "num_groups": 3,
    "no_grad_passes": 1,
    "grad_passes": 2,
    "pad_token_id": 0,
}


def traces(config: WhiteMatterConfig, monkeypatch) -> list:
    """What a model of the configuration is and does: parameters, logits, a loss and its gradient, text,
    kernels."""
    from wm_ds.model import attention as attention_module

    kernels = []
    monkeypatch.setattr(attention_module, "attend_in_blocks", lambda q, *_: kernels.append("flex") or q)
    torch.manual_seed(0)
    lm = WhiteMatterForCausalLM(config).double()
    values: list = [f"{name} {weight.shape}" for name, weight in lm.named_parameters()]
    values += [weight.detach().clone() for weight in lm.parameters()]
    with torch.no_grad():  # the initial pool reads one state alone; mix, so that every setting shows
        for name, weight in lm.named_parameters():
            if "norm" not in name:
                weight += 0.3 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(name)))
        row = tokens(2, 7)
        values += flat(lm.eval()(row)) + flat(lm.train()(row, labels=row))
        if config.attention != "flex":  # whose kernel is replaced above
            with torch.enable_grad():
                lm(row, labels=row).loss.backward()
            values.append(lm.model.layers[0].mlp.up_proj.weight.grad)
        lm.eval()
        try:
            values.append(lm.generate(row[:1], max_new_tokens=12, do_sample=False))
            values.append(lm.generate(max_new_tokens=3, do_sample=False, eos_token_id=None))
        except ValueError as error:
            values.append(str(error))
    return [*values, *kernels, f"pad {lm.generation_config.pad_token_id}"]


def test_every_field_of_a_configuration_has_an_effect(monkeypatch) -> None:
    fields = parameters_of(WhiteMatterConfig.__init__) - {"kwargs"}
    assert fields - TOLD == set(CONFIG), "a field without a proof of its effect"
    assert parameters_of(LCKVConfig.__init__) - fields == {"warmup_layers", "kwargs"}
    # Their effect: test_sharing.py, where each is a model of its own.
    assert parameters_of(CLAConfig.__init__) - fields == {"layers_per_kv", "kwargs"}
    assert parameters_of(YOCOConfig.__init__) - fields == {"own_kv_layers", "kwargs"}
    assert parameters_of(FusedKVConfig.__init__) - fields == {"own_kv_layers", "kwargs"}
    plain = traces(WhiteMatterConfig(**BASE), monkeypatch)
    for name, given in CONFIG.items():
        fields = BASE | given
        before = plain
        if len(given) > 1:
            rest = {key: value for key, value in fields.items() if key != name}
            if name == "chunk_size":
                rest |= {"chunk_size": 5}
            before = traces(WhiteMatterConfig(**rest), monkeypatch)
        assert not equal(before, traces(WhiteMatterConfig(**fields), monkeypatch)), f"{name} changes nothing"


@pytest.mark.parametrize(
    ("field", "hint"),
    [
        ({"num_gropus": 2}, "did you mean 'num_groups'"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "has no 'rope_scaling'"),
        ({"rope_parameters": {}}, "has no 'rope_parameters'"),
        ({"hidden_act": "gelu"}, "has no 'hidden_act'"),
        ({"attention_bias": True}, "has no 'attention_bias'"),
        ({"sliding_window": 128}, "has no 'sliding_window'"),
        ({"temperature": 0.3}, "has no 'temperature'"),
        ({"is_encoder_decoder": True}, "has no 'is_encoder_decoder'"),
    ],
)
@pytest.mark.parametrize("cls", [WhiteMatterConfig, LCKVConfig, CLAConfig])
def test_fields_that_nothing_reads_are_refused(cls, field: dict, hint: str, tmp_path) -> None:
    with pytest.raises(TypeError, match=hint):
        cls(**field)
    with pytest.raises(TypeError, match=hint):
        cls.from_dict(cls().to_dict() | field)


def test_transformers_own_fields_pass_and_come_back(tmp_path) -> None:
    config = WhiteMatterConfig(torch_dtype="bfloat16", num_labels=3, architectures=["X"], _private=1)
    assert config.dtype == torch.bfloat16
    assert isinstance(config, PreTrainedConfig)
    config.save_pretrained(tmp_path)
    again = WhiteMatterConfig.from_pretrained(tmp_path)
    assert again.to_dict() == WhiteMatterConfig.from_dict(config.to_dict()).to_dict()
    assert (again.dtype, again.num_labels) == (torch.bfloat16, 3)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_kv_channels", 3),
        ("routing", "static"),
        ("router_init", "cyclic"),
        ("router_stride", 1),
        ("feedback", False),
    ],
)
def test_the_sandwich_has_no_pool_to_configure(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{name} is .* no choice there"):
        LCKVConfig(**{name: value})


def test_fields_given_while_loading_are_checked_and_followed(tmp_path) -> None:
    """prefill_groups stays what num_groups is, unless the file says otherwise."""
    build(num_groups=4, prefill_groups=None, prefill_passes=None).config.save_pretrained(tmp_path)
    load = WhiteMatterConfig.from_pretrained
    assert load(tmp_path).prefill_schedule() == Schedule.cyclic(4, 3)
    assert load(tmp_path, num_groups=2).prefill_schedule() == Schedule.cyclic(2, 3)
    assert load(tmp_path, grad_passes=4).prefill_schedule() == Schedule.cyclic(4, 5)
    assert load(tmp_path, num_groups=2, prefill_groups=4).prefill_schedule() == Schedule.cyclic(4, 3)
    config = load(tmp_path)
    config.num_groups = 8
    assert config.prefill_schedule() == Schedule.cyclic(8, 3)
    with pytest.raises(ValueError, match="num_groups is 0"):
        load(tmp_path, num_groups=0)
    _, unused = load(tmp_path, num_gropus=2, num_groups=2, return_unused_kwargs=True)
    assert unused == {"num_gropus": 2}


@pytest.mark.parametrize(
    ("prefill", "extra", "takes"),
    [
        ("exact", {"passes": 3}, "no further setting"),
        ("exact", {"groups": 3}, "no further setting"),
        ("trained", {"tolerance": 0.1}, "prefill_groups and prefill_passes"),
        ("cyclic", {"tolerance": 0.1}, "prefill_groups and prefill_passes"),
        ("converged", {"passes": 3}, "prefill_groups and prefill_tolerance"),
    ],
)
def test_prefill_settings_without_effect_are_refused(prefill: str, extra: dict, takes: str) -> None:
    lm = build().eval()
    with pytest.raises(ValueError, match=f"has no effect on prefill .*, which takes {takes}"):
        lm.config.prefill_schedule(prefill, **extra)
    with pytest.raises(ValueError, match="has no effect"):
        lm.generate(
            ROW,
            max_new_tokens=2,
            prefill=prefill,
            **{f"prefill_{name}": value for name, value in extra.items()},
        )
    assert lm.config.prefill_schedule("converged", groups=2, tolerance=0.5) == Converged(2, 0.5)


def every_family() -> list:
    """A tiny model of each kind of forward."""
    others = [test_sharing.build(name) for name in ("cla2", "yoco", "fusedkv")]
    return [build(), build(k=4, feedback=False), test_lckv.build(), *others]


SCHEDULE: dict[str, tuple[Schedule, Schedule]] = {
    "kind": (Schedule.chunked(4, 2, 2), Schedule.wavefront(4, 2, 2)),
    "groups": (Schedule.cyclic(2, 2), Schedule.cyclic(3, 2)),
    "passes": (Schedule.cyclic(2, 1), Schedule.cyclic(2, 2)),
    "no_grad": (Schedule.cyclic(2, 2), Schedule.cyclic(2, 2, no_grad=1)),
    "chunk": (Schedule.chunked(4, 2, 2), Schedule.chunked(3, 2, 2)),
    "relaxation": (Schedule.cyclic(2, 2), Schedule.cyclic(2, 2, relaxation=0.5)),
    "start": (Schedule.cyclic(2, 2), Schedule.cyclic(2, 2, start=LAYERWISE)),
}
CONVERGED: dict[str, tuple[Converged, Converged]] = {
    "groups": (Converged(2, 0.3), Converged(3, 0.3)),
    "tolerance": (Converged(2, 0.3), Converged(2, 3.0)),
    "relaxation": (Converged(2, 0.3), Converged(2, 0.3, 0.5)),
    "start": (Converged(2, 0.3), Converged(2, 0.3, start=LAYERWISE)),
}


def test_every_field_of_a_schedule_has_an_effect() -> None:
    assert parameters_of(Schedule.__init__) == set(SCHEDULE), "a field without a proof of its effect"
    assert parameters_of(Converged.__init__) == set(CONVERGED), "a field without a proof of its effect"
    lm = build().eval()
    for name, (one, other) in [*SCHEDULE.items(), *CONVERGED.items()]:
        found = []
        for schedule in (one, other) if name != "no_grad" else ():
            with torch.no_grad():
                found.append(lm(ROW, schedule=schedule).logits)
        for schedule in (one, other) if name == "no_grad" else ():
            lm.zero_grad()
            lm(ROW, labels=ROW, schedule=schedule).loss.backward()
            found.append(lm.model.pool.key.proj.grad.clone())
        assert not torch.equal(*found), f"{name} changes nothing"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (("cyclic", 2, 2, 0, 4), "schedule 'cyclic' has no chunks"),
        (("exact", 1, 1, 0, 4), "schedule 'exact' has no chunks"),
        (("exact", 4, 1), "it takes no groups, passes or relaxation"),
        (("exact", 1, 3), "it takes no groups, passes or relaxation"),
        (("exact", 1, 3, 1), "it takes no groups, passes or relaxation"),
        (("exact", 1, 1, 0, 0, 0.5), "it takes no groups, passes or relaxation"),
    ],
)
def test_what_a_kind_of_schedule_would_not_read_is_refused(fields: tuple, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Schedule(*fields)


def test_a_chunk_size_is_for_the_schedules_that_have_chunks() -> None:
    """It may be there for the prefill alone; a cyclic training schedule then goes over the whole row."""
    config = WhiteMatterConfig(**BASE, chunk_size=4, prefill="chunked")
    assert config.training_schedule() == Schedule.cyclic(3, 3, no_grad=1)
    assert config.prefill_schedule() == Schedule.chunked(4, 3, 3)


@pytest.mark.parametrize(
    "name",
    [
        *("cache_position", "head_mask", "token_type_ids", "encoder_hidden_states", "num_logits_to_keep"),
        *("decoder_input_ids", "output_router_logits", "mask", "padding_mask", "max_length"),
    ],
)
def test_arguments_of_other_models_are_refused_by_name(name: str) -> None:
    for lm in every_family():
        for model in (lm, lm.model):
            with pytest.raises(TypeError, match=f"forward has no '{name}'"):
                model(ROW, **{name: torch.zeros(2, 7, dtype=torch.long)})


@pytest.mark.parametrize("mask", ["four dimensions", "additive", "too short"])
def test_masks_of_another_kind_are_refused(mask: str) -> None:
    """Not read as if they were a mask of padding."""
    given = {
        "four dimensions": torch.ones(2, 1, 7, 7),
        "additive": torch.tensor([[0.0] * 6 + [-torch.inf], [0.0] * 7]),
        "too short": torch.ones(2, 6),
    }[mask]
    for lm in every_family():
        with pytest.raises(ValueError, match="attention_mask has"):
            lm(ROW, attention_mask=given)


def test_generate_refuses_what_nothing_would_read() -> None:
    lm = build().eval()
    for given in ({"labls": ROW}, {"prefil": "exact"}, {"head_mask": ROW}, {"max_new_tokns": 3}):
        with pytest.raises((ValueError, TypeError), match=next(iter(given))):
            lm.generate(ROW, max_new_tokens=2, **given)
    for kind in ("static", "offloaded", "quantized", "sliding_window"):
        with pytest.raises(ValueError, match="cache_implementation"):
            lm.generate(ROW, max_new_tokens=2, cache_implementation=kind)
    with pytest.raises(ValueError, match="output_attentions=True is not supported"):
        lm.generate(ROW, max_new_tokens=2, output_attentions=True, return_dict_in_generate=True)


def test_generation_returns_the_hidden_states_that_are_asked_for() -> None:
    lm = build().eval()
    out = lm.generate(
        ROW, max_new_tokens=3, do_sample=False, eos_token_id=None, output_hidden_states=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    assert [len(states) for states in out.hidden_states] == [5, 5, 5]
    assert [states[-1].shape[1] for states in out.hidden_states] == [7, 1, 1]


def test_public_names_are_all_proved_here() -> None:
    """A new one comes with its own table."""
    import wm_ds.model

    proved = {"Schedule", "Start", "EMBEDDING", "LAYERWISE", "Converged", "WhiteMatterCache", "Part", "Step"}
    for family in ("WhiteMatter", "LCKV", "CLA", "YOCO", "FusedKV"):
        proved |= {f"{family}Config", f"{family}Model", f"{family}ForCausalLM"}
    assert set(wm_ds.model.__all__) == proved
    assert parameters_of(wm_ds.model.WhiteMatterCache.__init__) == set()


@pytest.mark.parametrize("implementation", ["eager", "flex_attention", "flash_attention_2"])
def test_attention_is_not_chosen_by_transformers_switch(implementation: str, tmp_path) -> None:
    lm = build(dtype=torch.float32)
    lm.save_pretrained(tmp_path)
    loads = {
        "class": lambda: WhiteMatterForCausalLM.from_pretrained(tmp_path, attn_implementation=implementation),
        "auto": lambda: AutoModelForCausalLM.from_pretrained(
            tmp_path, trust_remote_code=True, attn_implementation=implementation
        ),
        "later": lambda: lm.set_attn_implementation(implementation),
    }
    for load in loads.values():
        with pytest.raises(ValueError, match=f"attn_implementation='{implementation}' is not supported"):
            load()
    assert (
        WhiteMatterForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa").config.attention
        == "auto"
    )
