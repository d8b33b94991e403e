"""The check of the nodes, ports, uneven nodes, singleton, what sbatch and shellcheck say to the scripts."""

import re
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from tests.slurm.rank_program import expected_losses
from wm_ds.run.rendezvous import ports

pytestmark = pytest.mark.slurm
ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((ROOT / "slurm").glob("*.sbatch"))


def wrap_python(cluster, body):
    """A python for the ranks that does something else on one node first."""
    wrapper = cluster.folder / "python"
    wrapper.write_text(f'#!/bin/bash\nnode=$(hostname)\n{body}\nexec {cluster.env["WM_PYTHON"]} "$@"\n')
    wrapper.chmod(0o755)
    cluster.env.update(WM_BATCH_PYTHON=cluster.env["WM_PYTHON"], WM_PYTHON=str(wrapper))


def test_fit_nodes_pass_the_check(cluster):
    job = cluster.train("steps=3", check_nodes=True)
    assert cluster.wait_end(job, 120)["JobState"] == "COMPLETED"
    assert len(re.findall(r"launch check: 2 nodes, 4 ranks \(CPU\).*: fit", cluster.log())) == 1


def test_the_check_names_the_node_with_a_full_disk(cluster):
    # The checkout, which may lie in the /tmp that is hidden on that node, is put back in its place.
    hide = (
        f"mount --bind {ROOT} /mnt && mount -t tmpfs -o size=2M tmpfs /tmp && "
        f"mkdir -p {ROOT} && mount --bind /mnt {ROOT}"
    )
    wrap_python(
        cluster,
        '[ $node != wm2 ] || [[ "$*" != *launch_check* ]] || exec unshare --mount bash -c '
        f'\'{hide} && exec "$@"\' _ {cluster.env["WM_PYTHON"]} "$@"',
    )
    # Nor may the run directory lie there.
    cluster.run_dir = ROOT / "build" / f"check-{cluster.folder.name}"
    try:
        job = cluster.train("steps=3", check_nodes=True, options=("--nodelist=wm1,wm2",))
        ended = cluster.wait_end(job, 120)
    finally:
        shutil.rmtree(cluster.run_dir, ignore_errors=True)
    assert (ended["JobState"], ended["ExitCode"]) == ("FAILED", "72:0")
    assert re.search(r"launch check: wm2: /tmp has 0.0 GiB free, 0.1 are required", cluster.log())
    assert "launch check: wm1" not in cluster.log()


def test_the_check_names_the_node_that_does_not_answer(cluster):
    cluster.env["WM_CHECK_SECONDS"] = "12"
    wrap_python(cluster, '[ $node != wm2 ] || [[ "$*" != *launch_check* ]] || exec sleep 40')
    job = cluster.train("steps=3", check_nodes=True, options=("--nodelist=wm1,wm2",))
    ended = cluster.wait_end(job, 120)
    assert (ended["JobState"], ended["ExitCode"]) == ("FAILED", "72:0")
    assert re.search(r"launch check: wm2: rank [23] was not heard of", cluster.log())


def test_an_unreachable_master_is_named(cluster):
    cluster.env.update(WM_CHECK_SECONDS="8", WM_MASTER_ADDR="192.0.2.1", WM_MASTER_PORT="12345")
    job = cluster.train("steps=3", check_nodes=True)
    ended = cluster.wait_end(job, 90)
    assert (ended["JobState"], ended["ExitCode"]) == ("FAILED", "72:0")
    assert "192.0.2.1:12345" in cluster.log()


def test_a_meeting_point_left_in_the_shell_that_submits_is_not_used(cluster):
    cluster.env.update(MASTER_ADDR="192.0.2.1", MASTER_PORT="12345", RANK="7", WORLD_SIZE="9", LOCAL_RANK="7")
    job = cluster.train("steps=3")
    assert cluster.wait_end(job, 90)["JobState"] == "COMPLETED"
    assert "192.0.2.1" not in cluster.log()


def test_a_port_in_use_is_passed_over(cluster):
    held = cluster.sbatch("--hold", "--wrap", "true", "-o", "/dev/null")
    candidates = ports(int(held) + 1)
    with socket.create_server(("", candidates[0])):
        job = cluster.train("steps=3")
        assert int(job) == int(held) + 1
        assert cluster.wait_end(job)["JobState"] == "COMPLETED"
    assert f":{candidates[1]}" in cluster.log()


def test_uneven_nodes_and_another_number_of_ranks(cluster):
    """Three ranks on two nodes; stopped, and continued by six ranks on three nodes."""
    job = cluster.train(
        "steps=200", "step_s=0.2", "save_every=1000", options=("--ntasks=3", "--ntasks-per-node=2")
    )
    cluster.wait_step(5)
    assert sorted(re.findall(r"rank (\d) of 3", "".join(cluster.rank_logs(1).values()))) == ["0", "1", "2"]
    (cluster.run_dir / "STOP").touch()
    cluster.wait_end(job, 30)
    (cluster.run_dir / "STOP").unlink()
    job = cluster.train("steps=30", "step_s=0.05", options=("--nodes=3", "--ntasks-per-node=2"))
    assert cluster.wait_end(job)["JobState"] == "COMPLETED"
    assert "rank 5 of 6" in cluster.rank_logs(2)[5]
    assert cluster.losses() == pytest.approx(expected_losses(30), rel=1e-12)


def test_two_jobs_of_one_run_follow_one_another(cluster):
    """slurm/submit.sh twice for one run: the second waits (singleton), and finds the run complete."""
    cluster.env["WM_SBATCH_EXTRA"] = f"--open-mode=append --time=5 --output={cluster.main_log}"
    cluster.env["WM_CHECK_MODULE"] = "rank_program"
    command = ["slurm/submit.sh", "--stages", "train", "--run", str(cluster.run_dir), "tests/slurm/tiny.yaml"]
    settings = ["steps=40", "step_s=0.1"]
    jobs = [re.search(r"job (\d+)", cluster.call(*command, *settings)).group(1) for _ in range(2)]
    cluster.jobs += jobs
    cluster.wait_step(3)
    assert (cluster.state(jobs[0]), cluster.state(jobs[1])) == ("RUNNING", "PENDING")
    assert cluster.job(jobs[1])["Reason"] == "Dependency"
    assert [cluster.wait_end(job)["JobState"] for job in jobs] == ["COMPLETED", "COMPLETED"]
    assert len(cluster.attempts()) == 1


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_sbatch_accepts_the_script(cluster, script):
    for options in ((), ("--nodes=2", "--ntasks-per-node=8", "--gpus-per-node=8", "--exclusive")):
        if script.name == "pretrain.sbatch" or not options:
            cluster.call("sbatch", "--test-only", *options, str(script), "a", "b")
    refused = subprocess.run(
        ["sbatch", "--test-only", "--gpus-per-node=9", str(script)], env=cluster.env, capture_output=True
    )
    assert refused.returncode != 0, "--test-only refuses nothing here, so that it accepts means nothing"


def test_shellcheck(cluster):
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed and could not be fetched")
    scripts = [*SCRIPTS, *sorted((ROOT / "slurm").glob("*.sh")), ROOT / "tests" / "slurm" / "cluster.sh"]
    assert len(scripts) > 7
    found = subprocess.run(
        ["shellcheck", "-x", *map(str, scripts)], cwd=ROOT, capture_output=True, text=True, env=cluster.env
    )
    assert found.returncode == 0, found.stdout
