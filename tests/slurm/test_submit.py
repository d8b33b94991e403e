"""What slurm/submit.sh would submit, and what it refuses; no cluster needed."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONFIG = "tests/slurm/tiny.yaml"


def submit(*arguments, **settings):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("WM_", "SLURM_"))}
    return subprocess.run(
        ["slurm/submit.sh", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**clean, **settings},
    )


def dry_run(*arguments, **settings):
    """The sbatch commands, as lists of words."""
    shown = submit("--dry-run", *arguments, **settings)
    assert shown.returncode == 0, shown.stderr
    return [shlex.split(line.replace("<", "'<").replace(">", ">'")) for line in shown.stdout.splitlines()]


def option(command, name):
    found = [word.removeprefix(f"{name}=") for word in command if word.startswith(f"{name}=")]
    assert len(found) <= 1, command
    return found[0] if found else None


def test_the_chain(tmp_path):
    pack, merge, train, export, evaluate = dry_run(
        "--input", "a dir/*.txt", "--tokenizer", "tok", "--data", f"{tmp_path}/data",
        "--run", f"{tmp_path}/run", "--pack=--seq-len=64", "--nodes", "3", CONFIG, "steps=7",
        WM_GPUS_PER_NODE="4", WM_SLICES="5", WM_PARTITION="gpu", WM_CPU_PARTITION="cpu", WM_ACCOUNT="me",
    )  # fmt: skip
    assert option(pack, "--dependency") is None
    assert option(pack, "--array") == "0-4"
    assert pack[pack.index("slurm/tokenize.sbatch") + 1 :] == [
        "5", "--input", "a dir/*.txt", "--tokenizer", "tok", "--output", f"{tmp_path}/data", "--seq-len=64",
    ]  # fmt: skip
    assert option(merge, "--dependency") == "afterok:<pack>"
    assert option(train, "--dependency") == "afterok:<merge>,singleton"
    assert option(export, "--dependency") == "afterok:<train>"
    assert option(evaluate, "--dependency") == "afterok:<export>"
    for command in (merge, train, export, evaluate):
        assert option(command, "--kill-on-invalid-dep") == "yes"
    assert [option(c, "--partition") for c in (pack, merge, train, export, evaluate)] == [
        "cpu",
        "cpu",
        "gpu",
        "cpu",
        "gpu",
    ]
    assert all(option(c, "--account") == "me" for c in (pack, merge, train, export, evaluate))
    size = [option(train, name) for name in ("--nodes", "--ntasks-per-node", "--gpus-per-node")]
    assert size == ["3", "4", "4"]
    assert train[train.index("slurm/pretrain.sbatch") + 1 :] == [
        CONFIG,
        f"{tmp_path}/run",
        "steps=7",
        f"data.train={tmp_path}/data",
    ]
    assert not (tmp_path / "run").exists(), "a dry run made a folder"


def test_one_run_has_one_job_name(tmp_path):
    names = [
        option(dry_run("--stages", "train", "--run", f"{tmp_path}/{run}", CONFIG)[0], "--job-name")
        for run in ("a", "a", "b")
    ]
    assert names[0] == names[1] != names[2]


def test_the_environment_wins_over_the_file():
    assert option(dry_run("--stages=train", CONFIG, WM_NODES="9")[0], "--nodes") == "9"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no CONFIG given"),
        (["nowhere.yaml"], "no such config: nowhere.yaml"),
        (["--nods", "3", CONFIG], "unknown option --nods"),
        (["--nodes", "0", CONFIG], "--nodes is '0'"),
        (["--nodes"], "--nodes needs a value"),
        (["--stages", "train,exprot", CONFIG], "unknown stage 'exprot'"),
        (["--stages", "pack", CONFIG], "the stage pack needs --input"),
        (["--input", "x", CONFIG], "the stage pack needs --tokenizer"),
        ([CONFIG, "--nodes", "2"], "'--nodes' is no key=value; options come before CONFIG"),
        ([CONFIG, "run.dir=x"], "give the run directory by --run"),
    ],
)
def test_what_is_refused(arguments, message):
    done = submit(*arguments)
    assert done.returncode == 2
    assert re.match("error: ", done.stderr)
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stdout == ""


def test_help():
    shown = submit("--help")
    assert shown.returncode == 0
    assert "--gpus-per-node N" in shown.stdout
