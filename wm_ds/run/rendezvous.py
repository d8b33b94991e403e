"""Where the ranks of a SLURM job meet: the first node's address and a port that is free there.

Called by the batch script, which runs on the first node: `python -m wm_ds.run.rendezvous` prints
`MASTER_ADDR MASTER_PORT`; in a step, with the argument `local-tasks`, it prints how many tasks the node has.
Standard library only. Values that the site has set win: WM_MASTER_ADDR and WM_MASTER_PORT, or MASTER_ADDR and
MASTER_PORT set by slurm/env.sh.
"""

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping

from wm_ds.errors import WmError, run_cli

# Below 32768, where Linux begins to hand out ports to outgoing connections: those can be taken at any time.
FIRST_PORT, LAST_PORT = 10000, 32767
TRIES = 64


class RendezvousError(WmError, RuntimeError):
    """No meeting point; the message says what to set."""


def host_names(node_list: str) -> list[str]:
    """The nodes of SLURM's compact list (`gpu[003-004,010]`), in rank order, expanded by SLURM itself."""
    if shutil.which("scontrol") is None:
        raise RendezvousError(
            "scontrol is not on PATH, which expands SLURM_JOB_NODELIST; set WM_MASTER_ADDR and WM_MASTER_PORT"
        )
    shown = subprocess.run(["scontrol", "show", "hostnames", node_list], capture_output=True, text=True)
    names = shown.stdout.split()
    if shown.returncode or not names:
        raise RendezvousError(f"scontrol show hostnames {node_list!r} failed: {shown.stderr.strip()}")
    return names


def address(name: str) -> str:
    """The node's name where it resolves, else the address that SLURM itself uses for it (NodeAddr)."""
    try:
        socket.getaddrinfo(name, None)
        return name
    except OSError:
        pass
    shown = subprocess.run(["scontrol", "show", "node", "-o", name], capture_output=True, text=True)
    found = re.search(r"\bNodeAddr=(\S+)", shown.stdout)
    if found is None or found.group(1) == name:
        raise RendezvousError(f"the first node's name, {name!r}, does not resolve here; set WM_MASTER_ADDR")
    return found.group(1)


def ports(job_id: int, restarts: int = 0) -> list[int]:
    """The ports to try, in order: apart for jobs that share a node and for the restarts of one job.

    A rank of an earlier start that is still alive on a lost node must not find its master again.
    """
    span = LAST_PORT - FIRST_PORT + 1
    first = job_id * TRIES + restarts
    return [FIRST_PORT + (first + i) % span for i in range(TRIES)]


def is_free(port: int) -> bool:
    """Whether a server could listen on the port of this machine now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def master_port(environ: Mapping[str, str]) -> int:
    """WM_MASTER_PORT or MASTER_PORT, else the job's first free one. Raises RendezvousError where taken."""
    name = "WM_MASTER_PORT" if environ.get("WM_MASTER_PORT") else "MASTER_PORT"
    given = environ.get(name)
    if given:
        if not given.isdecimal() or not 0 < int(given) < 65536:
            raise RendezvousError(f"{name} is {given!r}, must be 1 to 65535")
        if not is_free(int(given)):
            raise RendezvousError(
                f"{name} {given} is in use on {socket.gethostname()}; unset it to take a free one"
            )
        return int(given)
    candidates = ports(int(environ.get("SLURM_JOB_ID", "0")), int(environ.get("SLURM_RESTART_COUNT", "0")))
    for port in candidates:
        if is_free(port):
            return port
    raise RendezvousError(
        f"ports {candidates[0]} to {candidates[-1]} are all in use on {socket.gethostname()}; "
        "set WM_MASTER_PORT"
    )


def tasks_of_nodes(tasks_per_node: str) -> list[int]:
    """How many tasks each node has, from SLURM_TASKS_PER_NODE (`4(x2),2`)."""
    counts: list[int] = []
    for part in tasks_per_node.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if found is None:
            raise RendezvousError(f"SLURM_TASKS_PER_NODE is {tasks_per_node!r}, expected the form 4(x2),2")
        counts += [int(found.group(1))] * int(found.group(2) or 1)
    return counts


def nodes_of_ranks(names: list[str], tasks_per_node: str) -> list[str]:
    """The node of each rank: ranks are laid out node by node."""
    counts = tasks_of_nodes(tasks_per_node)
    if len(counts) != len(names):
        raise RendezvousError(f"SLURM_TASKS_PER_NODE {tasks_per_node!r} does not match {len(names)} nodes")
    return [name for name, count in zip(names, counts) for _ in range(count)]


def local_tasks(environ: Mapping[str, str]) -> int:
    """How many of the step's tasks run on this node; nodes may differ."""
    counts = tasks_of_nodes(environ["SLURM_STEP_TASKS_PER_NODE"])
    node = int(environ["SLURM_NODEID"])
    if node >= len(counts):
        raise RendezvousError(f"node {node} of the step has no tasks, the step's nodes have {counts}")
    return counts[node]


def main(arguments: list[str] | None = None) -> int:
    """The batch script's command line; returns the exit code."""
    return run_cli(run, arguments)


def run(arguments: list[str] | None = None) -> None:
    """Print the meeting point's address and port, or with `local-tasks` this node's number of tasks."""
    given = sys.argv[1:] if arguments is None else arguments
    try:
        if given == ["local-tasks"]:
            print(local_tasks(os.environ))
            return
        named = os.environ.get("WM_MASTER_ADDR") or os.environ.get("MASTER_ADDR")
        print(named or address(host_names(os.environ["SLURM_JOB_NODELIST"])[0]), master_port(os.environ))
    except KeyError as error:
        raise RendezvousError(f"{error.args[0]} is not set: this runs inside a SLURM job") from None


if __name__ == "__main__":
    sys.exit(main())
