"""WhiteMatter as a transformers model: embeddings, the passes, language-model head, generation.

This package is self-contained (torch and transformers only): it is what training trains, and its files travel
with every exported checkpoint.

Shapes: B rows, T tokens, W workspace columns, D width, V vocabulary, k channels, G KV heads, d head width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from .arguments import refuse_unknown
from .attention import compute_dtype
from .blocks import RMSNorm, WhiteMatterDecoderLayer, rotary_table
from .cache import CACHE_FIELD, WhiteMatterCache, append, cached_pool, cached_tokens
from .configuration import WhiteMatterConfig
from .converge import run_until_converged
from .decode import decode
from .feedforward import run_feedforward
from .gain import loop_gain
from .generation import PoolGenerationMixin
from .layout import Layout, lay_out
from .passes import run_passes
from .pool import Pool, PoolBranch, initial_router_bias
from .schedule import Converged, Schedule, is_converged, is_fixed
from .shard import ALL, Shard
from .stack import PassOptions, PassResult, Stack, Workspace


class WhiteMatterPreTrainedModel(PreTrainedModel):
    """Weight initialisation and the facts that transformers wants to know about a model."""

    config_class: type[WhiteMatterConfig] = WhiteMatterConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    # Layers read what others made: they stay together on one device.
    _no_split_modules = ("WhiteMatterModel", "LCKVModel", "CLAModel", "YOCOModel", "FusedKVModel")
    _supports_sdpa = True

    def _check_and_adjust_attn_implementation(
        self, attn_implementation: str | None, *args: Any, **kwargs: Any
    ) -> str:
        if attn_implementation not in (None, "sdpa"):
            raise ValueError(
                f"attn_implementation={attn_implementation!r} is not supported: a step of the passes chooses "
                "among the kernels of this model. Leave it unset, and choose by the configuration's field "
                "attention ('auto', 'sdpa' or 'flex')"
            )
        return super()._check_and_adjust_attn_implementation(attn_implementation, *args, **kwargs)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        std = self.config.initializer_range
        for bias in (getattr(module, name, None) for name in ("bias", "proj_bias")):
            _zero(bias)
        if isinstance(module, nn.Linear | nn.Embedding):
            init.normal_(module.weight, mean=0.0, std=std)
        elif isinstance(module, RMSNorm):
            init.ones_(module.weight)
        elif isinstance(module, PoolBranch):
            init.ones_(module.source_norm)
            init.ones_(module.channel_norm)
            if module.router_weight is not None:
                init.zeros_(module.router_weight)
            if self.config.routing == "softmax":
                init.zeros_(module.router_bias)
            elif module.router_bias is not None:
                init.copy_(module.router_bias, initial_router_bias(self.config))
            init.normal_(module.proj, mean=0.0, std=std)
            if module.head_norm is not None:
                init.ones_(module.head_norm)
        elif isinstance(module, WhiteMatterModel) and module.dummy_key is not None:
            init.normal_(module.dummy_key, mean=0.0, std=std)
            init.normal_(module.dummy_value, mean=0.0, std=std)


def _zero(bias: Tensor | None) -> None:
    if bias is not None:
        init.zeros_(bias)


@dataclass(frozen=True)
class Inputs:
    """What a forward is given, as WhiteMatterModel.forward describes it."""

    input_ids: Tensor | None
    inputs_embeds: Tensor | None
    attention_mask: Tensor | None
    position_ids: Tensor | None
    document_ids: Tensor | None

    @property
    def shape(self) -> tuple[int, int]:
        """B, T. Raises ValueError where there is not exactly one of ids and embeddings."""
        if self.inputs_embeds is not None and self.input_ids is None:
            return self.inputs_embeds.shape[0], self.inputs_embeds.shape[1]
        if self.input_ids is not None and self.inputs_embeds is None:
            return self.input_ids.shape[0], self.input_ids.shape[1]
        raise ValueError("give exactly one of input_ids and inputs_embeds")


class WhiteMatterModel(WhiteMatterPreTrainedModel):
    """Embeddings, L blocks that share one pool of k KV channels, and the final norm.

    Attributes:
        recompute: what backward recomputes instead of keeping, see `stack.PassOptions`. A run-time choice,
            not part of the configuration; every choice gives the same gradients.
        entries_on_host: likewise, where the overwritten pool entries wait for backward.
        measure_residuals: keep each forward's per-pass residuals in `residuals` (how far a pass moved the
            pool, relative).
        measure_gain: keep each forward's `gain` (gain.py) at the pool that its passes leave; without gradient
            and with a fixed number of passes only.
        shard: this rank's part of the rows under sequence parallelism (shard.py); set by the trainer. Inputs
            are whole rows on every rank, and `last_hidden_state` has the rank's positions only.
    """

    def __init__(self, config: WhiteMatterConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self._build(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.recompute = "none"
        self.entries_on_host = False
        self.measure_residuals = False
        self.residuals: Tensor | None = None
        self.measure_gain = False
        self.gain: Tensor | None = None
        self.shard: Shard = ALL
        self.gradient_checkpointing = False
        self.post_init()

    def _build(self, config: WhiteMatterConfig) -> None:
        """The parts between the embedding and the final norm."""
        self.layers = nn.ModuleList(WhiteMatterDecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.pool = Pool(config)
        shape = (config.num_kv_channels, config.num_key_value_heads, config.head_dim)
        self.dummy_key = nn.Parameter(torch.zeros(shape)) if config.feedback else None
        self.dummy_value = nn.Parameter(torch.zeros(shape)) if config.feedback else None

    def forward(  # noqa: PLR0913 (transformers' signature, and ours beside it)
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        document_ids: Tensor | None = None,
        schedule: Schedule | Converged | None = None,
        cache: Cache | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast | tuple:
        """
        Args:
            input_ids: [B, T]; or inputs_embeds, [B, T, D].
            attention_mask: [B, P+T], zero for padding. Padding may stand on either side.
            position_ids: rotary positions [B, T]; by default the number of tokens before, in the document.
                Without document_ids, a new document begins where they start again (transformers' packing).
            past_key_values, cache: two names of the same cache (the first is transformers' older name).
            use_cache: return a cache; default the configuration's in evaluation, no in training.
            document_ids: [B, T], the document of each token in a packed row, -1 for filler. Tokens see
                earlier tokens of their own document only.
            schedule: the passes to run; default the configuration's training schedule in training mode,
                otherwise its prefill schedule. One new token per row is always evaluated exactly.
            output_hidden_states: return `hidden_states`, L+1 tensors [B, T, D]: what entered each layer in a
                token's last pass (the first is the embedding), and `last_hidden_state`. All carry gradient.
            output_attentions: refused; attention weights are never formed.
            return_dict: False for a tuple of the outputs that are there. This one and the other `output_…`
                arguments are the configuration's by default.

        Returns:
            `last_hidden_state` [B, T, D] after the final norm (zero at padding), and the cache if asked for.

        Raises:
            ValueError: inputs that contradict each other, or output_attentions. TypeError: an argument that
                does not exist, or a cache that is not a DynamicCache.
        """
        if kwargs:
            refuse_unknown(f"{type(self).__name__}.forward", kwargs, signature(self.forward).parameters)
        keep_states, return_dict = self._outputs(output_hidden_states, output_attentions, return_dict)
        inputs = Inputs(input_ids, inputs_embeds, attention_mask, position_ids, document_ids)
        if inputs.shape[1] == 0:
            raise ValueError("the rows are empty: the model needs at least one token of each")
        cache = past_key_values if cache is None else cache
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training and self.shard.ranks == 1
        if cache is None and use_cache:
            cache = WhiteMatterCache()
        hidden_BTD, states = self._run(inputs, schedule, cache, bool(use_cache), keep_states)
        outputs = BaseModelOutputWithPast(
            last_hidden_state=hidden_BTD,
            hidden_states=(*states, hidden_BTD) if keep_states else None,
            **{CACHE_FIELD: cache if use_cache else None},
        )
        return outputs if return_dict else outputs.to_tuple()

    def _outputs(self, states: bool | None, attentions: bool | None, as_dict: bool | None) -> tuple:
        """Whether to return hidden states, and whether by name; None is the configuration's choice."""
        config = self.config
        if config.output_attentions if attentions is None else attentions:
            raise ValueError(
                "output_attentions=True is not supported: attention runs in fused kernels, several times a "
                "token, and its weights are never formed. output_hidden_states is supported"
            )
        states = config.output_hidden_states if states is None else states
        return bool(states), bool(config.return_dict if as_dict is None else as_dict)

    # The passes are loops over ranges with custom backward functions; tracing them gains nothing and breaks.
    # Blocks can still be compiled: `for layer in model.layers: layer.compile()`.
    @torch.compiler.disable
    def _run(
        self,
        inputs: Inputs,
        schedule: Schedule | Converged | None,
        cache: Cache | None,
        keep_cache: bool,
        keep_states: bool,
    ) -> tuple[Tensor, list[Tensor]]:
        """`last_hidden_state` and, where asked for, what entered each layer."""
        cached = cached_tokens(cache, self.config.num_kv_channels)
        x_BTD = self._embeddings(inputs)
        if schedule is None:
            config = self.config
            schedule = config.training_schedule() if self.training else config.prefill_schedule()
        layout = lay_out(
            inputs.shape, cached, schedule.period, x_BTD.device,
            inputs.attention_mask, inputs.position_ids, inputs.document_ids,
        )  # fmt: skip
        if is_converged(schedule) and layout.width == 1:
            schedule = Schedule.exact()
        if is_fixed(schedule) and not torch.is_grad_enabled():
            schedule = schedule.capped(layout.width)
        if self.shard.ranks > 1:
            self._check_shard(schedule, layout, cached > 0 or keep_cache)
        x_BWD = layout.to_workspace(x_BTD)
        position_BW = self.shard.share(layout.position_BW, 1)
        config = self.config
        cos, sin = rotary_table(
            position_BW, config.head_dim, config.rope_theta, x_BWD.dtype, config.scaled_rope
        )
        visibility = replace(layout.visibility, width=layout.width, kernel=self.config.attention)
        workspace = Workspace(x_BWD, cos, sin, visibility)
        if keep_cache and cached and self._decodes(layout, cache, compute_dtype(x_BWD)):
            self.residuals = None
            found = decode(self._stack(), workspace, cache)
            return self.norm(found.output), found.entering
        if cached:
            workspace = replace(workspace, past=cached_pool(cache, self.config.num_kv_channels))
        measures = self.measure_residuals or self.measure_gain
        options = PassOptions(
            # Transformers' gradient checkpointing means groups.
            recompute="group" if self.gradient_checkpointing and self.recompute == "none" else self.recompute,
            entries_on_host=self.entries_on_host,
            # A pass is measured by all of its entries, those of the last one included.
            keep_cache=keep_cache or (measures and not torch.is_grad_enabled()),
            keep_states=keep_states,
            measure_residuals=self.measure_residuals,
            shard=self.shard,
        )
        result = self._evaluate(workspace, schedule, options)
        self.residuals = result.residuals
        if keep_cache:
            append(cache, *(layout.to_batch(entries, dim=3) for entries in (result.keys, result.values)))
        states = [layout.to_batch(state_BWD) for state_BWD in result.states]
        return layout.to_batch(self.norm(result.hidden_BWD)), states

    def _embeddings(self, inputs: Inputs) -> Tensor:
        """[B, T, D], this rank's part of T; with gradient wherever there is any."""
        if inputs.inputs_embeds is None:
            x_BTD = self.embed_tokens(self.shard.share(inputs.input_ids, 1))
        else:
            x_BTD = self.shard.share(inputs.inputs_embeds, 1)
        if torch.is_grad_enabled() and not x_BTD.requires_grad:
            # Frozen embeddings: the passes' chain of steps still needs a differentiable start.
            x_BTD = x_BTD.detach().requires_grad_()
        return x_BTD

    def _stack(self) -> Stack:
        return Stack(self.layers, self.pool, self.dummy_key, self.dummy_value, self.pool)

    def _decodes(self, layout: Layout, cache: Cache, dtype: torch.dtype) -> bool:
        """Whether the new columns are one real token a row, which `decode` evaluates behind the cache."""
        if self.dummy_key is None or layout.width != 1 or cache.layers[0].keys.dtype != dtype:
            return False
        if torch.is_grad_enabled():  # it writes into the cache in place
            return False
        return layout.real_BT is None or (layout.real_BT.shape[1] == 1 and bool(layout.real_BT.all()))

    def _check_shard(self, schedule: Schedule | Converged, layout: Layout, cached: bool) -> None:
        """Refuses what a part of a row cannot be: every step of the passes needs all ranks alike."""
        cyclic = is_fixed(schedule) and schedule.kind == "cyclic"
        problem = None
        if self.config.model_type != "whitematter" or not self.config.feedback:
            problem = "the model is not iterated over one shared pool"
        elif not cyclic:
            problem = "a step of the schedule is not spread over the whole row; only cyclic schedules are"
        elif cached:
            problem = "a cache holds whole rows; call the model with use_cache=False"
        elif layout.column_BT is not None:
            problem = "padding moves tokens over the row; use document_ids -1 for filler"
        elif layout.width % (self.shard.ranks * schedule.groups):
            problem = (
                f"rows of {layout.width} positions are no multiple of {self.shard.ranks} ranks x "
                f"{schedule.groups} groups, so that a group is not spread evenly"
            )
        if problem is not None:
            raise ValueError(f"{self.shard.ranks} ranks cannot share rows (sequence parallelism): {problem}")

    def _evaluate(
        self, workspace: Workspace, schedule: Schedule | Converged, options: PassOptions
    ) -> PassResult:
        """All layers on a workspace: the last one's output, the new entries of the cache, and the states."""
        if not self.config.feedback:
            return run_feedforward(self.layers, self.pool, workspace, options)
        return self._iterate(self._stack(), workspace, schedule, options)

    def _iterate(
        self, stack: Stack, workspace: Workspace, schedule: Schedule | Converged, options: PassOptions
    ) -> PassResult:
        """The fixed point."""
        if is_fixed(schedule):
            result = run_passes(stack, workspace, schedule, options)
            if self.measure_gain and not torch.is_grad_enabled():
                entries = (result.keys, result.values)
                self.gain = loop_gain(stack, workspace, schedule, entries, options.shard)
            return result
        if torch.is_grad_enabled():
            raise ValueError("a converged prefill carries no gradient: call it under torch.no_grad()")
        return run_until_converged(stack, workspace, schedule, options)


class WhiteMatterForCausalLM(PoolGenerationMixin, WhiteMatterPreTrainedModel):
    """WhiteMatter with a language-model head."""

    base_class: type[WhiteMatterModel] = WhiteMatterModel
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: WhiteMatterConfig) -> None:
        super().__init__(config)
        self.model = self.base_class(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(  # noqa: PLR0913 (transformers' signature, and ours beside it)
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        document_ids: Tensor | None = None,
        schedule: Schedule | Converged | None = None,
        prefill: str | None = None,
        prefill_passes: int | None = None,
        prefill_groups: int | None = None,
        prefill_tolerance: float | None = None,
        prefill_start: str | None = None,
        cache: Cache | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        num_items_in_batch: int | Tensor | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple:
        """
        Args:
            labels: [B, T], the input ids again, -100 where no loss is wanted (transformers' convention: the
                model shifts them); gives the mean cross-entropy as `loss`.
            logits_to_keep: compute logits for the last so many positions, or for these positions; 0 is all.
                Not together with labels, which need all of them.
            prefill, prefill_passes, prefill_groups, prefill_tolerance, prefill_start: in place of the
                configuration's fields of these names, for this call; also arguments of `generate` and fields
                of a GenerationConfig.
            num_items_in_batch: what the sum of the losses is divided by, in place of the number of labels
                (transformers' Trainer accumulates gradients with it).
            kwargs: `shift_labels` [B, T], labels that are shifted already: position i's is token i + 1.
                Not in the signature, where Trainer would take it for a column that every data set has.
            The rest: see WhiteMatterModel.forward.

        Raises:
            ValueError, TypeError: as WhiteMatterModel.forward.
        """
        shift_labels = kwargs.pop("shift_labels", None)
        if kwargs:
            refuse_unknown(f"{type(self).__name__}.forward", kwargs, signature(self.forward).parameters)
        keep_all = isinstance(logits_to_keep, int) and logits_to_keep == 0
        if not keep_all and (labels is not None or shift_labels is not None):
            raise ValueError(
                "labels need the logits of all positions: leave out logits_to_keep, or the labels"
            )
        as_dict = self.config.return_dict if return_dict is None else return_dict
        settings = (prefill, prefill_passes, prefill_groups, prefill_tolerance, prefill_start)
        if any(setting is not None for setting in settings):
            if schedule is not None:
                raise ValueError("give either a schedule or prefill settings, not both")
            schedule = self.config.prefill_schedule(*settings)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            document_ids=document_ids,
            schedule=schedule,
            cache=cache,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
            return_dict=True,
        )
        hidden_BTD = outputs.last_hidden_state
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits_BTV = self.lm_head(hidden_BTD[:, keep])
        loss = None
        if labels is not None or shift_labels is not None:
            loss = self.loss_function(
                logits=logits_BTV,
                labels=labels,
                vocab_size=self.config.vocab_size,
                num_items_in_batch=num_items_in_batch,
                shift_labels=shift_labels,
            )
        results = CausalLMOutputWithPast(
            loss=loss,
            logits=logits_BTV,
            hidden_states=outputs.hidden_states,
            **{CACHE_FIELD: getattr(outputs, CACHE_FIELD)},
        )
        return results if as_dict else results.to_tuple()


# transformers' Trainer shifts the labels of label smoothing, and its pipelines expect text, where this table
# has the class's name.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[WhiteMatterConfig.model_type] = WhiteMatterForCausalLM.__name__

__all__ = ["WhiteMatterForCausalLM", "WhiteMatterModel", "WhiteMatterPreTrainedModel"]
