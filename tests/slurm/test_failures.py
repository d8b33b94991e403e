"""A rank that raises, dies or hangs, a node that is lost, crashes without end, on the real cluster."""

import re

import pytest

from tests.slurm.rank_program import expected_losses

pytestmark = pytest.mark.slurm


def seconds_from(log: str, start: str, end: str) -> float:
    """Between the main log's first lines with the two texts; its time stamps are whole seconds."""
    stamps = []
    for text in (start, end):
        found = re.search(rf"T(\d\d):(\d\d):(\d\d)Z[^\n]*{re.escape(text)}", log)
        assert found, f"{text!r} is not in the log:\n{log}"
        hours, minutes, seconds = map(int, found.groups())
        stamps.append(3600 * hours + 60 * minutes + seconds)
    return stamps[1] - stamps[0]


def test_a_rank_that_raises_ends_the_job_with_its_traceback_once(cluster):
    cluster.env["WM_MAX_CRASHES"] = "0"
    job = cluster.train("steps=50", "step_s=0.1", "fault=raise", "fault_rank=2", "fault_step=7")
    ended = cluster.wait_end(job, 60)
    assert (ended["JobState"], ended["ExitCode"]) == ("FAILED", "1:0")
    log = cluster.log()
    assert log.count("ZeroDivisionError: the planted fault") == 1
    assert log.count("Traceback (most recent call last)") == 1
    assert re.search(r"first failure: rank 2 on wm\d, exception, exit code 1, step 7", log)
    assert seconds_from(log, "training; follow", "exit code 1") < 60
    # The others failed because of it, and say so in their own logs only.
    assert any("ConnectionError" in text for rank, text in cluster.rank_logs(1).items() if rank != 2)


def test_a_killed_rank_ends_the_job_with_137(cluster):
    cluster.env["WM_MAX_CRASHES"] = "0"
    job = cluster.train("steps=50", "step_s=0.1", "fault=kill", "fault_rank=3", "fault_step=7")
    ended = cluster.wait_end(job, 60)
    assert (ended["JobState"], ended["ExitCode"]) == ("FAILED", "137:0")
    assert re.search(
        r"first failure: rank 3 on wm\d, killed by SIGKILL, exit code 137, step 7", cluster.log()
    )
    assert seconds_from(cluster.log(), "training; follow", "exit code 137") < 60


@pytest.mark.parametrize(("module", "code"), [("rank_program", 3), ("no_such_module", 1)])
def test_the_ranks_exit_code_is_the_jobs(cluster, module, code):
    cluster.env.update(WM_MAX_CRASHES="0", WM_TRAIN_MODULE=module)
    job = cluster.train("steps=50", "step_s=0.1", "fault=exit3", "fault_rank=1", "fault_step=3")
    waiting = cluster.sbatch(
        f"--dependency=afterok:{job}", "--kill-on-invalid-dep=yes", "-o", "/dev/null", "--wrap", "true"
    )
    ended = cluster.wait_end(job, 60)
    assert (ended["JobState"], ended["ExitCode"]) == ("FAILED", f"{code}:0")
    assert cluster.wait_end(waiting, 20)["JobState"] == "CANCELLED"


def test_a_crash_is_retried_and_the_run_completes(cluster):
    job = cluster.train("steps=30", "step_s=0.1", "save_every=5", "fault=kill", "fault_step=13")
    ended = cluster.wait_end(job)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1")
    assert [end["result"] for end in cluster.attempts()] == ["crash", "done"]
    assert cluster.attempts()[0]["exit_code"] == 137
    assert cluster.losses() == pytest.approx(expected_losses(30), rel=1e-12)
    replayed = [row["step"] for row in cluster.metrics() if row["replayed"]]
    assert replayed == [11, 12], "saved at 10, died in 13"


def test_a_refused_configuration_is_not_retried(cluster):
    job = cluster.train("steps=30", "fault=refuse", "fault_step=1")
    ended = cluster.wait_end(job, 40)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", "2:0", "0")
    assert cluster.log().count("error: global_batch 7") == 1


def test_three_crashes_at_one_step_end_the_run(cluster):
    job = cluster.train("steps=30", "step_s=0.05", "fault=raise", "fault_step=7", "fault_attempts=99")
    ended = cluster.wait_end(job, 120)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", "1:0", "2")
    assert [end["step"] for end in cluster.attempts()] == [7, 7, 7]
    assert "the last 3 crashes were all at this step" in cluster.log()


def test_crashes_are_capped(cluster):
    cluster.env.update(WM_MAX_CRASHES="1", WM_MAX_SAME_STEP="99")
    job = cluster.train("steps=30", "step_s=0.05", "fault=kill", "fault_step=7", "fault_attempts=99")
    ended = cluster.wait_end(job, 90)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", "137:0", "1")
    assert "the cap is 1 retries" in cluster.log()


def test_a_hang_ends_at_the_timeout_with_every_stack(cluster):
    cluster.env.update(WM_MAX_CRASHES="0", WM_HANG_TIMEOUT="5")
    job = cluster.train("steps=50", "step_s=0.1", "fault=hang", "fault_rank=1", "fault_step=7")
    ended = cluster.wait_end(job, 60)
    assert (ended["JobState"], ended["ExitCode"]) == ("FAILED", "71:0")
    logs = cluster.rank_logs(1)
    for rank in range(4):
        assert f"stack dump of rank {rank}" in logs[rank], logs[rank]
        place = "in fail" if rank == 1 else "in total"  # where the hang is, and where the others wait for it
        assert place in logs[rank]
    assert "first failure" in cluster.log()
    assert "hang" in cluster.log()
    assert seconds_from(cluster.log(), "training; follow", "exit code 71") < 25


def test_a_frozen_rank_is_told_apart(cluster):
    """A stopped process cannot dump its stack when the others do. SLURM wakes it to end it: then it may."""
    cluster.env.update(WM_MAX_CRASHES="0", WM_HANG_TIMEOUT="5")
    job = cluster.train("steps=50", "step_s=0.1", "fault=freeze", "fault_rank=2", "fault_step=7")
    ended = cluster.wait_end(job, 60)
    assert (ended["JobState"], ended["ExitCode"]) == ("FAILED", "71:0")
    named = re.findall(r"no stack in \S+rank(\d+).log", cluster.log())
    dumped = [rank for rank, text in cluster.rank_logs(1).items() if "stack dump of rank" in text]
    assert sorted(dumped + [int(rank) for rank in named]) == [0, 1, 2, 3]
    assert {0, 1, 3} <= set(dumped)


def test_a_lost_first_node_is_replaced(cluster):
    """slurmd of the batch script's node stops: script, srun and two ranks live on there, unheard."""
    job = cluster.train("steps=120", "step_s=0.4", "save_every=5")
    cluster.wait_step(10)
    first = cluster.call("scontrol", "show", "hostnames", cluster.job(job)["NodeList"]).split()[0]
    cluster.node("stopnode", first)
    cluster.wait("the second start", lambda: "attempt 2, master" in cluster.log(), 90)
    ended = cluster.wait_end(job, 120)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1")
    assert first not in cluster.call("scontrol", "show", "hostnames", ended["NodeList"]).split()
    assert cluster.losses() == pytest.approx(expected_losses(120), rel=1e-12)
    order = [row["attempt"] for row in cluster.metrics()]
    assert order == sorted(order), "a row of the first attempt after the second had begun"


def test_a_whole_attempt_that_lives_on_a_lost_node_ends_itself(cluster):
    """One node, so all ranks are well and go on training while SLURM starts the job again elsewhere."""
    job = cluster.train("steps=120", "step_s=0.4", "save_every=5", options=("--nodes=1",))
    cluster.wait_step(10)
    lost = cluster.job(job)["NodeList"]
    cluster.node("stopnode", lost)
    cluster.wait("the second start", lambda: "attempt 2, master" in cluster.log(), 90)
    assert "did not end by itself" in cluster.log(), "the second attempt met a living first one"
    ended = cluster.wait_end(job, 120)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1")
    assert ended["NodeList"] != lost
    assert cluster.losses() == pytest.approx(expected_losses(120), rel=1e-12)
    order = [row["attempt"] for row in cluster.metrics()]
    assert order == sorted(order), "a row of the first attempt after the second had begun"
    assert any("superseded by a newer one: this rank ends" in text for text in cluster.rank_logs(1).values())
