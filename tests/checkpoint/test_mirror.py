"""Checkpoints copied elsewhere: what is complete there, damage, ends in the middle, denial, and S3 itself."""

import errno
import logging
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest

from wm_ds.checkpoint import mirror as mirrors
from wm_ds.checkpoint import store as stores
from wm_ds.checkpoint.directory import checkpoints_dir, partial_path, prune, publish, set_aside
from wm_ds.checkpoint.format import MANIFEST, Manifest, verify, write_file
from wm_ds.checkpoint.manager import find_latest
from wm_ds.checkpoint.mirror import Mirror, MirrorPolicy, check, fetch_beginning, restore
from wm_ds.checkpoint.store import Stopped, Store, StoreError, StoreRefused

FILES = ("client.json", "rank_00000.json", "rank_00000.safetensors")
SIZE = 3000


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch):
    monkeypatch.setattr(stores, "PIECE", 1000)


@pytest.fixture
def address(request) -> str:
    """An empty place in this process's memory."""
    name = f"memory://mirror/{request.node.name}"
    yield name
    fs = fsspec.filesystem("memory")
    if fs.exists("/mirror"):
        fs.rm("/mirror", recursive=True)


def save(run_dir: Path, step: int, sequence: int | None = None) -> Path:
    """A checkpoint whose files hold a few thousand bytes that tell it from every other."""
    partial = partial_path(run_dir, step, "x")
    partial.mkdir(parents=True)
    (run_dir / "config.yaml").write_text("the run's\n")
    content = {name: f"{name} of {step} in {run_dir}".encode().ljust(SIZE, b".") for name in FILES}
    files = {name: write_file(partial / name, data) for name, data in content.items()}
    run = {"step": step, "sequence": step if sequence is None else sequence}
    return publish(run_dir, partial, step, Manifest(run, {}, {}, files), lambda: None)


def names(store: Store) -> list[str]:
    return [stored.name for stored in store.listed()]


def same(one: Path, other: Path) -> bool:
    read = [{p.name: p.read_bytes() for p in folder.iterdir()} for folder in (one, other)]
    return read[0] == read[1]


def test_what_was_sent_is_complete_and_comes_back_byte_for_byte(tmp_path, address):
    store, path = Store(address), save(tmp_path / "run", 100)
    assert store.listed() == []
    assert store.send(path, tmp_path / "run") == len(FILES) * SIZE
    assert store.send(path, tmp_path / "run") == 0, "it is there already"
    back = restore(tmp_path / "new", address)
    assert same(back, path)
    assert verify(back) == []
    assert find_latest(tmp_path / "new") == back
    assert (tmp_path / "new" / "config.yaml").read_text() == "the run's\n"
    assert restore(tmp_path / "other", f"{address}/nothing") is None


def test_the_manifest_is_written_last_and_removed_first(tmp_path, address, monkeypatch):
    store, events = Store(address), []
    for kind in ("pipe_file", "rm_file", "rm"):
        done = getattr(store.fs, kind)

        def noted(name, *more, kind=kind, done=done, **options):
            events.append((kind, name.rpartition("/")[2]))
            return done(name, *more, **options)

        monkeypatch.setattr(store.fs, kind, noted)
    store.send(save(tmp_path / "run", 1), tmp_path / "run")
    assert events[-1] == ("pipe_file", MANIFEST)
    store.send(save(tmp_path / "run", 2), tmp_path / "run")
    del events[:]
    assert store.prune("step_00000002", keep_last=1) == ["step_00000001"]
    assert events[0] == ("rm_file", MANIFEST)
    assert ("rm", "step_00000001") in events


def test_pruning_there_has_a_rule_of_its_own_and_clears_what_was_given_up(tmp_path, address):
    store, run = Store(address), tmp_path / "run"
    for step in (10, 20, 30, 40):
        store.send(save(run, step), run)
    store.fs.pipe_file(f"{store.root}/step_00000005/half", b"never completed")
    assert store.prune("step_00000040", keep_last=1, keep_every=20) == [
        *("step_00000005", "step_00000010", "step_00000030"),
    ]
    assert names(store) == ["step_00000040", "step_00000020"]
    # The run went back to 20: its next save counts anew, and 40 there is of the branch that it gave up.
    path = save(tmp_path / "later", 30, sequence=21)
    store.send(path, run)
    store.prune(path.name, keep_last=5)
    assert names(store) == ["step_00000030", "step_00000020"]


def test_a_step_that_is_taken_again_replaces_what_was_sent(tmp_path, address):
    store, old, new = Store(address), save(tmp_path / "a", 10), save(tmp_path / "b", 10, sequence=11)
    store.send(old, tmp_path / "a")
    store.send(new, tmp_path / "b")
    assert same(restore(tmp_path / "new", address), new)


def test_other_bytes_at_the_far_end_are_noticed_when_sent(tmp_path, address, monkeypatch):
    store, path = Store(address), save(tmp_path / "run", 1)
    opened = store.fs.open

    def damaging(name, mode="rb", **options):
        file = opened(name, mode, **options)
        if mode == "wb" and name.endswith("rank_00000.json"):
            write = file.write
            file.write = lambda data: write(bytes(len(data)))
        return file

    monkeypatch.setattr(store.fs, "open", damaging)
    with pytest.raises(
        StoreError, match=r"step_00000001/rank_00000\.json was sent and reads back with another"
    ):
        store.send(path, tmp_path / "run")
    assert store.listed() == []
    monkeypatch.undo()
    store.send(path, tmp_path / "run")
    assert names(store) == ["step_00000001"]


def test_damage_here_is_not_said_of_the_address(tmp_path, address):
    path = save(tmp_path / "run", 1)
    (path / "client.json").write_bytes(b"x" * SIZE)
    with pytest.raises(Exception, match=r"run/checkpoints/step_00000001/client\.json: is damaged"):
        Store(address).send(path, tmp_path / "run")


def test_damage_there_is_said_and_the_one_before_it_taken(tmp_path, address, caplog):
    store, run = Store(address), tmp_path / "run"
    for step in (1, 2):
        store.send(save(run, step), run)
    store.fs.pipe_file(f"{store.root}/step_00000002/client.json", b"x" * SIZE)
    with caplog.at_level(logging.WARNING, "wm_ds"):
        assert restore(tmp_path / "new", address).name == "step_00000001"
    (line,) = (r.getMessage() for r in caplog.records)
    assert "step_00000002 is damaged" in line
    assert "client.json" in line
    store.fs.pipe_file(f"{store.root}/step_00000001/client.json", b"x")
    with pytest.raises(StoreError, match=r"step_00000002 is damaged.*step_00000001 is damaged"):
        restore(tmp_path / "newer", address)
    assert not list(checkpoints_dir(tmp_path / "newer").glob("step_*")), "nothing half is left"


def test_a_kill_in_the_middle_never_leaves_a_checkpoint_that_is_none(tmp_path):
    """SIGKILL at every piece of the second checkpoint that goes out: the first one is what comes back."""
    run, address = tmp_path / "run", f"file://{tmp_path}/far"
    Store(address).send(save(run, 1), run)
    second, kills = save(run, 2), 0
    for at in range(100):
        child = os.fork()
        if child == 0:
            Store(address, proceed=dies_after(at)).send(second, run)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        back = restore(tmp_path / f"new{at}", address)
        assert verify(back) == []
        if status == 0:
            break
        kills += 1
        assert back.name == "step_00000001"
    assert kills == 2 * len(FILES) * SIZE // 1000, "each piece is sent and read back"
    assert back.name == "step_00000002"


def dies_after(pieces: int) -> Callable[[], bool]:
    """Says yes so many times and kills this process then."""
    left = iter(range(pieces))

    def proceed() -> bool:
        if next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return True

    return proceed


def test_a_manifest_that_was_cut_short_is_no_mark(tmp_path, address):
    store = Store(address)
    path = save(tmp_path / "run", 1)
    store.send(path, tmp_path / "run")
    whole = (path / MANIFEST).read_bytes()
    for cut in (0, 1, len(whole) // 2, len(whole) - 1):
        store.fs.pipe_file(f"{store.root}/{path.name}/{MANIFEST}", whole[:cut])
        assert store.listed() == []


def test_a_transfer_ends_with_the_run(tmp_path, address):
    with pytest.raises(Stopped):
        Store(address, proceed=lambda: False).send(save(tmp_path / "run", 1), tmp_path / "run")


def wait_until_idle(mirror: Mirror) -> None:
    deadline = time.monotonic() + 20
    while not mirror.idle:
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (PermissionError("Access Denied"), "Access Denied"),
        (OSError(errno.ENOSPC, "No space left on device"), "No space left"),
        (RuntimeError("some library's\nsurprise"), "some library's surprise"),
    ],
)
def test_a_place_that_takes_nothing_is_one_line_and_a_number(
    tmp_path, address, monkeypatch, caplog, error, said
):
    mirror, run = Mirror(tmp_path / "run", MirrorPolicy(address)), tmp_path / "run"
    first, second = save(run, 1), save(run, 2)

    def refuse(*_, **__):
        raise error

    monkeypatch.setattr(type(Store(address).fs), "open", refuse)
    with caplog.at_level(logging.INFO, "wm_ds"):
        mirror.offer(first)
        wait_until_idle(mirror)
        monkeypatch.undo()
        monkeypatch.setattr(stores, "PIECE", 1000)
        (line,) = (r.getMessage() for r in caplog.records)
        assert line.startswith(f"mirror: step_00000001 is not at {address}: ")
        assert said in line
        assert mirror.news() == {"mirror": {"failed": "step_00000001", "step": None, "failures": 1}}
        assert mirror.news() == {}
        mirror.offer(second)
        wait_until_idle(mirror)
    news = mirror.news()["mirror"]
    assert (news["step"], news["failures"], news["bytes"]) == (2, 1, len(FILES) * SIZE)
    assert names(Store(address)) == ["step_00000002"]
    assert mirror.close() == []


def test_while_one_is_on_its_way_the_newest_waits_and_neither_is_removed_here(tmp_path, address, caplog):
    run = tmp_path / "run"
    mirror = Mirror(run, MirrorPolicy(address, mib_per_s=0.01, keep_last=5))  # 3,000 bytes: 0.3 s
    with caplog.at_level(logging.INFO, "wm_ds"):
        for step in (1, 2, 3, 4):
            mirror.offer(save(run, step))
            assert f"step_{step:08d}" in mirror.needs()
            time.sleep(0.05)
            prune(run, keep_last=1, spared=mirror.needs())
        assert sorted(p.name for p in checkpoints_dir(run).glob("step*")) == [
            "step_00000001",
            "step_00000004",
        ]
        mirror.policy = None
        assert mirror.needs() == {"step_00000001", "step_00000004"}
        assert mirror.close() == ["step_00000001", "step_00000004"]
    left_out = [r.getMessage() for r in caplog.records if "is left out" in r.getMessage()]
    assert [line.split()[1] for line in left_out] == ["step_00000002", "step_00000003"]
    mirror._thread.join(5)
    assert not mirror._thread.is_alive()
    assert Store(address).listed() == []
    again = Mirror(run, MirrorPolicy(address))  # the next attempt
    again.offer_newest()
    wait_until_idle(again)
    assert names(Store(address)) == ["step_00000004"]


def test_a_checkpoint_that_is_set_aside_under_it_is_one_line(tmp_path, address, caplog):
    mirror, path = Mirror(tmp_path / "run", MirrorPolicy(address)), save(tmp_path / "run", 1)
    set_aside(path)
    with caplog.at_level(logging.INFO, "wm_ds"):
        mirror.offer(path)
        wait_until_idle(mirror)
    (line,) = (r.getMessage() for r in caplog.records)
    assert "step_00000001" in line
    assert "\n" not in line


def test_two_runs_do_not_share_an_address(tmp_path, address, caplog):
    one, two = (Mirror(tmp_path / name, MirrorPolicy(address)) for name in ("one", "two"))
    one.offer(save(tmp_path / "one", 1))
    wait_until_idle(one)
    check(tmp_path / "one", address)
    two.offer(save(tmp_path / "two", 2))
    wait_until_idle(two)
    assert two.news()["mirror"]["failures"] == 1
    assert names(Store(address)) == ["step_00000001"]
    with pytest.raises(StoreRefused, match="another run's checkpoints lie there; give this run an address"):
        check(tmp_path / "two", address)
    # A folder without anything goes on as the run whose checkpoints these are.
    check(tmp_path / "moved", address)
    restore(tmp_path / "moved", address)
    check(tmp_path / "moved", address)
    shutil.rmtree(checkpoints_dir(tmp_path / "two"))
    with pytest.raises(StoreRefused, match="another run's"):
        check(tmp_path / "two", address)


def test_a_place_that_cannot_be_read_stops_only_a_run_that_may_have_something_there(
    tmp_path, address, monkeypatch, caplog
):
    def refuse(*_, **__):
        raise PermissionError("Access Denied")

    monkeypatch.setattr(type(Store(address).fs), "cat_file", refuse)
    with pytest.raises(StoreError, match="a run without checkpoints of its own looks there first") as refused:
        check(tmp_path / "run", address)
    assert not isinstance(refused.value, StoreRefused), "a later start may succeed"
    save(tmp_path / "run", 1)
    with caplog.at_level(logging.WARNING, "wm_ds"):
        check(tmp_path / "run", address)
    assert "Access Denied; training goes on" in caplog.text


def test_addresses_of_no_known_kind_and_without_their_package(monkeypatch):
    with pytest.raises(StoreRefused, match=r"nowhere://a: .*nowhere"):
        Store("nowhere://a")
    monkeypatch.setitem(__import__("sys").modules, "adlfs", None)
    with pytest.raises(StoreRefused, match="need a package that is not installed: pip install adlfs"):
        Store("abfs://container/run")


def test_a_beginning_from_elsewhere_is_fetched_once(tmp_path, address, monkeypatch):
    store, run = Store(address), tmp_path / "run"
    paths = {step: save(run, step) for step in (1, 2)}
    for path in paths.values():
        store.send(path, run)
    for name, step in ((address, 2), (f"{address}/step_00000001", 1)):
        new = tmp_path / f"new{step}"
        assert same(fetch_beginning(name, new), paths[step])
        assert mirrors.fetched(name, new).exists()
        assert not checkpoints_dir(new).exists()
        with monkeypatch.context() as closed:
            closed.setattr(Store, "listed", lambda self: pytest.fail("it is here already"))
            assert same(fetch_beginning(name, new), paths[step])
    with pytest.raises(
        StoreRefused, match=r"checkpoint\.resume = .*step_00000009: no complete checkpoint lies there"
    ):
        fetch_beginning(f"{address}/step_00000009", tmp_path / "new9")


# -- a server that speaks S3 ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bucket():
    """The address of an empty bucket on a server of this process."""
    why = "the S3 server of the tests is not installed (requirements.txt has it)"
    pytest.importorskip("s3fs", reason=why)
    server_of = pytest.importorskip("moto.server", reason=why)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = server_of.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
        }.items():
            patch.setenv(name, value)
        fsspec.filesystem("s3").mkdir("bucket")
        yield "s3://bucket"
    server.stop()


def test_s3_from_end_to_end(tmp_path, bucket, monkeypatch, caplog):
    monkeypatch.setattr(stores, "PIECE", 5 * 2**20)  # the least that S3 takes as one of several parts
    run, address = tmp_path / "run", f"{bucket}/runs/one"
    mirror = Mirror(run, MirrorPolicy(address, keep_last=1))
    for step, size in ((1, SIZE), (2, 6 * 2**20)):
        monkeypatch.setattr(f"{__name__}.SIZE", size)
        mirror.offer(save(run, step))
        wait_until_idle(mirror)
    assert mirror.news()["mirror"]["failures"] == 0, caplog.text
    assert names(Store(address)) == ["step_00000002"]
    assert same(restore(tmp_path / "new", address), find_latest(run))
    store = Store(address)
    left, third = iter(range(3)), save(run, 3)
    with pytest.raises(Stopped):
        Store(address, proceed=lambda: next(left, None) is not None).send(third, run)
    assert names(store) == ["step_00000002"], "half an upload is no checkpoint"
    store.fs.pipe_file(f"{store.root}/step_00000002/client.json", b"x" * 6 * 2**20)
    with pytest.raises(StoreError, match=r"step_00000002 is damaged: .*client\.json"):
        restore(tmp_path / "newer", address)


def test_s3_without_its_bucket_is_one_line(tmp_path, bucket, caplog):
    mirror = Mirror(tmp_path / "run", MirrorPolicy("s3://nowhere/run"))
    with caplog.at_level(logging.INFO, "wm_ds"):
        mirror.offer(save(tmp_path / "run", 1))
        wait_until_idle(mirror)
    (line,) = (r.getMessage() for r in caplog.records if r.name.startswith("wm_ds"))
    assert line.startswith("mirror: step_00000001 is not at s3://nowhere/run: ")
    assert "\n" not in line
