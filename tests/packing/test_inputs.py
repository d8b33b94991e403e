"""Which files are inputs, and where they are cut."""

import pytest

from wm_ds.packing.inputs import InputError, cut, find_inputs


def touch(root, *names, data=b'{"text":"a"}\n'):
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def names(root, *specs):
    return [item.name.removeprefix(f"{root}/") for item in find_inputs([f"{root}/{spec}" for spec in specs])]


def test_folders_in_depth_in_a_stable_order(tmp_path):
    touch(tmp_path, "b/2.jsonl", "a.jsonl", "b/1.jsonl.gz", "b/10.txt", ".cache/x.bin", ".hidden")
    assert names(tmp_path, "") == ["a.jsonl", "b/1.jsonl.gz", "b/10.txt", "b/2.jsonl"]


def test_globs_and_the_order_of_names(tmp_path):
    touch(tmp_path, "b.jsonl", "a.jsonl", "c/d.jsonl", "notes.md")
    assert names(tmp_path, "*.jsonl") == ["a.jsonl", "b.jsonl"]
    assert names(tmp_path, "**/*.jsonl") == ["a.jsonl", "b.jsonl", "c/d.jsonl"]
    assert names(tmp_path, "c/d.jsonl", "a.jsonl") == ["c/d.jsonl", "a.jsonl"]


def test_what_exists_is_meant_by_its_name(tmp_path):
    touch(tmp_path, "a[1].txt", "a1.txt", "d[1]/x.jsonl", "d[1]/y.jsonl", "d1/z.jsonl")
    touch(tmp_path, "e*/x.jsonl", "ef/y.jsonl")
    assert names(tmp_path, "a[1].txt") == ["a[1].txt"]
    assert names(tmp_path, "a[12].txt") == ["a1.txt"]
    assert names(tmp_path, "d[1]/*.jsonl") == ["d[1]/x.jsonl", "d[1]/y.jsonl"]
    assert names(tmp_path, "d[1]/z*") == ["d1/z.jsonl"], "no such file there: a pattern after all"
    assert names(tmp_path, "e*/*") == ["e*/x.jsonl"]
    assert names(tmp_path, "e?/*") == ["e*/x.jsonl", "ef/y.jsonl"]


@pytest.mark.parametrize("name", ["x", "x.csv", "x.jsonl.xz", "x.bin"])
def test_an_unknown_kind_is_an_error_naming_the_suffix(tmp_path, name):
    touch(tmp_path, name)
    suffix = name.removeprefix("x").removeprefix(".jsonl")
    with pytest.raises(InputError, match=f"suffix '{suffix}'" if suffix else "no suffix"):
        names(tmp_path, name)
    with pytest.raises(InputError, match=name):
        names(tmp_path, "")


def test_missing_names(tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        names(tmp_path, "nothing.jsonl")
    with pytest.raises(InputError, match="no file matches"):
        names(tmp_path, "*.jsonl")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="folder without files"):
        names(tmp_path, "empty")


def test_the_same_file_twice(tmp_path):
    touch(tmp_path, "a.jsonl")
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "a.jsonl")
    for specs in (("a.jsonl", "*.jsonl"), ("link.jsonl", "a.jsonl")):
        with pytest.raises(InputError, match="packed twice"):
            names(tmp_path, *specs)


def test_small_files_share_a_unit_and_large_ones_are_cut(tmp_path):
    touch(tmp_path, "a.jsonl", "b.jsonl", "c.jsonl")
    touch(tmp_path, "d.jsonl", data=b'{"text":"a"}\n' * 100)
    touch(tmp_path, "e.txt", data=b"one\n\ntwo\n\nthree" * 100)
    inputs = find_inputs([str(tmp_path)])
    units = cut(inputs, 130, "file")
    assert [piece.input for piece in units[0]] == [0, 1, 2, 3]
    pieces = [piece for unit in units for piece in unit]
    assert sum(piece.size for piece in pieces) == sum(item.size for item in inputs)
    assert all(sum(piece.size for piece in unit[:-1]) < 130 for unit in units)
    assert [piece for piece in pieces if piece.input == 4] == [units[-1][-1]], "a text file is one document"
    assert len(cut(inputs, 130, "blank-lines")) > len(units)


def test_a_dataset_that_does_not_exist(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(InputError, match="cannot open the dataset"):
        find_inputs([f"hf:{tmp_path}"])
