"""Where ranks meet: names, addresses, ports."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from wm_ds.run import rendezvous
from wm_ds.run.rendezvous import RendezvousError, master_port, nodes_of_ranks, ports

ROOT = Path(__file__).parents[2]


@pytest.fixture
def scontrol(tmp_path, monkeypatch):
    """A scontrol that knows a few lists and one node's address."""
    program = tmp_path / "bin" / "scontrol"
    program.parent.mkdir()
    program.write_text(
        """#!/bin/sh
case "$*" in
"show hostnames gpu[003-004,010]") printf 'gpu003\\ngpu004\\ngpu010\\n' ;;
"show hostnames a-b-[1,3]") printf 'a-b-1\\na-b-3\\n' ;;
"show hostnames localhost") echo localhost ;;
"show node -o gpu003") echo 'NodeName=gpu003 Arch=x86_64 NodeAddr=10.1.2.3 NodeHostName=gpu003' ;;
*) echo "Invalid node" >&2; exit 1 ;;
esac
"""
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.usefixtures("scontrol")
@pytest.mark.parametrize(
    ("nodes", "given", "address"),
    [
        ("localhost", None, "localhost"),
        ("gpu[003-004,010]", None, "10.1.2.3"),  # the name does not resolve here: SLURM's address
        ("gpu[003-004,010]", "ib-gpu003", "ib-gpu003"),  # the user knows better
    ],
)
def test_address_of_the_first_node(nodes, given, address):
    env = {**os.environ, "SLURM_JOB_NODELIST": nodes, "SLURM_JOB_ID": "1234567"}
    env.pop("MASTER_PORT", None)
    env.pop("MASTER_ADDR", None)
    if given:
        env["MASTER_ADDR"] = given
    found = subprocess.run(
        [sys.executable, "-m", "wm_ds.run.rendezvous"], env=env, cwd=ROOT, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr
    shown, port = found.stdout.split()
    assert shown == address
    assert 1024 < int(port) < 32768


@pytest.mark.usefixtures("scontrol")
def test_what_cannot_be_resolved_is_said():
    with pytest.raises(RendezvousError, match="'a-b-1', does not resolve here; set WM_MASTER_ADDR"):
        rendezvous.address("a-b-1")
    with pytest.raises(RendezvousError, match="Invalid node"):
        rendezvous.host_names("nonsense[")


def test_without_scontrol(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(RendezvousError, match="scontrol is not on PATH"):
        rendezvous.host_names("n[1-2]")


@pytest.mark.parametrize("job", [0, 1, 1234567, 1234567 + 16384, 2**31])
def test_ports_lie_below_the_ephemeral_range(job):
    for restarts in (0, 1, 50):
        assert all(10000 <= port < 32768 for port in ports(job, restarts))
    assert ports(job, 0)[0] != ports(job, 1)[0]


def test_a_port_in_use_is_passed_over():
    job = 4711
    with socket.socket() as taken:
        taken.bind(("", ports(job)[0]))
        taken.listen()
        assert master_port({"SLURM_JOB_ID": str(job)}) == ports(job)[1]
        with pytest.raises(RendezvousError, match=f"MASTER_PORT {ports(job)[0]} is in use"):
            master_port({"MASTER_PORT": str(ports(job)[0])})


def test_a_port_that_is_none():
    with pytest.raises(RendezvousError, match="'abc', must be 1 to 65535"):
        master_port({"MASTER_PORT": "abc"})


def test_a_step_asks_for_the_tasks_of_its_node():
    def ask(node, tasks="4(x2),2"):
        env = {**os.environ, "SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": str(node)}
        command = [sys.executable, "-m", "wm_ds.run.rendezvous", "local-tasks"]
        return subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)

    assert [ask(node).stdout for node in (0, 1, 2)] == ["4\n", "4\n", "2\n"]
    wrong = ask(3)
    assert wrong.returncode == 1
    assert wrong.stderr.startswith("error: node 3 of the step has no tasks")


def test_what_the_site_sets_wins():
    job = {"SLURM_JOB_ID": "4712"}
    assert master_port(job | {"WM_MASTER_PORT": "23456", "MASTER_PORT": "23457"}) == 23456
    with pytest.raises(RendezvousError, match="WM_MASTER_PORT is 'x', must be 1 to 65535"):
        master_port(job | {"WM_MASTER_PORT": "x"})


def test_ranks_on_uneven_nodes():
    assert nodes_of_ranks(["a", "b"], "4,2") == ["a"] * 4 + ["b"] * 2
    assert nodes_of_ranks(["a", "b", "c"], "4(x2),2") == ["a"] * 4 + ["b"] * 4 + ["c"] * 2
    with pytest.raises(RendezvousError, match="does not match 2 nodes"):
        nodes_of_ranks(["a", "b"], "4")
