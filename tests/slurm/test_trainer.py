"""The real trainer, packer, exporter and evaluator on the real cluster, with the tiny model of tiny.yaml."""

import json
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slurm
DEADLINE_S = 420  # four ranks that import torch and DeepSpeed on two busy cores
ROOT = Path(__file__).resolve().parents[2]
CONFIG = "tests/slurm/tiny.yaml"
STEPS = 12
PACK = ["--txt-split=blank-lines", "--seq-len=48", "--holdout=16", "--shard-bytes=20000"]


@pytest.fixture(scope="session")
def texts(tmp_path_factory):
    """A folder of texts and a tokenizer for them."""
    folder = tmp_path_factory.mktemp("texts")
    chance = random.Random(0)
    words = ["".join(chance.choices("abcdefghijklmnop", k=chance.randint(2, 7))) for _ in range(300)]
    for name in ("a.txt", "b.txt"):
        documents = [" ".join(chance.choices(words, k=chance.randint(20, 80))) for _ in range(100)]
        (folder / name).write_text("\n\n".join(documents))
    command = [
        sys.executable,
        "tools/train_tokenizer.py",
        "--input",
        str(folder / "a.txt"),
        "--txt-split",
        "blank-lines",
    ]
    subprocess.run(
        [*command, "--vocab-size", "400", "--output", str(folder / "tokenizer")], cwd=ROOT, check=True
    )
    return folder


@pytest.fixture(scope="session")
def finished():
    """What the uninterrupted run left: filled by the chain's test, which runs first in this file."""
    return {}


def real(cluster):
    cluster.env.pop("WM_TRAIN_MODULE", None)
    cluster.env.update(
        WM_SBATCH_EXTRA="--open-mode=append",
        WM_CHECK_MODULE="rank_program",
        WM_SLICES="2",
        WM_TRAIN_TIME="10",
        WM_CPU_TIME="10",
    )


def submit(cluster, *arguments):
    """slurm/submit.sh: the jobs by stage."""
    shown = cluster.call("slurm/submit.sh", "--run", str(cluster.run_dir), *arguments)
    jobs = dict(re.findall(r"^(\w+) +job (\d+)", shown, re.MULTILINE))
    cluster.jobs += jobs.values()
    return jobs


def submit_training(cluster, finished, *arguments, **environment):
    """The job of training alone, on what the chain's test packed; skips where that has not run."""
    if not finished:
        pytest.skip("needs the run of test_pack_train_export_evaluate")
    real(cluster)
    cluster.env.update(environment)
    options = [argument for argument in arguments if argument.startswith("--")]
    settings = [argument for argument in arguments if argument not in options]
    data = f"data.train={finished['data']}"
    return submit(cluster, "--stages=train", *options, CONFIG, data, *settings)["train"]


def assert_nothing_lost(cluster, finished, job):
    """Stopped once and gone on: each step once, with the losses of the run that nobody disturbed."""
    ended = cluster.wait_end(job, 240)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1")
    assert [end["result"] for end in cluster.attempts()] == ["stopped", "done"]
    steps = [row["step"] for row in cluster.metrics() if "loss" in row]
    assert steps == list(range(1, STEPS + 1)), "lost or replayed a step"
    assert cluster.losses() == finished["losses"], "bitwise"


def train_log(cluster, job):
    return (cluster.run_dir / "logs" / f"train-{job}.log").read_text()


def test_pack_train_export_evaluate(cluster, texts, finished, tmp_path_factory):
    real(cluster)
    del cluster.env["WM_CHECK_MODULE"]
    data = tmp_path_factory.mktemp("packed") / "data"
    inputs = [str(texts / "a.txt"), str(texts / "b.txt")]
    jobs = submit(
        cluster,
        *(f"--input={path}" for path in inputs),
        f"--tokenizer={texts}/tokenizer",
        *(f"--pack={argument}" for argument in PACK),
        f"--data={data}",
        "--evaluate=perplexity",
        f"--evaluate={cluster.run_dir}",
        f"--evaluate=--json={cluster.run_dir}/perplexity.json",
        "--evaluate=--exact=1",
        CONFIG,
        f"steps={STEPS}",
    )
    assert list(jobs) == ["pack", "merge", "train", "export", "evaluate"]
    for stage, job in jobs.items():
        assert cluster.wait_end(job, 300)["JobState"] == "COMPLETED", f"{stage}\n{cluster.everything()}"
        if stage == "train":
            finished.update(data=data, losses=cluster.losses())
    assert "launch check: 2 nodes, 4 ranks (CPU)" in train_log(cluster, jobs["train"])
    steps = [row["step"] for row in cluster.metrics() if "loss" in row]
    assert steps == list(range(1, STEPS + 1))
    assert (cluster.run_dir / "export" / "config.json").exists()
    assert json.loads((cluster.run_dir / "perplexity.json").read_text())
    # The two slices made what one process makes.
    whole = tmp_path_factory.mktemp("whole") / "data"
    inputs = [str(texts / "a.txt"), str(texts / "b.txt")]
    command = [
        sys.executable,
        "tools/pack_data.py",
        "--input",
        *inputs,
        "--tokenizer",
        str(texts / "tokenizer"),
    ]
    subprocess.run([*command, *PACK, "--output", str(whole), "--workers=1"], cwd=ROOT, check=True)
    files = sorted(path.name for path in whole.iterdir() if path.suffix not in (".json", ".log"))
    assert files
    for name in files:
        if (whole / name).is_file():
            assert (data / name).read_bytes() == (whole / name).read_bytes(), name


def test_preempted_and_finishes_with_the_losses_of_an_uninterrupted_run(cluster, finished):
    job = submit_training(cluster, finished, f"steps={STEPS}", "checkpoint.every=1000")
    cluster.wait_step(4, 200)
    urgent = cluster.sbatch(
        "-p", "urgent", "--nodes=4", "--exclusive", "--time=1", "-o", "/dev/null", "--wrap", "sleep 1"
    )
    assert cluster.wait_end(urgent)["JobState"] == "COMPLETED"
    assert_nothing_lost(cluster, finished, job)
    assert {row["attempt"] for row in cluster.metrics() if "loss" in row} == {1, 2}


def test_usr1_saves_requeues_and_goes_on_with_the_same_losses(cluster, finished):
    """As before the time limit, here while the ranks still import: it is repeated until they hear it."""
    job = submit_training(cluster, finished, f"steps={STEPS}", "checkpoint.every=1000")
    started = cluster.run_dir / "logs" / f"train-{job}.log"
    cluster.wait("the ranks", lambda: started.exists() and "training; follow it" in started.read_text(), 100)
    cluster.call("scancel", "--signal=USR1", "--batch", job)
    assert_nothing_lost(cluster, finished, job)


def test_a_batch_that_does_not_divide_is_refused_with_the_choices(cluster, finished):
    job = submit_training(cluster, finished, "--nodes=1", "--gpus-per-node=3")
    ended = cluster.wait_end(job, 200)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", "2:0", "0")
    refusal = "error: global_batch 4 does not divide over 3 ranks x micro_batch 1; use "
    assert train_log(cluster, job).count(refusal) == 1


def test_a_rank_that_raises(cluster, finished):
    job = submit_training(
        cluster, finished, WM_TRAIN_MODULE="faulty_train", FAULT="raise:2:4", WM_MAX_CRASHES="0"
    )
    ended = cluster.wait_end(job, 240)
    assert (ended["JobState"], ended["ExitCode"]) == ("FAILED", "1:0")
    log = train_log(cluster, job)
    assert log.count("ZeroDivisionError: the planted fault") == 1
    assert re.search(r"first failure: rank 2 on wm\d, exception, exit code 1, step 4", log)


def test_a_killed_rank_is_replaced_and_the_losses_are_the_same(cluster, finished):
    job = submit_training(
        cluster, finished, f"steps={STEPS}", WM_TRAIN_MODULE="faulty_train", FAULT="kill:3:8"
    )
    ended = cluster.wait_end(job, 300)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1")
    assert [(end["result"], end.get("exit_code")) for end in cluster.attempts()] == [
        ("crash", 137),
        ("done", None),
    ]
    assert cluster.losses() == finished["losses"], "bitwise, though steps 6 and 7 were taken twice"
    log = train_log(cluster, job)
    assert re.search(r"first failure: rank 3 on wm\d, killed by SIGKILL, exit code 137, step 8", log)
    replayed = [row["step"] for row in cluster.metrics() if row.get("replayed") and "loss" in row]
    assert replayed == [6, 7]


def test_a_rank_that_hangs(cluster, finished):
    job = submit_training(
        cluster,
        finished,
        WM_TRAIN_MODULE="faulty_train",
        FAULT="hang:1:4",
        WM_MAX_CRASHES="0",
        WM_HANG_TIMEOUT="40",
    )
    ended = cluster.wait_end(job, 240)
    assert (ended["JobState"], ended["ExitCode"]) == ("FAILED", "71:0")
    logs = cluster.rank_logs(1)
    for rank in range(4):
        assert f"stack dump of rank {rank}" in logs[rank]
    assert "in fail" in logs[1]
    assert all("all_reduce" in logs[rank] for rank in (0, 2, 3)), "the others wait in a collective"


def test_a_failed_slice_cancels_what_waits_for_it(cluster, texts):
    real(cluster)
    bad = cluster.folder / "bad.jsonl"
    bad.write_text('{"text": "good"}\n' * 2000 + "not JSON\n")
    jobs = submit(
        cluster,
        f"--input={bad}",
        f"--tokenizer={texts}/tokenizer",
        f"--data={cluster.folder}/data",
        "--pack=--seq-len=32",
        "--pack=--shard-bytes=10000",
        CONFIG,
    )
    states = {stage: cluster.wait_end(job, 90)["JobState"] for stage, job in jobs.items() if stage != "pack"}
    assert states == dict.fromkeys(("merge", "train", "export", "evaluate"), "CANCELLED")
    slices = cluster.call("scontrol", "show", "job", "-o", jobs["pack"])
    assert sorted(re.findall(r"JobState=(\w+)", slices)) == ["COMPLETED", "FAILED"]
    logs = "".join(path.read_text() for path in (cluster.run_dir / "logs").glob("pack-*.log"))
    assert re.search(r"error: .*bad\.jsonl", logs)
    assert not (cluster.run_dir / "attempts").exists()
    time.sleep(1)
    assert not cluster.call("squeue", "-h").strip()
