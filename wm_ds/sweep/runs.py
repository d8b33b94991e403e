"""From a sweep to its runs: every arm put together with the base, what makes a run the run it is, and where.

A run lies under a name made of its content: the checksum of its configuration (with its data's content, and
without what only says where and how often) and its seed. So two sweeps that share a folder share the runs
that they have in common, and a changed base makes other runs instead of continuing old ones.

    RUNS/0123456789ab-s0/                the run directory, as the trainer leaves it
    RUNS/0123456789ab-s0.yaml            its configuration
    RUNS/0123456789ab-s0.log             what training and measuring printed
    RUNS/0123456789ab-s0.record.json     code version, seconds of every attempt
    RUNS/0123456789ab-s0.measured.json   what was measured so far
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wm_ds.config import load as configuration
from wm_ds.config.schema import Config, ConfigError
from wm_ds.config.stages import plan
from wm_ds.data import shards
from wm_ds.families import model_config
from wm_ds.plan.flops import training
from wm_ds.sweep.description import Arm, Sweep, SweepError

# Where a run lies and how often something is written or looked at does not make it another run.
_QUIET = ("log", "checkpoint", "evaluate")
# What determines the numbers of a trained run.
_CODE = ("config", "data", "engine", "model", "optim", "families.py", "train.py")


@dataclass(frozen=True)
class Run:
    """One arm with one seed.

    Attributes:
        config: complete, with its run directory.
        digest: of all that makes it the arm that it is, without the seed.
        steps, tokens: its length; `tokens` counts positions, filler included.
        flops: of the whole training, forward and backward, head included.
        origin: the run whose weights its step 0 has; None for fresh weights.
        pool: how layers share what was theirs alone there (tools/upcycle.py --pool).
    """

    arm: str
    seed: int
    config: Config
    digest: str
    steps: int
    tokens: int
    flops: float
    origin: Run | None = None
    pool: str | None = None

    @property
    def folder(self) -> Path:
        """The run directory."""
        return Path(self.config.run.dir)

    def beside(self, suffix: str) -> Path:
        """A file beside the run directory."""
        return self.folder.with_name(self.folder.name + suffix)

    @property
    def begun(self) -> bool:
        """Whether it has the weights that it starts from, where they are not fresh ones."""
        return self.origin is None or any((self.folder / "checkpoints").glob("step_*/manifest.json"))

    @property
    def trained(self) -> bool:
        """Whether the trainer has finished it."""
        done = read_json(self.folder / "done")
        return done is not None and done.get("step") == self.steps

    def record(self) -> dict[str, Any]:
        """The code version that trained it, and its attempts."""
        return read_json(self.beside(".record.json")) or {"code": None, "commit": None, "attempts": []}


def runs_of(sweep: Sweep, path: str | Path) -> list[Run]:
    """All runs, seed by seed. `path` is the sweep's file, for messages.

    Raises SweepError, ConfigError or ShardError in one line: an arm that is no run, two arms that are the
    same one, data that is not there.
    """
    raw = configuration.read(sweep.base, "sections (run, model, data, …)")
    configuration.parse_new(deepcopy(raw), source=sweep.base)
    lengths: dict[str, tuple[int, float]] = {}
    arms: dict[str, tuple[Config, str, int, int, float]] = {}
    # Arms that follow from another one come after it.
    for name in sorted(sweep.arms, key=lambda name: _depends(sweep.arms[name])):
        arm = sweep.arms[name]
        where = f"{path}: arm {name}"
        changed = _changed(raw, arm.set, where)
        config = _parse(changed, where)
        data = shards.load_manifest(config.data.sources()[0].path)
        per_step = data["seq_len"] * config.batch.global_batch
        per_token = _flops_per_token(config, data, where)
        if arm.equal_flops_to is not None:
            steps = max(1, round(lengths[arm.equal_flops_to][1] / (per_token * per_step)))
            changed.pop("tokens", None)
            config = _parse(changed | {"steps": steps}, where)
        found = plan(config, data["seq_len"])
        flops = sum(
            _flops_per_token(stage.config, data | {"seq_len": stage.seq_len}, where)
            * stage.positions
            * stage.steps
            for stage in found.stages
        )
        lengths[name] = found.total, flops
        digest = _digest(config)
        if arm.upcycle_from is not None:
            said = [digest, arms[arm.upcycle_from][1], arm.upcycle_pool]
            digest = hashlib.sha256(json.dumps(said).encode()).hexdigest()
        arms[name] = config, digest, found.total, found.tokens, flops
    _refuse_twins({name: found[1] for name, found in arms.items()}, path)
    return [
        _run(sweep, name, seed, arms)
        for seed in sorted({seed for name in arms for seed in seeds_of(sweep, name)})
        for name in sweep.arms
        if seed in seeds_of(sweep, name)
    ]


def seeds_of(sweep: Sweep, arm: str) -> list[int]:
    """The seeds of an arm."""
    own = sweep.arms[arm].seeds
    return sweep.seeds if own is None else own


def _depends(arm: Arm) -> int:
    """An arm of another one's length may start from a third, and the other way round."""
    return (arm.upcycle_from is not None) + 2 * (arm.equal_flops_to is not None)


def _run(sweep: Sweep, arm: str, seed: int, arms: dict[str, tuple[Config, str, int, int, float]]) -> Run:
    config, digest, steps, tokens, flops = arms[arm]
    own = config.run.model_copy(
        update={"seed": seed, "dir": str(Path(sweep.runs) / f"{digest[:12]}-s{seed}")}
    )
    said = sweep.arms[arm]
    origin = None if said.upcycle_from is None else _run(sweep, said.upcycle_from, seed, arms)
    whole = config.model_copy(update={"run": own})
    return Run(arm, seed, whole, digest, steps, tokens, flops, origin, said.upcycle_pool)


def _changed(raw: dict[str, Any], changes: dict[str, Any], where: str) -> dict[str, Any]:
    """The base with an arm's keys."""
    raw = deepcopy(raw)
    for key, value in changes.items():
        *path, last = key.split(".")
        at = raw
        for part in path:
            at = at.setdefault(part, {})
            if not isinstance(at, dict):
                raise SweepError(f"{where}: {key} lies in {part}, which is a value and no section")
        at[last] = deepcopy(value)
    # A length by either name replaces the base's.
    for name, other in (("steps", "tokens"), ("tokens", "steps")):
        if name in changes and other not in changes:
            raw.pop(other, None)
    return raw


def _parse(raw: dict[str, Any], where: str) -> Config:
    return configuration.parse_new(deepcopy(raw), source=where)


def _flops_per_token(config: Config, data: dict[str, Any], where: str) -> float:
    try:
        hf_config = model_config(
            config.model, vocab_size=data["vocab_size"], seq_len=data["seq_len"], eos_id=data["eos_id"]
        )
    except ConfigError as error:
        raise SweepError(f"{where}: {error}") from None
    found = training(hf_config, data["seq_len"])
    if found is None:
        raise SweepError(f"{where}: the FLOPs of model.family = {config.model.family} are not known")
    return found.model


def _digest(config: Config) -> str:
    """What makes the arm: its configuration, the data by its content, without seed and place."""
    said = config.model_dump(mode="json")
    for name in ("run", *_QUIET):
        said.pop(name)
    said["data"] = [
        [shards.content(shards.load_manifest(source.path)), source.weight] for source in config.data.sources()
    ]
    if config.data.holdout is not None:
        said["data"].append(shards.content(shards.load_manifest(config.data.holdout)))
    said["run"] = {"deterministic": config.run.deterministic}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _refuse_twins(digests: dict[str, str], path: str | Path) -> None:
    seen: dict[str, str] = {}
    for name, digest in digests.items():
        if digest in seen:
            raise SweepError(
                f"{path}: arms {seen[digest]} and {name} are the same run; leave one of them out"
            )
        seen[digest] = name


@dataclass(frozen=True)
class Code:
    """The version of the code that trains: a checksum of the sources that determine the numbers."""

    digest: str
    commit: str | None


def code_version() -> Code:
    """That of the code that is imported here."""
    package = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for name in _CODE:
        path = package / name
        for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
            text = file.read_bytes()
            digest.update(f"{file.relative_to(package)} {len(text)} ".encode() + text)
    try:
        found = subprocess.run(
            ["git", "-C", package, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10
        )
        commit = found.stdout.strip() if found.returncode == 0 else None
    except (OSError, subprocess.TimeoutExpired):
        commit = None
    return Code(digest.hexdigest()[:12], commit)


def read_json(path: Path) -> dict[str, Any] | None:
    """The mapping in a file; None where there is none, or it is damaged: what it says is made again."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
