"""The packing command in real processes, with real signals and a full disk."""

import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.support import toy_corpus
from tests.support.terminal import read_to_the_end
from tests.support.toy_corpus import (
    pack,
    pack_process,
    packed_bytes,
    run,
    write_jsonl,
)
from wm_ds.data import shards

pytestmark = pytest.mark.alone


class TestProcesses:
    """Real processes and real signals."""

    OPTIONS = ("--seq-len", 64, "--align", 8, "--holdout", 5, "--shard-bytes", 100_000)

    @pytest.fixture(scope="class")
    @classmethod
    def source(cls, tmp_path_factory):
        generator = random.Random(1)
        words = ["the", "winter", "rivers", "in", "other", "\u00e9t\u00e9", "12", "\n"]
        path = tmp_path_factory.mktemp("in") / "in.jsonl"
        return write_jsonl(
            path,
            [f"{i} " + " ".join(generator.choices(words, k=generator.randint(1, 900))) for i in range(1500)],
        )

    @pytest.fixture(scope="class")
    @classmethod
    def expected(cls, source, tok, tmp_path_factory):
        out = tmp_path_factory.mktemp("expected") / "out"
        assert pack(out, [source], tok, *cls.OPTIONS) == 0
        return packed_bytes(out)

    def start(self, out, source, tok, *options):
        command = pack_process(out, [source], tok, *self.OPTIONS, "--workers", 2, *options)
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def wait_for_shards(self, process, out, count):
        deadline = time.monotonic() + 60
        while len([s for s in out.glob("shard-*") if ".tmp-" not in s.name]) < count:
            assert time.monotonic() < deadline
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.01)

    def finish(self, out, source, tok, expected):
        assert pack(out, [source], tok, *self.OPTIONS) == 0
        assert packed_bytes(out) == expected

    def kill_at_random(self, out, source, tok, expected, generator):
        process = self.start(out, source, tok)
        self.wait_for_shards(process, out, generator.randint(0, 12))
        time.sleep(generator.random() * 0.3)
        process.kill()
        process.communicate(timeout=30)
        for record in out.glob("shard-*/shard.json"):
            if ".tmp-" not in str(record):
                shards.verify_shard(out, json.loads(record.read_text()))
        self.finish(out, source, tok, expected)

    @pytest.mark.long
    def test_killed_at_random(self, source, tok, expected, tmp_path):
        generator = random.Random()
        for number in range(3):
            self.kill_at_random(tmp_path / str(number), source, tok, expected, generator)

    @pytest.mark.slow
    def test_killed_at_random_often(self, source, tok, expected, tmp_path):
        generator = random.Random()
        for number in range(40):
            self.kill_at_random(tmp_path / str(number), source, tok, expected, generator)

    @pytest.mark.slow
    def test_killed_again_and_again(self, source, tok, expected, tmp_path):
        """The same folder survives a kill at every start until it is complete."""
        generator, out = random.Random(), tmp_path / "out"
        for count in range(1, 30):
            process = self.start(out, source, tok)
            try:
                self.wait_for_shards(process, out, count)
            except AssertionError:
                break  # it finished before it could be killed
            time.sleep(generator.random() * 0.1)
            process.kill()
            process.communicate(timeout=30)
        self.finish(out, source, tok, expected)

    @pytest.mark.long
    def test_tasks_at_the_same_time(self, source, tok, expected, tmp_path):
        """As an array job starts them: all of them find an empty folder."""
        out = tmp_path / "out"
        tasks = [
            subprocess.Popen(
                pack_process(out, [source], tok, *self.OPTIONS, "--task", task, "--tasks", 4, "--workers", 1),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for task in range(4)
        ]
        for process in tasks:
            _, error = process.communicate(timeout=120)
            assert process.returncode == 0, error
        assert toy_corpus.PACK.main(["merge", str(out)]) == 0
        assert packed_bytes(out) == expected

    def test_a_dead_worker_ends_the_run(self, source, tok, expected, tmp_path):
        out = tmp_path / "out"
        process = self.start(out, source, tok)
        self.wait_for_shards(process, out, 1)
        workers = [pid for pid in children(process.pid) if "spawn_main" in command_line(pid)]
        assert len(workers) == 2
        os.kill(workers[0], signal.SIGKILL)
        begin = time.monotonic()
        _, error = process.communicate(timeout=60)
        assert time.monotonic() - begin < 20
        assert process.returncode == 1
        assert "error: a worker process died" in error
        assert "Traceback" not in error
        self.finish(out, source, tok, expected)

    def test_workers_do_not_outlive_their_parent(self, source, tok, tmp_path):
        process = self.start(tmp_path / "out", source, tok)
        self.wait_for_shards(process, tmp_path / "out", 1)
        workers = children(process.pid)
        assert len(workers) >= 2
        process.kill()
        process.communicate(timeout=30)
        deadline = time.monotonic() + 15
        while any(Path(f"/proc/{pid}/stat").exists() and not is_zombie(pid) for pid in workers):
            assert time.monotonic() < deadline, "workers are still there 15 s after their parent was killed"
            time.sleep(0.1)

    def test_interrupt(self, source, tok, expected, tmp_path):
        process = self.start(tmp_path / "out", source, tok)
        self.wait_for_shards(process, tmp_path / "out", 1)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=30)
        assert process.returncode == 130
        assert "error: interrupted" in error
        self.finish(tmp_path / "out", source, tok, expected)

    @pytest.mark.long
    def test_a_real_full_disk(self, source, tok, expected, tmp_path):
        """A file system of 1 MiB; needs a mount namespace of its own."""
        mount = tmp_path / "small"
        mount.mkdir()
        command = pack_process(mount / "out", [source], tok, *self.OPTIONS, "--workers", 2)
        script = (
            f'mount -t tmpfs -o size=1m none "{mount}" || exit 77; "$@"; status=$?; '
            f'ls "{mount}/out" >&2; mount -o remount,size=64m "{mount}" || exit 77; '
            f'[ $status -ne 0 ] || exit 78; "$@" || exit 79; cp -r "{mount}/out" "{tmp_path}/kept"'
        )
        result = run(
            ["unshare", "--mount", "--propagation", "private", "bash", "-c", script, "pack", *command]
        )
        if result.returncode in (1, 77) and "no space" not in result.stderr:
            pytest.skip(f"no mount namespace here: {result.stderr.strip()[-200:]}")
        assert result.returncode == 0, result.stderr
        assert "error: no space left" in result.stderr
        assert ".tmp-" not in result.stderr, "half-written shards are removed at once"
        assert packed_bytes(tmp_path / "kept") == expected

    def test_quiet_when_not_a_terminal(self, source, tok, tmp_path):
        result = run(pack_process(tmp_path / "out", [source], tok, *self.OPTIONS))
        assert result.returncode == 0
        assert "\r" not in result.stderr
        assert result.stderr.count("\n") < 5

    def test_progress_on_a_terminal(self, source, tok, tmp_path):
        import pty

        main, side = pty.openpty()
        process = subprocess.Popen(
            pack_process(tmp_path / "out", [source], tok, *self.OPTIONS, "--workers", 1),
            stdout=subprocess.PIPE,
            stderr=side,
        )
        os.close(side)
        shown = read_to_the_end(main)
        process.communicate(timeout=60)
        assert process.returncode == 0
        assert b"MB/s" in shown
        assert b"tokens/s" in shown
        assert b"ETA" in shown


def children(pid):
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True)
    return [int(word) for word in found.stdout.split()]


def command_line(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def is_zombie(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True
