"""Frozen parameters: which are meant, and that the optimizer leaves them and their state as they are."""

from __future__ import annotations

import pytest
import torch

from wm_ds.config.schema import ConfigError
from wm_ds.optim.freeze import frozen_names
from wm_ds.optim.muon import MuonAdamW, Settings
from wm_ds.optim.param_rules import Row
from wm_ds.optim.partition import Fragment, Master

NAMES = [
    "model.embed_tokens.weight",
    "model.layers.0.mlp.up_proj.weight",
    "model.layers.1.mlp.up_proj.weight",
]


def test_patterns_name_parameters() -> None:
    assert frozen_names([], NAMES) == set()
    assert frozen_names(["model.layers.0.*"], NAMES) == {NAMES[1]}
    assert frozen_names(["*.mlp.*", "*embed*"][:1], NAMES) == set(NAMES[1:])


def test_a_pattern_that_matches_nothing_and_one_that_leaves_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"stages\.1\.freeze: 'layers\.0\.\*' matches no parameter"):
        frozen_names(["layers.0.*"], NAMES, "stages.1.freeze")
    with pytest.raises(ConfigError, match=r"freeze = \['\*'\] freezes every parameter"):
        frozen_names(["*"], NAMES)


@pytest.mark.parametrize("rule", ["adamw", "muon"])
def test_only_what_is_frozen_of_a_shared_master_stays(rule) -> None:
    """A flat master of three matrices, as ZeRO makes them: the one in the middle is frozen, then thawed."""
    torch.manual_seed(0)
    flat = torch.nn.Parameter(torch.randn(3 * 12))
    names = ("a", "b", "c")
    rows = [Row(name, (3, 4), rule, 0.1, 0.2) for name in names]
    parameters = {
        name: torch.nn.Parameter(flat.detach()[i * 12 : i * 12 + 12].view(3, 4))
        for i, name in enumerate(names)
    }

    def optimizer(master: torch.nn.Parameter) -> MuonAdamW:
        made = MuonAdamW(rows, parameters, Settings(1e-2, ns_dtype=torch.float32))
        made.param_groups[0]["params"] = [master]
        pieces = [Fragment(n, (3, 4), 0, 12, master, 12 * i, 0) for i, n in enumerate(names)]
        made.attach([Master(master, 0, names)], pieces, torch.device("cpu"))
        return made

    def step(made: MuonAdamW, master: torch.nn.Parameter, seed: int) -> None:
        master.grad = torch.randn(36, generator=torch.Generator().manual_seed(seed))
        made.step()
        made.count_update()

    master, other = torch.nn.Parameter(flat.detach().clone()), torch.nn.Parameter(flat.detach().clone())
    frozen, free = optimizer(master), optimizer(other)
    step(frozen, master, 1)
    step(free, other, 1)
    before = {"weight": master.detach().clone()} | {k: v.clone() for k, v in frozen.state[master].items()}
    frozen.freeze({"b"})
    step(frozen, master, 2)
    step(free, other, 2)
    for kind, old in before.items():
        new = master if kind == "weight" else frozen.state[master][kind]
        same = free.state[other][kind] if kind != "weight" else other
        assert torch.equal(new[12:24], old[12:24]), kind
        for part in (slice(0, 12), slice(24, 36)):
            assert torch.equal(new[part], same[part]), kind
            assert not torch.equal(new[part], old[part]), kind
    frozen.freeze(set())
    step(frozen, master, 3)
    assert not torch.equal(master[12:24], before["weight"][12:24])
