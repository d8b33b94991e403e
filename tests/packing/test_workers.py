"""The packed bytes depend neither on workers and tasks nor on where an earlier start died."""

import errno
import gzip
import json
import os
import random
import shutil
import signal

import pytest

from tests.support import toy_corpus
from tests.support.toy_corpus import (
    manifest,
    pack,
    packed_bytes,
    texts,
    write_jsonl,
)
from wm_ds.data import shards
from wm_ds.packing import workers as packing


class TestSameResult:
    OPTIONS = ("--seq-len", 32, "--align", 4, "--holdout", 3, "--shard-bytes", 4000)

    @pytest.fixture(scope="class")
    @classmethod
    def source(cls, tmp_path_factory):
        root = tmp_path_factory.mktemp("in")
        write_jsonl(root / "a.jsonl", toy_corpus.numbered(400))
        (root / "b.txt").write_text("a text\n\nof its own")
        (root / "c.jsonl.gz").write_bytes(
            gzip.compress(b"".join(json.dumps({"text": t}).encode() + b"\n" for t in toy_corpus.numbered(99)))
        )
        return root

    @pytest.fixture(scope="class")
    @classmethod
    def expected(cls, source, tok, tmp_path_factory):
        out = tmp_path_factory.mktemp("expected") / "out"
        assert pack(out, [source], tok, *cls.OPTIONS) == 0
        assert len(list(out.glob("shard-*"))) > 10
        assert [text[:13] for text in texts(out)[:3]] == ["document 0: ", "document 1: t", "document 2: t"]
        assert manifest(out)["counts"]["written"] == 500
        return packed_bytes(out)

    @pytest.mark.parametrize("workers", [2, 7])
    def test_for_any_number_of_workers(self, source, tok, expected, tmp_path, workers):
        assert pack(tmp_path / "out", [source], tok, *self.OPTIONS, "--workers", workers) == 0
        assert packed_bytes(tmp_path / "out") == expected

    @pytest.mark.parametrize("tasks", [1, 3, 11, 50])
    def test_for_any_number_of_tasks(self, source, tok, expected, tmp_path, capsys, tasks):
        out = tmp_path / "out"
        order = list(range(tasks))
        random.Random(tasks).shuffle(order)
        for task in order:
            if task == order[-1] and 1 < tasks < 16:
                assert toy_corpus.PACK.main(["merge", str(out)]) == 1
                assert "are missing" in capsys.readouterr().err
            assert pack(out, [source], tok, *self.OPTIONS, "--task", task, "--tasks", tasks, "--json") == 0
            told = json.loads(capsys.readouterr().out)
            assert told["shards"] == len(range(task, 16, tasks))
            assert not (out / "manifest.json").exists()
        assert toy_corpus.PACK.main(["merge", str(out)]) == 0
        assert packed_bytes(out) == expected

    def test_merge_verifies(self, source, tok, tmp_path, capsys):
        out = tmp_path / "out"
        assert pack(out, [source], tok, *self.OPTIONS, "--task", 0, "--tasks", 1) == 0
        path = out / "shard-000003" / "tokens.bin"
        data = bytearray(path.read_bytes())
        data[9] ^= 1
        path.write_bytes(data)
        assert toy_corpus.PACK.main(["merge", str(out)]) == 1
        assert "shard-000003/tokens.bin is damaged" in capsys.readouterr().err
        assert not (out / "manifest.json").exists()
        shutil.rmtree(out / "shard-000003")  # as the message says
        assert pack(out, [source], tok, *self.OPTIONS, "--task", 0, "--tasks", 1) == 0
        assert toy_corpus.PACK.main(["merge", str(out)]) == 0

    def test_again_does_nothing(self, source, tok, expected, tmp_path, monkeypatch):
        out = tmp_path / "out"
        assert pack(out, [source], tok, *self.OPTIONS) == 0
        monkeypatch.setattr(packing, "pack_unit", None)
        assert pack(out, [source], tok, *self.OPTIONS) == 0
        assert packed_bytes(out) == expected

    def test_killed_at_every_step_of_publishing(self, source, tok, expected, tmp_path):
        """Die (without cleaning up) before the n-th flush or rename, for every n; then finish."""
        steps = 0
        for number in range(0, 500, 7):
            out = tmp_path / str(number)
            child = os.fork()
            if child == 0:
                try:
                    die_at(number, kill=True)
                    os._exit(pack(out, [source], tok, *self.OPTIONS))
                except BaseException:
                    os._exit(3)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            if status == 0:
                break
            steps += 1
            assert status == -signal.SIGKILL
            assert not (out / "manifest.json").exists() or packed_bytes(out) == expected
            assert pack(out, [source], tok, *self.OPTIONS) == 0
            assert packed_bytes(out) == expected
            shutil.rmtree(out)
        assert steps > 15

    def test_disk_full_at_every_step(self, source, tok, expected, tmp_path, monkeypatch, capsys):
        """No space at the n-th write: non-zero, published shards intact; with space the rerun completes."""
        failures = 0
        for number in range(0, 200, 5):
            out = tmp_path / str(number)
            with monkeypatch.context() as patch:
                full_at(patch, number)
                status = pack(out, [source], tok, *self.OPTIONS)
            if status == 0:
                break
            failures += 1
            error = capsys.readouterr().err
            assert "no space left" in error.lower() or "No space left" in error
            assert not list(out.glob("*.tmp-*"))
            for record in out.glob("shard-*/shard.json"):
                shards.verify_shard(out, json.loads(record.read_text()))
            assert pack(out, [source], tok, *self.OPTIONS) == 0
            assert packed_bytes(out) == expected
        assert failures > 5


def die_at(number, kill):
    """Make the `number`-th call of fsync, rename or replace kill this process instead."""
    calls = 0

    def wrap(function):
        def call(*args, **kwargs):
            nonlocal calls
            if calls == number:
                os.kill(os.getpid(), signal.SIGKILL)
            calls += 1
            return function(*args, **kwargs)

        return call

    for name in ("fsync", "rename", "replace"):
        setattr(os, name, wrap(getattr(os, name)))


def full_at(patch, number):
    calls = 0
    write = shards._HashedFile.write

    def call(self, array):
        nonlocal calls
        calls += 1
        if calls > number:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, array)

    patch.setattr(shards._HashedFile, "write", call)
