"""A rank that keeps the trainer's promises to SLURM and trains nothing: starts in a tenth of a second.

Same command line, markers, exit codes, signals, attempts and watchdog as `wm_ds.train`; the process group is
a few sockets, the model is one number. Settings come as key=value: steps, start_s, step_s, save_every, and
a fault (`raise`, `exit3`, `kill`, `hang`, `freeze`, `refuse`) of `fault_rank` at
`fault_step`, in attempts up to `fault_attempts`.
"""

import json
import math
import os
import signal
import socket
import sys
import time
from pathlib import Path

from wm_ds.run.claim import Attempt, join
from wm_ds.run.watchdog import Watchdog


class Group:
    """Sums of numbers over the ranks, through sockets to rank 0; a dead peer is an error, as in gloo."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.peers = rank, []
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        if rank == 0:
            server = socket.create_server(("", port), backlog=world)
            sockets = [server.accept()[0] for _ in range(world - 1)]
        else:
            for _ in range(200):
                try:
                    sockets = [socket.create_connection((address, port), timeout=5)]
                    break
                except OSError:
                    time.sleep(0.05)
            sockets[0].settimeout(None)
        self.files = [(s.makefile("r"), s.makefile("w")) for s in sockets]

    def _receive(self, file) -> list[float]:
        line = file.readline()
        if not line:
            raise ConnectionError("connection closed by peer")
        return json.loads(line)

    def _send(self, file, values: list[float]) -> None:
        file.write(json.dumps(values) + "\n")
        file.flush()

    def total(self, values: list[float]) -> list[float]:
        if self.rank:
            reader, writer = self.files[0]
            self._send(writer, values)
            return self._receive(reader)
        rows = [values] + [self._receive(reader) for reader, _ in self.files]
        sums = [math.fsum(column) for column in zip(*rows)]
        for _, writer in self.files:
            self._send(writer, sums)
        return sums


def next_state(state: float, step: int, parts: float) -> float:
    return 0.9 * state + 0.1 * math.sin(step) * parts


def contribution(step: int, rank: int, world: int) -> float:
    """This rank's share of a sum over 12 samples: the same sum for 1, 2, 3, 4, 6 and 12 ranks."""
    return math.fsum(math.cos(step * sample) for sample in range(rank, 12, world))


def expected_losses(steps: int) -> list[float]:
    """What an uninterrupted run writes, computed by one process."""
    state, losses = 1.0, []
    for step in range(1, steps + 1):
        state = next_state(state, step, contribution(step, 0, 1))
        losses.append(state)
    return losses


def fail(kind: str) -> None:
    if kind == "raise":
        raise ZeroDivisionError("the planted fault")
    if kind == "refuse":
        print("error: global_batch 7 does not divide over 4 ranks", file=sys.stderr)
        sys.exit(2)
    if kind == "exit3":
        sys.exit(3)
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "freeze":
        os.kill(os.getpid(), signal.SIGSTOP)
    while kind == "hang":
        time.sleep(60)


def publish(attempt: Attempt, step: int, state: float) -> None:
    attempt.check()
    folder = attempt.run_dir / "checkpoints"
    folder.mkdir(exist_ok=True)
    part = folder / f".part{attempt.number}"
    part.write_text(json.dumps({"step": step, "state": state, "attempt": attempt.number}))
    part.rename(folder / "latest")


def main() -> None:
    if sys.argv[1] == "--run-dir":  # called as the check of the nodes
        return
    options = dict(arg.split("=", 1) for arg in sys.argv[2:])
    run_dir = Path(options["run.dir"])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    steps, save_every = int(options.get("steps", 20)), int(options.get("save_every", 5))
    told = []
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, lambda n, _: told.append(n))
    attempt = join(run_dir)
    group = Group(rank, world)
    watchdog = Watchdog(attempt, rank=rank, local_rank=int(os.environ["LOCAL_RANK"]), world=world).start()
    step, state, highest = 0, 1.0, 0
    if (run_dir / "checkpoints" / "latest").exists():
        saved = json.loads((run_dir / "checkpoints" / "latest").read_text())
        step, state = saved["step"], saved["state"]
    metrics = run_dir / "metrics.jsonl"
    if metrics.exists():
        highest = max(json.loads(line)["step"] for line in metrics.read_text().splitlines())
    print(f"rank {rank} of {world} on {socket.gethostname()} from step {step}", flush=True)
    time.sleep(float(options.get("start_s", 0)))
    # As the trainer does: who is asked to stop while it starts does not begin.
    reason = "SIGUSR1" if group.total([float(signal.SIGUSR1 in told)])[0] else None
    began = step
    while step < steps and reason is None:
        step += 1
        watchdog.beat(step)
        time.sleep(float(options.get("step_s", 0.1)))
        if (
            step == int(options.get("fault_step", -1))
            and rank == int(options.get("fault_rank", 1))
            and attempt.number <= int(options.get("fault_attempts", 1))
        ):
            fail(options["fault"])
        stop_file = float(rank == 0 and (run_dir / "STOP").exists())
        parts, signals, stop_files = group.total(
            [contribution(step, rank, world), float(bool(told)), stop_file]
        )
        state = next_state(state, step, parts)
        reason = "signal" if signals else "STOP file" if stop_files else None
        if rank == 0:
            with open(metrics, "a") as log:
                row = {"step": step, "loss": state, "attempt": attempt.number, "replayed": step <= highest}
                print(json.dumps(row), file=log)
            if reason or step == steps or step % save_every == 0:
                publish(attempt, step, state)
    group.total([0.0])
    if rank == 0:
        marker = "stopped" if reason and step < steps else "done"
        attempt.check()
        (run_dir / marker).write_text(json.dumps({"step": step, "reason": reason, "began": began}))
    group.total([0.0])
    watchdog.stop()


if __name__ == "__main__":
    main()
