"""A sweep as a person writes it: a base run, arms that change some of its keys, seeds, what to measure.

    base: configs/sweeps/base.yaml
    results: docs/results/main.json
    seeds: [0, 1, 2]
    arms:
      vanilla: {}
      wm_full: {set: {model.family: whitematter, model.num_kv_channels: 8}}
      vanilla_equal: {equal_flops_to: wm_full}
    measure: {sequences: 256}
    quick: {arms: [vanilla, wm_full], set: {steps: 8}}

An unknown key is refused with the nearest name. What the arms contradict is found when they are put together
with the base (runs.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from wm_ds.config import load as configuration
from wm_ds.config.schema import Count, Section, Sequences
from wm_ds.errors import WmError


class SweepError(WmError):
    """A sweep cannot be run, or its results cannot be used; the message is one line."""


class Arm(Section):
    """What one arm changes."""

    label: str | None = None
    """Its name in tables and figures; default: its key."""
    set: dict[str, Any] = Field(default_factory=dict)
    """Keys of the run (`section.field`) and the values they get in place of the base's."""
    seeds: list[int] | None = None
    """Its own seeds; default: the sweep's."""
    equal_flops_to: str | None = None
    """Another arm: this one trains for as many steps as have that arm's training FLOPs."""
    upcycle_from: str | None = None
    """Another arm, of family vanilla: this one's step 0 has that arm's final weights of the same seed, by
    tools/upcycle.py."""
    upcycle_pool: Literal["nearest", "top", "mean"] | None = None
    """With upcycle_from: its --pool."""


class Measure(Section):
    """What is measured of every trained run, on held-out rows, in fp32."""

    sequences: Sequences = Field(256, gt=0)
    """Rows of the perplexity as trained, the figure that arms are compared by."""
    some: Sequences = Field(32, gt=0)
    """Rows of the perplexity by number of passes and of exact autoregressive evaluation."""
    passes: Count = Field(8, gt=0)
    """The largest number of passes, at the groups the model was trained with."""
    start_passes: Count = Field(3, gt=0)
    """The largest number of passes by which the starts are compared."""
    converge: list[Count] = Field(default_factory=lambda: [1])
    """Numbers of groups whose passes to within `within` of exact perplexity are counted; 1 is Jacobi."""
    converge_sequences: Sequences = Field(16, gt=0)
    """Rows of that."""
    converge_passes: Count = Field(40, gt=0)
    """Give up after so many passes."""
    within: float = Field(0.01, gt=0)
    """How near is near enough, relative."""
    batch: Sequences = Field(32, gt=0)
    """Rows at a time."""


class Quick(Section):
    """A part of the sweep that takes minutes: the same path, no result."""

    arms: list[str] = Field(min_length=1)
    """The arms that are run."""
    seeds: list[int] = Field([0], min_length=1)
    """Their seeds."""
    set: dict[str, Any] = Field(default_factory=dict)
    """Keys that every arm gets beside its own, such as `steps`."""
    measure: Measure = Measure()
    """What is measured of them."""


class Sweep(Section):
    """A whole sweep."""

    title: str
    """What it asks, in a few words."""
    base: str
    """The run's YAML that all arms start from."""
    runs: str = "runs/sweeps"
    """Folder of the run directories; sweeps may share one, and then share the runs they have in common."""
    results: str
    """The JSON file of the results."""
    seeds: list[int] = Field(min_length=1)
    """Seeds of every arm that does not name its own."""
    arms: dict[str, Arm] = Field(min_length=1)
    """The arms by name."""
    measure: Measure = Measure()
    quick: Quick | None = None


def load(path: str | Path, quick: bool = False) -> Sweep:
    """The sweep at `path`, or its quick part. Raises ConfigError or SweepError in one line."""
    if Path(path).is_fifo():
        raise SweepError(f"{path} is a pipe: a sweep is read again by whatever goes on with it; give a file")
    raw = configuration.read(path, "a sweep (base, arms, seeds, …)")
    try:
        sweep = Sweep.model_validate(raw)
    except ValidationError as error:
        words = "; ".join(configuration.explain(e, Sweep) for e in error.errors())
        raise SweepError(f"{path}: {words}") from None
    for name, arm in sweep.arms.items():
        _check_arm(f"{path}: arm {name}", name, arm, sweep)
    return _quick(sweep, path) if quick else sweep


def _check_arm(where: str, name: str, arm: Arm, sweep: Sweep) -> None:
    seeds = sweep.seeds if arm.seeds is None else arm.seeds
    if not seeds:
        raise SweepError(f"{where} has no seed; leave its seeds out to take the sweep's {sweep.seeds}")
    if len(set(seeds)) < len(seeds):
        raise SweepError(f"{where} names a seed twice: {seeds}")
    if "run.seed" in arm.set or "run.dir" in arm.set:
        raise SweepError(f"{where} sets run.seed or run.dir, which the sweep sets itself; use seeds")
    _check_origin(where, name, arm, sweep)
    other = arm.equal_flops_to
    if other is None:
        return
    if other not in sweep.arms or other == name:
        raise SweepError(f"{where}: equal_flops_to names {other!r}, which is no other arm of the sweep")
    if sweep.arms[other].equal_flops_to is not None:
        raise SweepError(f"{where}: equal_flops_to names {other!r}, whose own length depends on an arm")
    if {"steps", "tokens"} & arm.set.keys():
        raise SweepError(f"{where} has equal_flops_to and a length of its own; leave one of them out")


def _check_origin(where: str, name: str, arm: Arm, sweep: Sweep) -> None:
    other = arm.upcycle_from
    if other is None:
        if arm.upcycle_pool is not None:
            raise SweepError(
                f"{where} has upcycle_pool without upcycle_from, which names the arm to start from"
            )
        return
    if other not in sweep.arms or other == name:
        raise SweepError(f"{where}: upcycle_from names {other!r}, which is no other arm of the sweep")
    if sweep.arms[other].upcycle_from is not None or sweep.arms[other].equal_flops_to == name:
        raise SweepError(f"{where}: upcycle_from names {other!r}, which itself depends on an arm")
    seeds, theirs = (sweep.seeds if one.seeds is None else one.seeds for one in (arm, sweep.arms[other]))
    missing = [seed for seed in seeds if seed not in theirs]
    if missing:
        raise SweepError(f"{where}: upcycle_from names {other!r}, which has no seed {missing[0]}")


def _quick(sweep: Sweep, path: str | Path) -> Sweep:
    """Only the quick part; its results lie beside the runs, so that nobody takes them for the sweep's."""
    part = sweep.quick
    if part is None:
        raise SweepError(f"{path} has no section `quick`; name there the arms to run and their steps")
    unknown = [name for name in part.arms if name not in sweep.arms]
    if unknown:
        raise SweepError(f"{path}: quick names arm {unknown[0]!r}, which the sweep does not have")
    arms = {}
    for name in part.arms:
        arm = sweep.arms[name]
        if arm.equal_flops_to not in (None, *part.arms):
            raise SweepError(f"{path}: quick has {name}, but not {arm.equal_flops_to}, whose FLOPs it gets")
        if arm.upcycle_from not in (None, *part.arms):
            raise SweepError(f"{path}: quick has {name}, but not {arm.upcycle_from}, which it starts from")
        more = {k: v for k, v in part.set.items() if not (arm.equal_flops_to and k in ("steps", "tokens"))}
        arms[name] = arm.model_copy(update={"set": arm.set | more, "seeds": part.seeds})
    results = Path(sweep.runs) / f"{Path(sweep.results).stem}.quick.json"
    return sweep.model_copy(
        update={"arms": arms, "seeds": part.seeds, "measure": part.measure, "results": str(results)}
    )
