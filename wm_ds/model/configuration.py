"""The configuration of a WhiteMatter model: Qwen3's field names plus those of the cross-layer KV pool."""

from collections.abc import Sequence
from inspect import signature
from typing import Any

from transformers import PreTrainedConfig

from .arguments import refuse_unknown
from .schedule import Converged, Schedule, Start

ROUTER_INITS = ("auto", "top", "cyclic", "shifted")
ROUTINGS = ("dynamic", "static", "softmax", "fixed")
ATTENTIONS = ("auto", "sdpa", "flex")
ROPE_SCALINGS = {  # and the numbers that each takes
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


class WhiteMatterConfig(PreTrainedConfig):
    """Shape and schedule of a WhiteMatter model.

    The block fields (`hidden_size` … `tie_word_embeddings`) mean what they mean in transformers' Qwen3.

    Args:
        qk_norm: a norm on every query and key head, as Qwen3 has; False for blocks as Llama's.
        qkv_bias: biases on the query, key and value projections, as Qwen2 has.
        scaled_rope: rotary frequencies that are not theta's alone, as transformers writes them: `rope_type`
            "linear" with `factor`, or "llama3" with `factor`, `low_freq_factor`, `high_freq_factor` and
            `original_max_position_embeddings`.
        num_kv_channels: k, the number of KV channels that all layers share; 1 <= k <= num_hidden_layers.
            Layer l reads channel l mod k (paper §3.1, step 3). The cache is k/L of the vanilla one.
        router_stride: p; the router reads the states of layers L-1, L-1-p, L-1-2p, … (§3.1, step 1).
        router_init: which source states the channels start from. "top": every channel starts as the top
            state; "cyclic": source l starts in channel l mod k; "shifted": channel j starts as source
            min(j+1, L-1); "auto": top for k = 1, shifted for k = L, cyclic between (§3.1).
        routing: where mixing weights come from. "dynamic": a router reads each token's states (§3.1);
            "static": learned numbers, the same for all tokens (§5.3); "softmax": learned, non-negative and
            summing to 1 (with k = 1 the Feedback Transformer's); "fixed": the initial pattern, not learned
            (with k = L and "shifted" the Recurrent Transformer's).
        feedback: False is the ablation of §5.3: channel l mixes the states of layers 0 … l only, attention is
            ordinary and causal, one pass is exact. Needs k = L.
        schedule: the sweep of a training step: "cyclic" (strided groups, §3.3), "chunked" (cyclic inside one
            chunk after another), "wavefront" (staggered chunks) or "exact" (one token after another).
        num_groups: g, strided token groups of a training pass (§3.3); 1 is Jacobi iteration.
        no_grad_passes: detached passes at the start of a training step.
        grad_passes: passes that carry gradient after them; the loss is on the last one.
        chunk_size: tokens of a chunk; for "chunked" and "wavefront", of training or of a prefill.
        relaxation: from the second pass on, new entry = old + relaxation * (computed - old); a list has one
            factor for each pass from the second on, the last of which serves all further passes.
        start: what the pool holds before the first pass: "embedding", made as if every layer's state were the
            token's embedding (§3.3), or "layerwise", made from one sweep over all positions in which each
            layer reads its channel of the states so far. That costs one traversal and counts as no pass.
        start_missing: in a layerwise start, what stands in for the states of deeper layers: the "newest"
            state or the "embedding".
        start_grad: gradient flows through the sweep of a layerwise start, too; needs no_grad_passes 0.
        prefill: the sweep of a forward in evaluation mode: "trained" (that of `schedule`), one of the kinds
            above, or "converged": cyclic passes until no entry of a row's pool moves by more than
            prefill_tolerance, relative to its size; every row stops by itself.
        prefill_passes: passes of a forward in evaluation mode; None means as many as training runs.
        prefill_groups: groups of a forward in evaluation mode; None means num_groups.
        prefill_tolerance: see prefill.
        prefill_start: `start` of a forward in evaluation mode; None means that of training.
        tokenizer_size: ids from here on have no token (the vocabulary is padded); `generate` never picks
            them. None: every id has one. Logits and losses are not touched.
        attention: the kernel: "sdpa", "flex" (flex_attention with block masks), or "auto": flex for long
            steps on CUDA, otherwise sdpa.

    Further fields are those that every configuration of transformers has (`dtype`, `architectures`, …).

    Raises:
        ValueError: a field is out of its range; the message names the field, the value and the limit.
        TypeError: a field that the model does not have, Qwen3's others among them.
    """

    model_type = "whitematter"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]  # noqa: RUF012 (transformers wants a list)

    def __init__(  # noqa: PLR0913 (the fields of config.json)
        self,
        vocab_size: int = 151936,
        hidden_size: int = 512,
        intermediate_size: int = 1536,
        num_hidden_layers: int = 16,
        num_attention_heads: int = 6,
        num_key_value_heads: int = 3,
        head_dim: int = 96,
        max_position_embeddings: int = 2048,
        rms_norm_eps: float = 1e-6,
        rope_theta: float = 10_000.0,
        initializer_range: float = 0.02,
        tie_word_embeddings: bool = False,
        qk_norm: bool = True,
        qkv_bias: bool = False,
        scaled_rope: dict[str, Any] | None = None,
        num_kv_channels: int = 16,
        router_stride: int = 2,
        router_init: str = "auto",
        routing: str = "dynamic",
        feedback: bool = True,
        schedule: str = "cyclic",
        num_groups: int = 8,
        no_grad_passes: int = 1,
        grad_passes: int = 2,
        chunk_size: int | None = None,
        relaxation: float | Sequence[float] = 1.0,
        start: str = "embedding",
        start_missing: str = "newest",
        start_grad: bool = False,
        prefill: str = "trained",
        prefill_passes: int | None = None,
        prefill_groups: int | None = None,
        prefill_tolerance: float = 1e-3,
        prefill_start: str | None = None,
        tokenizer_size: int | None = None,
        attention: str = "auto",
        use_cache: bool = True,
        bos_token_id: int | None = None,
        eos_token_id: int | list[int] | None = None,
        pad_token_id: int | None = None,
        **kwargs: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.head_dim = head_dim
        self.max_position_embeddings = max_position_embeddings
        self.rms_norm_eps = rms_norm_eps
        self.rope_theta = rope_theta
        self.initializer_range = initializer_range
        self.qk_norm = qk_norm
        self.qkv_bias = qkv_bias
        self.scaled_rope = scaled_rope
        self.num_kv_channels = num_kv_channels
        self.router_stride = router_stride
        self.router_init = router_init
        self.routing = routing
        self.feedback = feedback
        self.schedule = schedule
        self.num_groups = num_groups
        self.no_grad_passes = no_grad_passes
        self.grad_passes = grad_passes
        self.chunk_size = chunk_size
        # A list in memory as in JSON, so that a saved configuration reads back equal.
        self.relaxation = list(relaxation) if isinstance(relaxation, Sequence) else relaxation
        self.start = start
        self.start_missing = start_missing
        self.start_grad = start_grad
        self.prefill = prefill
        self.prefill_passes = prefill_passes
        self.prefill_groups = prefill_groups
        self.prefill_tolerance = prefill_tolerance
        self.prefill_start = prefill_start
        self.tokenizer_size = tokenizer_size
        self.attention = attention
        self.use_cache = use_cache
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        self.pad_token_id = pad_token_id
        self._check()
        _refuse_foreign(type(self), kwargs)
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)
        self.tie_word_embeddings = tie_word_embeddings

    def _check(self) -> None:
        self._check_sizes()
        if self.scaled_rope is not None:
            _check_scaled_rope(self.scaled_rope)
        self._check_choices()
        # Schedules check their own fields; a contradiction is refused here, not at the first step.
        self.training_schedule()
        self.prefill_schedule()
        if not self.feedback:
            self._check_without_feedback()

    def _check_sizes(self) -> None:
        at_least_one = (
            "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
            "num_key_value_heads head_dim router_stride num_groups grad_passes prefill_passes prefill_groups"
        )
        for name in at_least_one.split():
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.no_grad_passes < 0:
            raise ValueError(f"no_grad_passes is {self.no_grad_passes}; it cannot be negative")
        if not 1 <= self.num_kv_channels <= self.num_hidden_layers:
            raise ValueError(
                f"num_kv_channels is {self.num_kv_channels}; it must lie between 1 and num_hidden_layers "
                f"({self.num_hidden_layers}), since every layer reads one channel"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of num_key_value_heads "
                f"({self.num_key_value_heads})"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; rotary embeddings need an even number")
        if self.tokenizer_size is not None and not 1 <= self.tokenizer_size <= self.vocab_size:
            raise ValueError(
                f"tokenizer_size is {self.tokenizer_size}; it must lie between 1 and vocab_size "
                f"({self.vocab_size})"
            )

    def _check_choices(self) -> None:
        if self.router_init not in ROUTER_INITS:
            raise ValueError(f"router_init is {self.router_init!r}; choose one of {', '.join(ROUTER_INITS)}")
        if self.routing not in ROUTINGS:
            raise ValueError(f"routing is {self.routing!r}; choose one of {', '.join(ROUTINGS)}")
        if self.attention not in ATTENTIONS:
            raise ValueError(f"attention is {self.attention!r}; choose one of {', '.join(ATTENTIONS)}")

    def _check_without_feedback(self) -> None:
        if self.routing == "fixed" or self.router_init in ("top", "shifted"):
            raise ValueError(
                f"feedback: false cannot start from routing {self.routing!r} with router_init "
                f"{self.router_init!r}, which reads layers above the channel's own; use router_init "
                "'auto' and a learned routing"
            )
        if self.num_kv_channels != self.num_hidden_layers:
            raise ValueError(
                f"feedback: false needs num_kv_channels ({self.num_kv_channels}) equal to num_hidden_layers "
                f"({self.num_hidden_layers}): every layer reads the channel of its own depth"
            )
        if "layerwise" in (self.start, self.prefill_start):
            raise ValueError(
                "feedback: false has no passes to start: it is itself one layerwise sweep. Leave out start "
                "and prefill_start 'layerwise'"
            )

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """transformers' method (also of `from_pretrained`); fields given beside the dictionary are checked
        together with it."""
        fields = {name: kwargs.pop(name) for name in list(kwargs) if name in _own_fields(cls)}
        return super().from_dict({**config_dict, **fields}, **kwargs)

    def training_schedule(self) -> Schedule:
        """The passes of a training step."""
        start = Start(self.start, self.start_missing, self.start_grad)
        if self.schedule == "exact":
            return Schedule("exact", 1, 1, start=start)
        passes, chunk = self.no_grad_passes + self.grad_passes, self._chunk(self.schedule)
        return Schedule(
            self.schedule, self.num_groups, passes, self.no_grad_passes, chunk, self.relaxation, start
        )

    def prefill_schedule(
        self,
        prefill: str | None = None,
        passes: int | None = None,
        groups: int | None = None,
        tolerance: float | None = None,
        start: str | None = None,
    ) -> Schedule | Converged:
        """The passes of a forward in evaluation mode; an argument takes the place of its `prefill…` field.

        Raises:
            ValueError: an argument that this kind of prefill has no use for, or one out of its range.
        """
        kind = self._prefill_kind(prefill)
        used = self.prefill_settings(prefill)
        given = {
            "prefill_passes": passes,
            "prefill_groups": groups,
            "prefill_tolerance": tolerance,
            "prefill_start": start,
        }
        for name, value in given.items():
            if value is not None and name not in used:
                raise ValueError(
                    f"{name}={value} has no effect on prefill {kind!r}, which takes "
                    f"{' and '.join(used) or 'no further setting'}"
                )
        passes = self.prefill_passes if passes is None else passes
        groups = self.prefill_groups if groups is None else groups
        passes = self.no_grad_passes + self.grad_passes if passes is None else passes
        groups = self.num_groups if groups is None else groups
        start = (self.prefill_start or self.start) if start is None else start
        begin = Start(start, self.start_missing)
        if kind == "converged":
            tolerance = self.prefill_tolerance if tolerance is None else tolerance
            return Converged(groups, tolerance, self.relaxation, begin)
        if kind == "exact":
            return Schedule.exact()
        return Schedule(kind, groups, passes, 0, self._chunk(kind), self.relaxation, begin)

    def _chunk(self, kind: str) -> int:
        """chunk_size for a kind of schedule that has chunks; it may be set for the prefill alone."""
        return (self.chunk_size or 0) if kind in ("chunked", "wavefront") else 0

    def prefill_settings(self, prefill: str | None = None) -> tuple[str, ...]:
        """Names of the settings that a kind of prefill takes; None is the configuration's kind."""
        kind = self._prefill_kind(prefill)
        if kind == "exact":
            return ()
        passes = "prefill_tolerance" if kind == "converged" else "prefill_passes"
        return ("prefill_groups", passes, "prefill_start")

    def _prefill_kind(self, prefill: str | None) -> str:
        kind = self.prefill if prefill is None else prefill
        return self.schedule if kind == "trained" else kind

    @property
    def router_sources(self) -> list[int]:
        """The layers whose states the router reads, ascending (L' of them)."""
        return sorted(range(self.num_hidden_layers - 1, -1, -self.router_stride))


class LCKVConfig(WhiteMatterConfig):
    """Shape and schedule of an LCKV sandwich: warm-up layers with their own KV around layers that share one.

    Args:
        warmup_layers: w; w // 2 of them at the bottom, the rest at the top. The cache holds w + 1 channels.
        num_groups, no_grad_passes, grad_passes: Jacobi passes, seven detached and two with gradient, as in
            the paper's baseline (§4.2). Other fields: see WhiteMatterConfig; there is no router.
    """

    model_type = "lckv"

    def __init__(
        self,
        warmup_layers: int = 4,
        num_hidden_layers: int = 16,
        num_groups: int = 1,
        no_grad_passes: int = 7,
        grad_passes: int = 2,
        **kwargs: Any,
    ) -> None:
        if not 0 <= warmup_layers < num_hidden_layers:
            raise ValueError(
                f"warmup_layers is {warmup_layers}; it must be smaller than num_hidden_layers "
                f"({num_hidden_layers}), so that one layer is left to share its KV"
            )
        self.warmup_layers = warmup_layers
        implied = {
            "num_kv_channels": warmup_layers + 1,
            "routing": "fixed",
            "router_init": "top",
            "router_stride": 2,
            "feedback": True,
            "start": "embedding",
            "start_missing": "newest",
            "prefill_start": None,
        }
        _imply(kwargs, implied, f"an LCKV sandwich has no choice there: with warmup_layers {warmup_layers}")
        super().__init__(
            num_hidden_layers=num_hidden_layers,
            num_groups=num_groups,
            no_grad_passes=no_grad_passes,
            grad_passes=grad_passes,
            **kwargs,
        )

    @property
    def condensed(self) -> range:
        """The layers that share one KV."""
        bottom = self.warmup_layers // 2
        return range(bottom, self.num_hidden_layers - (self.warmup_layers - bottom))


class SharedKVConfig(WhiteMatterConfig):
    """Shape of a model whose layers run once and share KV (sharing.py). The cache holds num_kv_channels KVs.

    The fields of block, vocabulary and generation are WhiteMatterConfig's. There is no pool and no pass, and
    nothing to say about them: such fields have one value, and a saved configuration leaves them out.
    """

    def __init__(self, **kwargs: Any) -> None:
        _imply(kwargs, self._implied(), f"a {self.model_type} model has no choice there:")
        super().__init__(**kwargs)

    @property
    def reads(self) -> list[tuple[int, ...]]:
        """For each layer the KVs that it reads, counted in the order in which they are made."""
        raise NotImplementedError

    @property
    def makers(self) -> list[int]:
        """The layers that make KV, each the first to read it."""
        reads = self.reads
        return [reads.index((kv,)) for kv in sorted({kv for kvs in reads for kv in kvs})]

    def to_dict(self) -> dict[str, Any]:
        """transformers' method."""
        implied = self._implied()
        return {name: value for name, value in super().to_dict().items() if name not in implied}

    def _implied(self) -> dict[str, Any]:
        defaults = {name: field.default for name, field in signature(WhiteMatterConfig).parameters.items()}
        fixed = {
            "num_kv_channels": len(self.makers),
            "feedback": False,
            "schedule": "exact",  # one forward is
            "num_groups": 1,
            "no_grad_passes": 0,
            "grad_passes": 1,
            "attention": "sdpa",
        }
        others = [name for name in defaults if name not in (*_BLOCK_FIELDS, "kwargs")]
        return {name: fixed.get(name, defaults[name]) for name in others}

    def _check_without_feedback(self) -> None:
        """No pool, nothing to check."""

    def _prefill_kind(self, prefill: str | None) -> str:
        if prefill not in (None, "trained", "exact"):
            raise ValueError(
                f"prefill={prefill!r} has no effect on a {self.model_type} model: its layers run once, and "
                "one forward is exact; leave it out"
            )
        return "exact"


class CLAConfig(SharedKVConfig):
    """Cross-layer attention: every few consecutive layers share the KV of the lowest of them.

    Args:
        layers_per_kv: how many; 2 is CLA2. Divides num_hidden_layers. 1 is an ordinary model.
    """

    model_type = "cla"

    def __init__(self, layers_per_kv: int = 2, num_hidden_layers: int = 16, **kwargs: Any) -> None:
        if layers_per_kv < 1 or num_hidden_layers % layers_per_kv:
            raise ValueError(
                f"layers_per_kv is {layers_per_kv}; it must divide num_hidden_layers ({num_hidden_layers}), "
                "so that all KVs are shared alike"
            )
        self.layers_per_kv = layers_per_kv
        self.num_hidden_layers = num_hidden_layers
        super().__init__(num_hidden_layers=num_hidden_layers, **kwargs)

    @property
    def reads(self) -> list[tuple[int, ...]]:
        """0, 0, 1, 1, 2, 2, …"""
        return [(layer // self.layers_per_kv,) for layer in range(self.num_hidden_layers)]


class YOCOConfig(SharedKVConfig):
    """YOCO's sharing: all layers above the lower ones read one KV.

    Args:
        own_kv_layers: n, the layers at the bottom with KV of their own; default half of all. The next one
            makes the KV of all that are left, from the state that leaves the n. The cache holds n + 1 KVs.
    """

    model_type = "yoco"

    def __init__(self, own_kv_layers: int | None = None, num_hidden_layers: int = 16, **kwargs: Any) -> None:
        self.own_kv_layers = _lower_layers(own_kv_layers, num_hidden_layers, 0, num_hidden_layers - 1)
        self.num_hidden_layers = num_hidden_layers
        super().__init__(num_hidden_layers=num_hidden_layers, **kwargs)

    @property
    def reads(self) -> list[tuple[int, ...]]:
        """0, 1, …, n, n, n"""
        return [(min(layer, self.own_kv_layers),) for layer in range(self.num_hidden_layers)]


class FusedKVConfig(SharedKVConfig):
    """FusedKV: the upper layers read learned mixtures of the bottom and the middle layer's KV.

    Args:
        own_kv_layers: n, the layers at the bottom with KV of their own, the last of which is the middle one;
            default half of all, n = num_hidden_layers is an ordinary model. The cache holds n KVs.
    """

    model_type = "fusedkv"

    def __init__(self, own_kv_layers: int | None = None, num_hidden_layers: int = 16, **kwargs: Any) -> None:
        self.own_kv_layers = _lower_layers(own_kv_layers, num_hidden_layers, 2, num_hidden_layers)
        self.num_hidden_layers = num_hidden_layers
        super().__init__(num_hidden_layers=num_hidden_layers, **kwargs)

    @property
    def reads(self) -> list[tuple[int, ...]]:
        """0, 1, …, n-1, (0, n-1), (0, n-1), …"""
        n = self.own_kv_layers
        return [(layer,) if layer < n else (0, n - 1) for layer in range(self.num_hidden_layers)]


def _check_scaled_rope(scaling: dict[str, Any]) -> None:
    """Raises ValueError for a kind that is not known, or one with other numbers than it takes."""
    kind = scaling.get("rope_type")
    if kind not in ROPE_SCALINGS:
        raise ValueError(
            f"scaled_rope has rope_type {kind!r}; choose one of {', '.join(ROPE_SCALINGS)}, or leave it out"
        )
    needed, given = set(ROPE_SCALINGS[kind]), set(scaling) - {"rope_type"}
    if needed != given:
        raise ValueError(
            f"scaled_rope of rope_type {kind!r} has {', '.join(sorted(given)) or 'nothing'}; it takes "
            f"{', '.join(ROPE_SCALINGS[kind])}"
        )
    bad = [name for name in ROPE_SCALINGS[kind] if not scaling[name] > 0]
    if bad:
        raise ValueError(f"scaled_rope.{bad[0]} is {scaling[bad[0]]}; it must be greater than 0")
    if kind == "llama3" and not scaling["high_freq_factor"] > scaling["low_freq_factor"]:
        raise ValueError(
            f"scaled_rope.high_freq_factor is {scaling['high_freq_factor']}; it must be greater than "
            f"low_freq_factor ({scaling['low_freq_factor']})"
        )


def _lower_layers(own_kv_layers: int | None, layers: int, least: int, most: int) -> int:
    """own_kv_layers, or its default. Raises ValueError."""
    if own_kv_layers is None:
        if layers % 2:
            raise ValueError(f"num_hidden_layers is {layers}, which has no half: set own_kv_layers")
        own_kv_layers = layers // 2
    if not least <= own_kv_layers <= most:
        raise ValueError(
            f"own_kv_layers is {own_kv_layers}; with num_hidden_layers {layers} it must lie between {least} "
            f"and {most}"
        )
    return own_kv_layers


# What all families have: a Qwen3 block, a vocabulary, generation.
_BLOCK_FIELDS = [
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_theta",
    "initializer_range",
    "tie_word_embeddings",
    "qk_norm",
    "qkv_bias",
    "scaled_rope",
    "tokenizer_size",
    "use_cache",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
]


def _imply(fields: dict[str, Any], implied: dict[str, Any], why: str) -> None:
    """Adds the fields that have one value. Raises ValueError where another was given."""
    for name, value in implied.items():
        if fields.setdefault(name, value) != value:
            raise ValueError(f"{name} is {fields[name]!r}, but {why} it is {value!r}")


def _own_fields(cls: type[WhiteMatterConfig]) -> set[str]:
    """The fields that the class itself declares, its parents' included."""
    classes = [base for base in cls.__mro__ if issubclass(base, WhiteMatterConfig)]
    names = set().union(*(signature(base.__init__).parameters for base in classes))
    return names - {"self", "kwargs"}


# Fields of every configuration of transformers, that describe or are handled by it.
_COMMON_FIELDS = set(PreTrainedConfig().to_dict()) | {
    "attn_implementation",
    "auto_map",
    "dtype",
    "experts_implementation",
    "name_or_path",
    "num_labels",
    "quantization_config",
    "tokenizer_class",
    "torch_dtype",
}
# Of these, the ones that would ask for another architecture.
_WITHOUT_EFFECT = ("chunk_size_feed_forward", "is_encoder_decoder")


def _refuse_foreign(cls: type[WhiteMatterConfig], kwargs: dict[str, Any]) -> None:
    """Raises TypeError for a field that nothing would read. Private ones, with an underscore, may pass."""
    known = _own_fields(cls)
    foreign = [name for name in kwargs if name not in _COMMON_FIELDS and not name.startswith("_")]
    foreign += [name for name in _WITHOUT_EFFECT if kwargs.get(name)]
    refuse_unknown(cls.__name__, foreign, known)


# Not code: transformers looks for lines like these. This is the first file of an exported folder that it
# reads; it copies the files named here along with it, and tells two exports in folders of one name apart by
# their content. Old versions follow the names no further than this, so every file of the package is here.
_FILES = """
from .arguments import *
from .attention import *
from .blocks import *
from .cache import *
from .converge import *
from .decode import *
from .feedforward import *
from .flex import *
from .gain import *
from .generation import *
from .layerwise import *
from .layout import *
from .lckv import *
from .modeling import *
from .once import *
from .passes import *
from .pool import *
from .schedule import *
from .shard import *
from .sharing import *
from .spans import *
from .stack import *
from .tape import *
from .updates import *
from .visibility import *
from .work import *
"""

__all__ = ["CLAConfig", "FusedKVConfig", "LCKVConfig", "WhiteMatterConfig", "YOCOConfig"]
