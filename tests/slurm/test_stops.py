"""A job that is preempted, reaches its time limit, is cancelled, or is told to stop, on the real cluster."""

import os
import signal
import time

import pytest

from tests.slurm.rank_program import expected_losses

pytestmark = pytest.mark.slurm


def test_two_nodes_with_two_ranks_finish(cluster):
    job = cluster.train("steps=12", "step_s=0.05")
    assert cluster.wait_end(job)["JobState"] == "COMPLETED"
    assert cluster.losses() == pytest.approx(expected_losses(12), rel=1e-12)
    assert [end["result"] for end in cluster.attempts()] == ["done"]
    assert set(cluster.rank_logs(1)) == {0, 1, 2, 3}
    nodes = [cluster.rank_logs(1)[rank].split(" from")[0].split(" on ")[1] for rank in range(4)]
    assert nodes[0] == nodes[1] != nodes[2] == nodes[3]

    again = cluster.train("steps=12")
    assert cluster.wait_end(again, 20)["JobState"] == "COMPLETED"
    assert "already complete" in cluster.log()
    assert len(cluster.attempts()) == 1, "a finished run claims nothing"


def test_preempted_and_finishes_with_the_same_losses(cluster):
    job = cluster.train("steps=60", "step_s=0.2", "save_every=1000")
    cluster.wait_step(10)
    urgent = cluster.sbatch(
        "-p", "urgent", "--nodes=4", "--exclusive", "--time=1", "-o", "/dev/null", "--wrap", "sleep 3"
    )
    assert cluster.wait_end(urgent)["JobState"] == "COMPLETED"
    ended = cluster.wait_end(job)
    assert ended["JobState"] == "COMPLETED"
    assert ended["Restarts"] == "1"
    assert [end["result"] for end in cluster.attempts()] == ["stopped", "done"]
    # Nothing lost and nothing replayed: each step once, and the numbers of a run that nobody disturbed.
    assert [row["step"] for row in cluster.metrics()] == list(range(1, 61))
    assert cluster.losses() == pytest.approx(expected_losses(60), rel=1e-12)
    assert cluster.log().count("attempt 1, master") == 1, "the main log was overwritten"
    assert cluster.log().count("attempt 2, master") == 1


def test_usr1_before_the_time_limit(cluster):
    """SLURM sends it to the batch shell alone, here soon after the start: the limit is one minute."""
    job = cluster.train(
        "steps=250", "step_s=0.2", "save_every=1000", options=("--time=1", "--signal=B:USR1@40")
    )
    cluster.wait("requeue", lambda: cluster.job(job)["Restarts"] == "1", 90)
    ended = cluster.wait_end(job, 150)
    assert ended["JobState"] == "COMPLETED"
    results = [end["result"] for end in cluster.attempts()]  # the second start may meet its limit too
    assert len(results) >= 2
    assert results == ["stopped"] * (len(results) - 1) + ["done"]
    assert [row["step"] for row in cluster.metrics()] == list(range(1, 251))
    assert cluster.losses() == pytest.approx(expected_losses(250), rel=1e-12)


@pytest.mark.parametrize("moment", ["attempt 1, master", "training; follow it"])
def test_usr1_sent_while_the_ranks_are_starting_is_not_lost(cluster, moment):
    job = cluster.train("steps=200", "step_s=0.2", "save_every=1000")
    cluster.wait("the batch script", lambda: moment in cluster.log())
    cluster.call("scancel", "--signal=USR1", "--batch", job)
    cluster.wait("requeue", lambda: cluster.job(job)["Restarts"] == "1", 60)
    assert cluster.attempts()[0]["result"] == "stopped"


def test_a_time_limit_shorter_than_the_grace_ends_after_three_starts_and_says_why(cluster):
    """SLURM asks to stop when it next looks, every half minute; the ranks take longer to be ready."""
    job = cluster.train("steps=500", "start_s=32", options=("--time=1", "--signal=B:USR1@180"))
    ended = cluster.wait_end(job, 150)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", "74:0", "2")
    assert [end["no_progress"] for end in cluster.attempts()] == [True] * 3
    assert "the last 3 starts were asked to stop before they had taken a step" in cluster.log()
    assert "SLURM does not requeue" not in cluster.log()


def test_a_run_directory_whose_name_looks_like_a_pattern_or_a_list(cluster):
    cluster.run_dir = cluster.folder / "a %j b,c=d;e:f [x] {y} #z"
    (cluster.run_dir / "logs").mkdir(parents=True)
    main_log = (
        f"--output={str(cluster.run_dir).replace('%', '%%')}/logs/train-%j.log"  # as submit.sh gives it
    )
    job = cluster.train("steps=5", "step_s=0.05", options=(main_log,))
    assert cluster.wait_end(job)["JobState"] == "COMPLETED"
    assert cluster.losses() == pytest.approx(expected_losses(5), rel=1e-12)
    logs = {path.name for path in (cluster.run_dir / "logs").iterdir()}
    assert logs == {f"train-{job}.log", "rank0.log", *(f"{job}.0001.rank{rank:03d}.log" for rank in range(4))}
    assert "rank 0 of 4" in (cluster.run_dir / "logs" / "rank0.log").read_text()


@pytest.mark.parametrize("receiver", ["the step", "one rank"])
def test_usr1_that_does_not_reach_the_batch_script(cluster, receiver):
    job = cluster.train("steps=40", "step_s=0.2", "save_every=1000")
    cluster.wait_step(5)
    if receiver == "the step":
        cluster.call("scancel", "--signal=USR1", f"{job}.1")
    else:
        os.kill(cluster.pid_of_rank(3), signal.SIGUSR1)
    assert cluster.wait_end(job)["Restarts"] == "1"
    assert [end["result"] for end in cluster.attempts()] == ["stopped", "done"]
    assert [row["step"] for row in cluster.metrics()] == list(range(1, 41))
    assert cluster.losses() == pytest.approx(expected_losses(40), rel=1e-12)


def test_usr2_shows_where_every_rank_is_and_disturbs_nothing(cluster):
    job = cluster.train("steps=40", "step_s=0.2")
    cluster.wait_step(5)
    cluster.call("scancel", "--signal=USR2", f"{job}.1")
    ended = cluster.wait_end(job)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "0")
    assert all("in main" in log for log in cluster.rank_logs(1).values())
    assert cluster.losses() == pytest.approx(expected_losses(40), rel=1e-12)


def test_scancel_stays_cancelled(cluster):
    job = cluster.train("steps=500", "step_s=0.2")
    cluster.wait_step(5)
    cluster.call("scancel", job)
    ended = cluster.wait_end(job, 40)
    assert ended["JobState"] == "CANCELLED"
    assert ended["Restarts"] == "0"
    time.sleep(8)  # longer than a requeued job waits here
    assert cluster.state(job) == "CANCELLED"
    assert not cluster.call("squeue", "-h").strip()


def test_stop_file_stops_at_the_next_step_and_holds(cluster):
    job = cluster.train("steps=500", "step_s=0.2", "save_every=1000")
    cluster.wait_step(5)
    (cluster.run_dir / "STOP").touch()
    ended = cluster.wait_end(job, 30)
    assert ended["JobState"] == "FAILED"  # so that an export that waits for it with afterok does not start
    assert ended["ExitCode"] == "73:0"
    stopped_at = cluster.attempts()[0]["step"]
    assert cluster.metrics()[-1]["step"] == stopped_at
    assert "remove" in cluster.log()

    held = cluster.train("steps=500")
    assert cluster.wait_end(held, 20)["ExitCode"] == "73:0"
    (cluster.run_dir / "STOP").unlink()
    job = cluster.train(f"steps={stopped_at + 5}", "step_s=0.05")
    assert cluster.wait_end(job)["JobState"] == "COMPLETED"
    assert cluster.losses() == pytest.approx(expected_losses(stopped_at + 5), rel=1e-12)
