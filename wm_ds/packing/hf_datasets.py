"""Datasets that the library `datasets` opens: from the Hugging Face hub, or a local folder in its layout."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from glob import has_magic
from itertools import islice
from pathlib import Path
from typing import Any

from wm_ds.errors import WmError
from wm_ds.packing.columns import is_refusal
from wm_ds.packing.file_kinds import InputError

DATASET_PREFIX = "hf:"


class DatasetReadError(WmError):
    """The loader failed on the data itself: the rest of a shard cannot be read. args: an explanation."""


def parse(name: str) -> tuple[str, str | None]:
    """NAME[@REVISION], without the prefix -> (folder or name on the hub, revision).

    What exists is a folder, whatever characters are in its name. Raises InputError for a path that does not
    exist, a file, and a local folder with a revision.
    """
    if os.path.isdir(name):
        return name, None
    if os.path.exists(name):
        raise InputError(f"{DATASET_PREFIX}{name}: {name} is a file; name it without {DATASET_PREFIX}")
    repository, _, revision = name.rpartition("@") if "@" in name else (name, "", "")
    if os.path.isdir(repository):
        raise InputError(
            f"{DATASET_PREFIX}{name}: {name} does not exist, and the folder {repository} has no revisions"
        )
    if name.startswith(("/", "./", "../", "~")):
        raise InputError(f"{DATASET_PREFIX}{name}: there is no folder {name}")
    return repository, revision or None


def identify(name: str, split: str, config: str | None) -> tuple[str, dict[str, Any]]:
    """(folder or name on the hub, identity): everything that says which data it is.

    A hub's data is known by its commit, which is looked up here so that all tasks of an array and all later
    attempts read the same; a folder's data by the names and sizes of its files. Raises InputError when the
    dataset cannot be opened.
    """
    from datasets import load_dataset_builder

    repository, revision = parse(name)
    local = os.path.isdir(repository)
    try:
        if not local:
            from huggingface_hub import HfApi

            revision = HfApi().dataset_info(repository, revision=revision).sha
        _quiet()
        files = load_dataset_builder(repository, config, revision=revision).config.data_files
        chosen = files[split] if files and split in files else []
        shards = stream(repository, config, split, revision).num_shards
    except Exception as error:  # the hub, the network, the loader: all are one fact for the user
        reason = _first_line(error)
        if local and has_magic(repository):
            reason += (
                f"; `datasets` takes * ? [ in a path for a pattern: rename the folder, or name it without "
                f"{DATASET_PREFIX}"
            )
        raise InputError(f"cannot open the dataset {repository!r}, split {split!r}: {reason}") from error
    identity = {
        "revision": revision,
        "config": config,
        "split": split,
        "shards": shards,
        "files": [[Path(file).name, *([os.path.getsize(file)] if local else [])] for file in chosen],
    }
    return repository, identity


def modified(repository: str, config: str | None, split: str) -> list[int] | None:
    """Modification times of a local dataset's files, None for a dataset on the hub."""
    if not os.path.isdir(repository):
        return None
    from datasets import load_dataset_builder

    _quiet()
    files = load_dataset_builder(repository, config).config.data_files
    return [os.stat(file).st_mtime_ns for file in (files[split] if files and split in files else [])]


def stream(repository: str, config: str | None, split: str, revision: str | None) -> Any:
    """The dataset as `datasets` streams it."""
    from datasets import load_dataset

    _quiet()
    return load_dataset(repository, config, split=split, revision=revision, streaming=True)


def shard_records(repository: str, identity: dict[str, Any], index: int) -> Iterator[dict[str, Any]]:
    """Records of shard `index` of the dataset that `identify` described.

    Files whose columns differ are read, each with its own columns. Raises DatasetReadError when the data is
    damaged, InputError when it cannot be reached or the installed libraries refuse it.
    """
    from datasets.table import CastError

    with _loading(repository):
        where = repository, identity["config"], identity["split"], identity["revision"]
        shard = {"num_shards": identity["shards"], "index": index}
        done = 0
        try:
            for record in stream(*where).shard(**shard):
                yield record
                done += 1
        except CastError:
            # The loader expects in every file the columns of the first one.
            yield from islice(_stream_without_schema(*where).shard(**shard), done, None)


def _stream_without_schema(repository: str, config: str | None, split: str, revision: str | None) -> Any:
    from datasets import load_dataset_builder

    builder = load_dataset_builder(repository, config, revision=revision)
    if hasattr(builder.config, "on_mixed_types"):
        # Values of several types in one JSON column would come encoded as JSON, which only a schema undoes.
        builder.config.on_mixed_types = None
    data = builder.as_streaming_dataset(split)
    builder.info.features = data.info.features = None
    return data


@contextmanager
def _loading(repository: str) -> Iterator[None]:
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # `datasets` and what it uses raise anything
        causes = list(_causes(error))
        reason = _first_line(error)
        if any(map(_is_outage, causes)):
            raise InputError(
                f"the dataset {repository!r} cannot be read at the moment ({reason}); when it is reachable, "
                f"run the same command again to go on"
            ) from error
        if any(isinstance(cause, ImportError) for cause in causes):
            raise InputError(
                f"reading the dataset {repository!r} needs a package that is not installed: {reason}"
            ) from error
        if any(map(is_refusal, causes)):
            raise InputError(
                f"the dataset {repository!r} cannot be read by the installed libraries: {reason}"
            ) from error
        raise DatasetReadError(f"{type(error).__name__}: {reason}") from error


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _is_outage(error: BaseException) -> bool:
    """Whether a failure is the system's or the network's, and says nothing about the data."""
    network = type(error).__module__.partition(".")[0] in ("requests", "httpx", "aiohttp", "huggingface_hub")
    system = isinstance(error, OSError) and error.errno is not None
    return network or system or isinstance(error, (MemoryError, TimeoutError, FileNotFoundError))


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _quiet() -> None:
    """The loader's own reports of an error that is ours to report, and its progress bars, stay away."""
    import datasets

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    datasets.disable_progress_bars()
