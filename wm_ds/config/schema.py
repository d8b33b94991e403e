"""Every key of a run, with its type, default, unit, meaning and limits; load.py reads them from YAML.

docs/configuration.md is printed from this file (reference.py), so what is said here is all that is said.

Durations (`optim.warmup`, `stages.until`, and so on) are read by durations.py; what a run's stages come to is
said in stages.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model, field_validator

from wm_ds.errors import WmError


class ConfigError(WmError, ValueError):
    """The run's description is wrong; the message names the field, the value and the remedy."""


@dataclass(frozen=True)
class Unit:
    """What a key's number counts or is measured in."""

    name: str


# Numbers by what they count. A plain number is a ratio or a factor, without a unit.
Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Unit("count")]
Steps = Annotated[int, Unit("optimizer steps")]
Tokens = Annotated[int, Unit("tokens")]
Sequences = Annotated[int, Unit("sequences")]
Ranks = Annotated[int, Unit("ranks")]
Channels = Annotated[int, Unit("channels")]
Minutes = Annotated[float, Unit("minutes")]
Duration = Annotated[int | str, Unit("optimizer steps, a share of the run, or tokens")]


# Families whose layers run once: there is no pool and no pass.
PLAIN_FAMILIES = ("vanilla", "cla", "yoco", "fusedkv")


class Section(BaseModel):
    """A part of a run: unknown keys are refused, values keep their types, nothing changes afterwards."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)


class Run(Section):
    """Where the run lives, its seed, and how long it may take."""

    dir: str
    """Run directory. It is created; one that holds another run is refused, one with a checkpoint resumes."""
    branch_from: str | None = None
    """RUN@STEP: a run without a checkpoint of its own begins with that one of another run's directory, with
    its optimizer state and its place in the data, and goes on by its own learning rate: several cool-downs of
    one long run, say. Model, seed and data must be that run's."""
    seed: int = 0
    """Seed of the initial weights and the order of the data."""
    deterministic: bool = False
    """Deterministic kernels only: two runs are bitwise equal, somewhat slower on GPUs."""
    timeout_minutes: Minutes = Field(30.0, gt=0)
    """Longest wait for another rank, at the start and in every collective; then the run fails."""
    time_limit_minutes: Minutes | None = Field(None, gt=0)
    """Save and stop gracefully after this long, so that a job ends before its scheduler kills it."""

    @property
    def branch_point(self) -> tuple[str, int] | None:
        """(directory, step) of `branch_from`, None where the run is no branch. Raises ConfigError."""
        if self.branch_from is None:
            return None
        run, at, step = self.branch_from.rpartition("@")
        if not (run and at and step.isascii() and step.isdigit()):
            raise ConfigError(
                f"run.branch_from = {self.branch_from}: write RUN@STEP, a run's directory and the step of "
                "one of its checkpoints (runs/long@8000)"
            )
        return run, int(step)


class RopeScaling(Section):
    """Scaled rotary frequencies, under the names of transformers' config.json."""

    rope_type: Literal["linear", "llama3"]
    """linear takes factor alone, llama3 all four numbers."""
    factor: float = Field(gt=0)
    """The slow frequencies (linear: all of them) are divided by it."""
    low_freq_factor: float | None = Field(None, gt=0)
    """llama3: frequencies that turn less often than this in the original length are slow."""
    high_freq_factor: float | None = Field(None, gt=0)
    """llama3: those that turn more often are left as they are."""
    original_max_position_embeddings: Tokens | None = Field(None, gt=0)
    """llama3: the original length."""


class Model(Section):
    """The model: family, sizes, pool, and the passes of a training step."""

    family: Literal["whitematter", "vanilla", "lckv", "cla", "yoco", "fusedkv"] = "whitematter"
    """whitematter; vanilla: transformers' Qwen3, same sizes, ordinary attention; lckv: the sandwich of the
    paper's baseline; cla, yoco, fusedkv: layers that share KV without feedback (docs/model.md)."""
    vocab_size: Tokens | None = Field(None, gt=0)
    """Rows of the embedding; default: the packed data's vocabulary. May be larger, not smaller."""
    hidden_size: Channels = Field(gt=0)
    """D: width of the residual stream."""
    intermediate_size: Channels = Field(gt=0)
    """I: width of the feed-forward block."""
    num_hidden_layers: Count = Field(gt=0)
    """L: number of layers."""
    num_attention_heads: Count = Field(gt=0)
    """H: query heads of a layer."""
    num_key_value_heads: Count = Field(gt=0)
    """G: KV heads of a layer, or of a channel of the pool; divides the query heads."""
    head_dim: Channels = Field(gt=0)
    """d: width of a head."""
    rms_norm_eps: float = Field(1e-6, gt=0)
    """Added to the mean square in every RMSNorm."""
    rope_theta: float = Field(10000.0, gt=0)
    """Base of the rotary embedding's wavelengths."""
    tie_word_embeddings: bool = False
    """Whether the head is the embedding's matrix."""
    qk_norm: bool = True
    """A norm on every query and key head, as in Qwen3. False: blocks as Llama's; family vanilla is then
    transformers' Llama."""
    qkv_bias: bool = False
    """Biases on the query, key and value projections, as in Qwen2. Family vanilla with them and without
    qk_norm is transformers' Qwen2."""
    scaled_rope: RopeScaling | None = None
    """Rotary frequencies that are not rope_theta's alone, as a pretrained model may have them, under
    transformers' names. rope_type linear divides them by factor; llama3 takes all four numbers."""
    initializer_range: float = Field(0.02, gt=0)
    """Standard deviation of the fresh weights."""
    num_kv_channels: Count | None = Field(None, gt=0)
    """k: KV channels, shared by all layers; default L/2. What follows belongs to some families only."""
    router_stride: Count | None = Field(None, gt=0)
    """p: the routers read the state of every p-th layer. Default 2."""
    router_init: str | None = None
    """Initial source of each channel; default auto (top for k=1, cyclic, shifted for k=L)."""
    routing: Literal["dynamic", "static", "softmax", "fixed"] | None = None
    """Where mixing weights come from: a router per token (default), or numbers that are learned or fixed."""
    feedback: bool | None = None
    """False: a layer reads shallower layers only (ablation; needs k = L). Default true."""
    layers_per_kv: Count | None = Field(None, gt=0)
    """cla only: so many consecutive layers share the KV of the lowest of them. Default 2 (CLA2)."""
    own_kv_layers: Count | None = Field(None, ge=0)
    """yoco and fusedkv only: layers at the bottom with KV of their own. Default L/2. yoco's cache has one KV
    more, which the layers above share."""
    warmup_layers: Count | None = Field(None, ge=0)
    """lckv only: layers with KV of their own, half at the bottom and half at the top."""
    schedule: Literal["cyclic", "chunked", "wavefront", "exact"] | None = None
    """Sweep of a training step: strided groups over the whole row (default), inside one chunk after another,
    in staggered chunks, or one token after another (exact; for small models)."""
    chunk_size: Tokens | None = Field(None, gt=0)
    """Tokens of a chunk, for chunked and wavefront."""
    relaxation: Positive | list[Positive] | None = None
    """From the second pass on, new pool entry = old + relaxation * (computed - old). Default 1. A list has
    one factor for each pass from the second on; the last serves all further passes."""
    num_groups: Count | None = Field(None, gt=0)
    """g: token groups of a pass. Default 8."""
    no_grad_passes: Count | None = Field(None, ge=0)
    """Passes of a training step without gradient. Default 1."""
    grad_passes: Count | None = Field(None, gt=0)
    """Passes with gradient, after those without. Default 2."""
    start: Literal["embedding", "layerwise"] | None = None
    """What the pool holds before the first pass. embedding (default): made as if every layer's state were the
    token's embedding. layerwise: made from one sweep over all positions, in which each layer reads its
    channel of the states so far; it costs one traversal of the layers and counts as no pass."""
    start_missing: Literal["newest", "embedding"] | None = None
    """What stands in, in a layerwise start, for the states of layers that it has not reached: the newest
    state (default) or the embedding."""
    start_grad: bool | None = None
    """Whether gradient flows through the sweep of a layerwise start; needs no_grad_passes 0. Default false:
    it begins where the sweep's states are pooled."""
    attention: Literal["auto", "sdpa", "flex"] | None = None
    """Attention kernel; default auto: flex for long steps on CUDA, otherwise sdpa."""
    prefill_passes: Count | None = Field(None, gt=0)
    """Passes over a prompt in generation and evaluation; default: as in training."""
    prefill_groups: Count | None = Field(None, gt=0)
    """Groups in generation and evaluation; default: num_groups."""
    prefill_start: Literal["embedding", "layerwise"] | None = None
    """Start in generation and evaluation; default: as in training."""

    def fields(self) -> dict[str, Any]:
        """The fields that go to the model's own configuration class; unset ones keep its defaults."""
        found = {k: v for k, v in self.model_dump().items() if k != "family" and v is not None}
        if self.scaled_rope is not None:
            found["scaled_rope"] = self.scaled_rope.model_dump(exclude_none=True)
        return found


class Source(Section):
    """One of several packed data sets to train on."""

    path: str
    """Directory of packed data."""
    weight: float = Field(1.0, gt=0)
    """Share of the sequences, relative to the other sources."""


class Data(Section):
    """What is trained on and what is held out."""

    train: str | list[Source]
    """Directory of packed data, or several with weights."""
    seq_len: Tokens | None = Field(None, gt=0)
    """Tokens of a training row; default: as the (first) training directory was packed. A part of the packed
    length, or a multiple of it, and a multiple of its alignment: packing is a view."""
    holdout: str | None = None
    """Directory whose held-out split is evaluated; default: that of the (first) training directory."""
    tokenizer: str | None = None
    """Directory of the data's tokenizer, copied into exports; default: the one that the data names."""

    skip: list[tuple[int, int]] = []
    """Global batches that are not trained on, [[from_step, to_step]], both left out: those that these steps
    would have had if none were left out. A step has the next one that is not; docs/training.md says more."""

    @field_validator("skip", mode="before")
    @classmethod
    def _pairs(cls, value: Any) -> Any:
        return [tuple(v) if isinstance(v, list) else v for v in value] if isinstance(value, list) else value

    def sources(self) -> list[Source]:
        """The training sources as a list."""
        return [Source(path=self.train)] if isinstance(self.train, str) else list(self.train)


class Batch(Section):
    """How many sequences a step takes, and how many at once."""

    global_batch: Sequences = Field(gt=0)
    """Sequences of one optimizer step, over all ranks."""
    micro_batch: Sequences = Field(gt=0)
    """Sequences of one forward and backward on one rank."""

    def accumulation(self, ranks: int, name: str = "ranks") -> int:
        """Micro-batches per rank and step, for `ranks` that work on different sequences.

        Raises ConfigError with the choices where it is no integer; there they go by `name`.
        """
        per_step = ranks * self.micro_batch
        if self.global_batch % per_step == 0:
            return self.global_batch // per_step
        micro = [m for m in _divisors(self.global_batch) if (self.global_batch // m) % ranks == 0]
        rank_choices = _near(_divisors(self.global_batch // self.micro_batch), ranks)
        below = self.global_batch // per_step * per_step
        batches = [b for b in (below, below + per_step) if b > 0]
        hints = [f"global_batch {' or '.join(map(str, batches))}"]
        if micro:
            hints.insert(0, f"micro_batch in {{{', '.join(map(str, micro))}}}")
        if self.global_batch % self.micro_batch == 0:
            hints.append(f"{', '.join(map(str, rank_choices))} {name}")
        raise ConfigError(
            f"global_batch {self.global_batch} does not divide over {ranks} {name} x micro_batch "
            f"{self.micro_batch}; use {', or '.join(hints)}"
        )


class Optim(Section):
    """The update: rule, learning rate, clipping."""

    name: Literal["muon", "adamw"] = "muon"
    """muon: Muon for weight matrices and AdamW for the rest. adamw: AdamW for everything."""
    lr: float = Field(gt=0)
    """Peak learning rate, of both rules."""
    weight_decay: float = Field(0.1, ge=0)
    """Decoupled, on matrices, embeddings and head; never on norms, biases and the dummy."""
    momentum: float = Field(0.95, ge=0, lt=1)
    """Momentum of Muon (Nesterov)."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of AdamW's two averages."""
    eps: float = Field(1e-8, gt=0)
    """Added to the root of AdamW's second average."""
    update_scale: Literal["rms", "spectral"] = "rms"
    """Size of Muon's update: rms 0.2 sqrt(max(rows, cols)), comparable with AdamW at the same learning rate;
    spectral sqrt(max(1, rows / cols))."""
    ns_steps: Count = Field(5, gt=0)
    """Newton-Schulz steps of Muon."""
    ns_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Precision of Newton-Schulz."""
    embedding_rule: Literal["adamw", "muon"] = "adamw"
    """Rule of the embedding, where `name` is muon."""
    head_rule: Literal["adamw", "muon"] = "adamw"
    """Rule of the head, where `name` is muon."""
    clip: float = Field(1.0, ge=0)
    """Largest gradient norm; 0 = no clipping."""
    clip_rule: Literal["local", "global"] = "global"
    """local: each rank clips its own gradient before the reduction (the paper); keeps a full gradient on each
    rank.
    global: the reduced gradient is clipped, before Muon."""
    warmup: Duration = "2%"
    """Duration of the linear warm-up."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """The learning rate after the warm-up: cosine to the floor; wsd: the peak, then a linear decay to the
    floor; or constant."""
    floor: float = Field(0.1, ge=0, le=1)
    """Final learning rate as a fraction of the peak."""
    decay: Duration = "20%"
    """Duration of the final linear decay of schedule wsd."""

    @property
    def clips_locally(self) -> bool:
        """Whether each rank clips its own gradient, which must therefore be whole there."""
        return self.clip > 0 and self.clip_rule == "local"

    @field_validator("betas", mode="before")
    @classmethod
    def _pair(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value


class Checkpoint(Section):
    """When checkpoints are written, which are kept, and where a run starts from."""

    every: Steps | None = Field(500, gt=0)
    """Steps between checkpoints; null: only at the end and when stopped."""
    keep_last: Count = Field(2, gt=0)
    """Newest checkpoints kept."""
    keep_every: Steps | None = Field(None, gt=0)
    """Checkpoints of steps that are multiples of this are kept for good."""
    resume: str | None = None
    """Where a run without checkpoints of its own starts from: a checkpoint, or the run whose latest is meant.
    A run that has one goes on from its own, so that a requeued job does not go back. An address, as in
    `mirror`, is fetched first."""
    mirror: str | None = None
    """Address, as fsspec takes it (`s3://bucket/run`, `gs://…`, `file:///…`), to which every checkpoint is
    copied beside training; a run whose own directory has no checkpoint fetches the newest from there.
    Credentials are those of the address's library; `s3:` needs the package s3fs."""
    mirror_keep_last: Count = Field(3, gt=0)
    """Newest checkpoints kept there."""
    mirror_keep_every: Steps | None = Field(None, gt=0)
    """Checkpoints of steps that are multiples of this are kept there for good."""
    mirror_mib_per_s: Annotated[float, Unit("MiB/s")] | None = Field(None, gt=0)
    """Most that is sent a second, and read back; null: as fast as it goes."""


class Evaluate(Section):
    """The held-out loss on the way."""

    every: Steps | None = Field(500, gt=0)
    """Steps between held-out evaluations; null: only at the end."""
    sequences: Sequences = Field(64, gt=0)
    """Held-out sequences evaluated, the first ones of the split."""
    double_passes: bool = True
    """Evaluate WhiteMatter also with twice the trained passes: the gap is what the iteration still misses."""
    tasks: list[str] = []
    """Downstream tasks (names of lm-evaluation-harness) that saved checkpoints are scored on, in a process
    beside the run, or a job of its own on SLURM: rows of RUN/evaluations.jsonl."""
    tasks_every: Steps | None = Field(None, gt=0)
    """Steps between these; a multiple of `checkpoint.every`. And at the end."""
    tasks_data: str | None = None
    """Folder of the tasks' data, as `python -m wm_ds.evaluate lm-eval --data` takes it; null: the Hub."""
    tasks_limit: Count | None = Field(None, gt=0)
    """Only the first so many documents of each task."""
    tasks_inline: bool = False
    """Training waits meanwhile, and the process may use the accelerator; otherwise it runs on the CPU, at
    low priority."""
    tasks_minutes: Minutes = Field(120.0, gt=0)
    """Longest time of one evaluation, which is then ended; not of a job on SLURM, which has its own limit."""


class Zero3(Section):
    """How parameters are gathered at ZeRO stage 3."""

    gather: Literal["step", "pass", "traversal"] | None = None
    """At ZeRO stage 3, how often parameters are gathered: once a step (the whole body at once), once a pass,
    or at every traversal of a layer (least memory, hundreds of gathers; needs recompute layer or group+layer
    for a multi-pass model). Default: step for multi-pass models, traversal for the others."""


class Guard(Section):
    """What happens to steps that are not finite, and to spikes of the loss."""

    max_skipped: Steps = Field(10, gt=0)
    """Steps skipped in a row (non-finite loss or gradient, or skipped spikes) after which the run fails."""
    spike_sigma: float = Field(6.0, gt=0)
    """A loss this many standard deviations above the running mean is reported as a spike."""
    skip_spikes: bool = False
    """Also skip the update of a spike."""
    rollback: Steps | None = Field(None, gt=0)
    """After so many spikes in a row go back to the newest checkpoint from before them, and leave the batches
    since then out; null: never. Spikes then do not move the mean that they are measured by."""
    max_rollbacks: Count = Field(3, ge=0)
    """How often a run does that; at the next time it fails."""


class Watch(Section):
    """What is noticed of ranks that hold up the others."""

    straggler: float | None = Field(1.3, gt=1)
    """A rank that computes so many times as long as the median of the ranks is slow; null: not compared."""
    straggler_intervals: Count = Field(6, gt=0)
    """Intervals (`log.every`) in a row that a rank must be slow before a line names its node."""


class Profile(Section):
    """Profiles of a few steps, into RUN/profiles. `touch RUN/PROFILE` asks for one at any time."""

    steps: tuple[Steps, Steps] | None = None
    """First and last step that is profiled; null: none, until asked for."""
    ranks: list[Annotated[int, Unit("count")]] = Field([0], min_length=1)
    """Ranks that are profiled, by number."""
    memory: bool = False
    """Also of memory: a snapshot of the allocator on CUDA; on a CPU the peak of the last of the steps, by
    itself, not with `compile`."""

    @field_validator("steps", mode="before")
    @classmethod
    def _pair(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value


class Samples(Section):
    """Texts that the model writes on the way, for a person to read."""

    prompts: list[str] = Field(min_length=1, max_length=16)
    """What it is to continue."""
    every: Steps = Field(1000, gt=0)
    """Steps between samples; also at the end."""
    tokens: Tokens = Field(32, gt=0)
    """Length of a continuation. Each token is a whole forward, on all ranks."""
    temperature: float = Field(0.8, ge=0)
    """Of the draw; 0 takes the likeliest token. The draws are the same at every step of the run."""


class Log(Section):
    """What is printed and recorded, and how often."""

    every: Steps = Field(10, gt=0)
    """Steps between printed lines; metrics.jsonl has every step."""
    details_every: Steps = Field(50, gt=0)
    """Steps between WhiteMatter's fixed-point residuals and router statistics."""
    tensorboard: bool = True
    """Write event files of TensorBoard into the run directory."""
    wandb: str | None = None
    """Project name at Weights & Biases; needs the package wandb."""
    mlflow: str | None = None
    """Experiment at MLflow, at the server that MLFLOW_TRACKING_URI names; needs the package mlflow-skinny."""
    samples: Samples | None = None
    """Continuations of fixed prompts, written to `samples.jsonl` and TensorBoard. Default: none."""


# Stages

# What a stage may say of the passes. The rest of `model` is the model's shape, which a run keeps.
PASSES = (
    *("schedule", "num_groups", "no_grad_passes", "grad_passes", "chunk_size", "relaxation"),
    *("start", "start_missing", "start_grad"),
)

if TYPE_CHECKING:
    Passes = Section
else:
    Passes = create_model(
        "Passes",
        __base__=Section,
        __doc__="The passes of a training step; keys that are not set are those of `model`.",
        **{name: (Model.model_fields[name].annotation, Model.model_fields[name]) for name in PASSES},
    )


class StageBatch(Section):
    """The batches of a stage; keys that are not set are those of `batch`."""

    global_batch: Sequences | None = Field(None, gt=0)
    """Sequences of one optimizer step, over all ranks."""
    micro_batch: Sequences | None = Field(None, gt=0)
    """Sequences of one forward and backward on one rank."""


class Stage(Section):
    """A part of the run, from where the stage before ends; keys that are not set are the run's own."""

    until: Duration | None = None
    """Where the stage ends, counted from the run's beginning: a step (`700`), a share of the run (`70%`; of
    its tokens where its length is given in tokens) or tokens (`50B tokens`). The last stage has none."""
    passes: Passes | None = None
    """The passes of a training step, in place of those in `model`."""
    data: str | list[Source] | None = None
    """Directory of packed data, or several with weights, in place of `data.train`. A directory that an
    earlier stage has read goes on where it was."""
    seq_len: Tokens | None = Field(None, gt=0)
    """Tokens of a training row, in place of `data.seq_len`."""
    batch: StageBatch | None = None
    """Sequences of a step and of a micro-batch, in place of those in `batch`."""
    freeze: list[str] | None = None
    """Parameters that are not updated, in place of `freeze`; [] for none."""
    lr_factor: Positive = 1.0
    """What the learning rate, one function of the step over the whole run, is multiplied with."""


class Config(Section):
    """One run. See the sections for the fields."""

    run: Run
    model: Model
    data: Data
    batch: Batch
    optim: Optim
    precision: Literal["fp32", "autocast", "bf16", "fp16"] = "autocast"
    """autocast: fp32 weights, bf16 products, fp32 reduction (the paper). bf16: bf16 weights and reduction,
    fp32 masters. fp32. (fp16 is refused with the reason.)"""
    recompute: Literal["none", "layer", "group", "group+layer"] = "none"
    """What is recomputed in backward instead of kept: nothing, each layer, each group of tokens
    (WhiteMatter), both."""
    entries_on_host: bool = False
    """Keep the pool entries that groups overwrite in the host's memory until backward puts them back: about
    2 k G d numbers a token and gradient pass less on the GPU, for two copies over its bus."""
    compile: bool = False
    """Compile layers and pool with torch.compile: the same results to rounding. The seconds it takes are
    logged; not at ZeRO stage 3, whose gathering hooks break the compiled graphs."""
    sequence_parallel: Ranks = Field(1, gt=0)
    """N consecutive ranks work on the same sequences, each on a contiguous slice of their positions: for rows
    too long for one device. Activations, logits and the pool are cut N ways; queries and outputs travel once
    a layer, new pool entries once per group of tokens. N must divide the ranks, the heads (query and KV) and,
    times num_groups, the sequence length. Only WhiteMatter with feedback and the cyclic schedule."""
    deepspeed: str = "ds_configs/zero2.json"
    """DeepSpeed's JSON: ZeRO stage, offload, buckets. Batch sizes, precision, clipping, optimizer stay out of
    it. A relative path is looked for in the working directory, then in the repository."""
    zero3: Zero3 = Zero3()
    steps: Steps | None = Field(None, gt=0)
    """Length of the run in optimizer steps; either this or tokens."""
    tokens: Annotated[int | str, Unit("tokens")] | None = None
    """Length of the run in tokens (`2e9`, `500M tokens`), rounded up to whole steps."""
    freeze: list[str] = []
    """Parameters that are not updated, by patterns of their names (`model.layers.0.*`, `*.mlp.*`). Each must
    match one. It saves no memory: a stage may thaw them."""
    stages: list[Stage] | None = Field(None, min_length=1)
    """What changes on the way: passes, data, batch, row length. Not set: the run has one stage."""
    checkpoint: Checkpoint = Checkpoint()
    evaluate: Evaluate = Evaluate()
    guard: Guard = Guard()
    log: Log = Log()
    watch: Watch = Watch()
    profile: Profile = Profile()

    def data_ranks(self, ranks: int) -> int:
        """How many of `ranks` work on different sequences. Raises ConfigError where N does not divide."""
        n = self.sequence_parallel
        if ranks % n:
            raise ConfigError(
                f"sequence_parallel = {n} does not divide {ranks} rank{'s' * (ranks != 1)}; start a multiple "
                f"of {n} of them"
            )
        return ranks // n

    def accumulation(self, ranks: int) -> int:
        """Micro-batches per rank and step on `ranks` ranks. Raises ConfigError where it is no integer."""
        n = self.sequence_parallel
        name = "ranks" if n == 1 else f"sequence groups of {n} ranks"
        return self.batch.accumulation(self.data_ranks(ranks), name)


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _near(values: list[int], target: int) -> list[int]:
    return sorted(sorted(values, key=lambda v: abs(v - target))[:3])
