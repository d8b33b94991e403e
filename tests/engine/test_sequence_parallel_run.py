"""The real trainer with rows shared by two ranks, resumed with other numbers of ranks for a row."""

import shutil
from pathlib import Path

import pytest
import yaml

from tests.support import toy_corpus
from tests.support.checkpoint_launch import metric_rows, train_run
from tests.support.settings import ROOT, trainable
from wm_ds.train import main

pytestmark = pytest.mark.alone

STEPS = 6


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> dict:
    data = toy_corpus.packed(tmp_path_factory.mktemp("data"), 300, "--seq-len", 32, "--holdout", 6)
    return trainable(
        data,
        model__num_hidden_layers=3,
        model__num_attention_heads=4,
        model__num_key_value_heads=2,
        model__head_dim=8,
        batch={"global_batch": 8, "micro_batch": 2},
        recompute="group",
        sequence_parallel=2,
        steps=STEPS,
        evaluate={"every": 3, "sequences": 5},
        log__details_every=3,
    )


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory, config) -> Path:
    base = tmp_path_factory.mktemp("unbroken")
    train_run(base, config, "run", 2, timeout_s=150)
    return base / "run"


def test_dry_run_counts_batches_by_groups_of_ranks(tmp_path, config, monkeypatch, capsys) -> None:
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 4}.items():
        monkeypatch.setenv(name, str(value))
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config | {"run": config["run"] | {"dir": str(tmp_path / "run")}}))
    assert main([str(path), "--dry-run"]) == 0
    assert "2 micro-batches of 2 per group of 2 ranks" in capsys.readouterr().out
    assert main([str(path), "sequence_parallel=1", "--dry-run"]) == 0
    assert "1 micro-batches of 2 per rank" in capsys.readouterr().out
    assert main([str(path), "model.num_groups=6", "--dry-run"]) == 2
    assert "2 x model.num_groups = 6 does not divide the data's rows of 32" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("world", "shared", "stage"), [(1, 1, 1), pytest.param(4, 2, 3, marks=pytest.mark.slow)]
)
def test_run_continues_with_other_numbers_of_ranks_for_a_row(
    tmp_path, config, unbroken, world, shared, stage
) -> None:
    """Two ranks for a row up to step 2, then one, or two groups of two: all that is logged is the same."""
    run_dir = tmp_path / "run"
    shutil.copytree(unbroken, run_dir)
    for late in (4, 6):
        shutil.rmtree(run_dir / "checkpoints" / f"step_{late:08d}")
    (run_dir / "checkpoints" / "latest").write_text("step_00000002\n")
    (run_dir / "done").unlink()
    text = (run_dir / "config.yaml").read_text()
    (run_dir / "config.yaml").write_text(text.replace(str(unbroken), str(run_dir)))
    (run_dir / "metrics.jsonl").unlink()
    stage_file = f"deepspeed={ROOT}/ds_configs/zero{stage}.json"
    train_run(tmp_path, config, "run", world, f"sequence_parallel={shared}", stage_file, timeout_s=150)
    whole = [row for row in metric_rows(unbroken) if row["step"] > 2]
    mine = metric_rows(run_dir)
    assert [row["step"] for row in mine] == [row["step"] for row in whole]
    for new, old in zip(mine, whole):
        assert new.get("tokens") == old.get("tokens")
        assert new.get("holdout_tokens") == old.get("holdout_tokens")
        for name in ("loss", "holdout_loss", "holdout_loss_double_passes", "grad_norm"):
            if name in old:
                assert new[name] == pytest.approx(old[name], rel=2e-4), (name, old["step"])
    measured = [row for row in mine if "residuals" in row]
    assert [row["step"] for row in measured] == [3, 6]
    if world == 1:  # otherwise the first row of each group is measured, not of one
        for new, old in zip(measured, [row for row in whole if "residuals" in row]):
            assert new["residuals"] == pytest.approx(old["residuals"], rel=1e-3)
            for name in ("router_entropy", "feedback_share"):
                assert new[name]["key"] == pytest.approx(old[name]["key"], rel=1e-3)
