"""Small packed folders."""

import pytest

from tests.support import toy_corpus


@pytest.fixture(scope="module")
def packed(tok, tmp_path_factory):
    """pack(texts, ...) -> folder, with rows of 8 and no alignment unless told."""

    def make(texts, seq_len=8, align=1, holdout=0, **options):
        root = tmp_path_factory.mktemp("packed")
        source = toy_corpus.write_jsonl(root / "in.jsonl", texts)
        flags = [item for name, value in options.items() for item in (f"--{name.replace('_', '-')}", value)]
        status = toy_corpus.pack(
            root / "out", [source], tok, "--seq-len", seq_len, "--align", align, "--holdout", holdout, *flags
        )
        assert status == 0
        return root / "out"

    return make


@pytest.fixture(scope="module")
def rows_of(packed):
    """A folder whose split train has exactly `count` rows; row n is a document of letter n."""

    def make(count, **options):
        return packed([chr(ord("a") + n % 26) * 7 for n in range(count)], **options)

    return make
