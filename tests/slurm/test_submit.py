"""What slurm/submit.sh would submit, and what it refuses; no cluster needed."""

import os
import re
import shlex
import shutil
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
        (
            ["--time", "1", CONFIG],
            "--time 1 leaves no time to train: the job is asked to stop WM_GRACE_SECONDS",
        ),
        (["--time", "0:04:00", CONFIG], "--time 0:04:00 leaves no time to train"),
        (["--time", "soon", CONFIG], "--time is 'soon', must be as for sbatch"),
        (["--run", "a\\j", CONFIG], "holds a backslash or a line break"),
        (["--run", "a\nb", CONFIG], "holds a backslash or a line break"),
    ],
)
def test_what_is_refused(arguments, message):
    done = submit(*arguments)
    assert done.returncode == 2
    assert re.match("error: ", done.stderr)
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1 + sum(word.count("\n") for word in arguments)
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [("90", 5400), ("1:30", 90), ("24:00:00", 86400), ("2-0", 172800), ("1-02:03", 93780), ("1-0:0:9", 86409),
     ("08:09", 489), ("UNLIMITED", 0), ("0", 0), ("", None), ("1:2:3:4", None), ("a-1", None), ("-5", None)],
)  # fmt: skip
def test_time_limits_are_read_as_sbatch_reads_them(limit, seconds):
    script = '. slurm/common.sh; wm_seconds "$1"'
    done = subprocess.run(["bash", "-c", script, "_", limit], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode == 0) == (seconds is not None)
    assert done.stdout.strip() == ("" if seconds is None else str(seconds))


HARD = "a %j b,c=d;e:f [x] {y} #z $HOME 'q' ü"


def test_paths_are_neither_patterns_nor_lists(tmp_path):
    run = tmp_path / HARD
    shown = submit(
        "--dry-run", "--input=x", "--tokenizer=t", f"--data={tmp_path}/{HARD}", f"--run={run}", CONFIG
    )
    commands = [shlex.split(line.replace("<", "'<").replace(">", ">'")) for line in shown.stdout.splitlines()]
    logs = [option(command, "--output") for command in commands]
    assert len(logs) == 5
    assert all(log.startswith(str(run).replace("%", "%%") + "/logs/") for log in logs)
    for command in commands:
        assert option(command, "--export") == "ALL"
    assert str(run) in commands[2]
    assert f"data.train={tmp_path}/{HARD}" in commands[2]


def test_a_container_cannot_mount_every_path(tmp_path):
    clone = tmp_path / "a,b"
    shutil.copytree(ROOT / "slurm", clone / "slurm")
    (clone / "x.yaml").touch()
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("WM_", "SLURM_"))}
    command = [clone / "slurm" / "submit.sh", "--dry-run", "--stages=train", "x.yaml"]
    for image, code in (("", 0), ("image.sqsh", 2)):
        done = subprocess.run(
            command, env=clean | {"WM_CONTAINER_IMAGE": image}, capture_output=True, text=True
        )
        assert done.returncode == code, done.stderr
    assert done.stderr == f"error: a container cannot mount '{clone}': its name holds a comma or a colon\n"


def test_help():
    shown = submit("--help")
    assert shown.returncode == 0
    assert "--gpus-per-node N" in shown.stdout


def test_a_list_of_runs_is_two_arrays(tmp_path):
    """Each run's measuring waits for its own training; tasks of one name must not wait for each other."""
    runs = tmp_path / "a sweep.list"
    runs.write_text("a.yaml\truns/a\ta.json\t{}\nb.yaml\truns/b\tb.json\t{}\n")
    train, evaluate = dry_run("--list", str(runs), WM_GPUS_PER_NODE="2")
    assert [option(command, "--array") for command in (train, evaluate)] == ["0-1", "0-1"]
    assert option(train, "--dependency") is None
    assert option(evaluate, "--dependency") == "aftercorr:<train>"
    assert train[-3:] == ["slurm/pretrain.sbatch", "--list", str(runs)]
    assert evaluate[-3:] == ["slurm/evaluate.sbatch", "--list", str(runs)]
    assert option(train, "--output") == f"{tmp_path}/a sweep.jobs/logs/train-%A_%a.log"
    assert (option(train, "--gpus-per-node"), option(evaluate, "--gpus-per-node")) == ("2", "1")


def test_a_list_stands_alone(tmp_path):
    runs = tmp_path / "runs.list"
    assert "no such list, or an empty one" in submit("--dry-run", "--list", str(runs)).stderr
    runs.write_text("a\tb\tc\td\n")
    assert "stands in the place of CONFIG" in submit("--dry-run", "--list", str(runs), CONFIG).stderr
    assert "stands in the place of CONFIG" in submit("--dry-run", "--list", str(runs), "--run", "x").stderr


def test_a_task_takes_its_line_of_the_list(tmp_path):
    runs = tmp_path / "runs.list"
    runs.write_text('a.yaml\truns/a\ta.json\t{"x": 1}\nb b.yaml\truns/b\tb.json\t{"x": 2}\n')
    script = f'. slurm/common.sh; wm_task "{runs}"; printf "%s|" "${{task[@]}}"'

    def task(number: str) -> subprocess.CompletedProcess:
        environment = {**os.environ, "SLURM_ARRAY_TASK_ID": number}
        return subprocess.run(
            ["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, env=environment
        )

    assert task("1").stdout == 'b b.yaml|runs/b|b.json|{"x": 2}|'
    beyond = task("2")
    assert beyond.returncode == 2
    assert "line 3 of" in beyond.stderr
