"""quicktok as an encoder: the ids of the `tokenizers` library, many times faster, for byte-level BPE.

An optional dependency (PyPI: quicktok-v1). Its claim to give the same ids is never taken on trust: `check`
compares it with the `tokenizers` encoder at every start, on difficult strings and on a sample of the corpus,
and refuses it on the first difference.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path

import numpy as np

from wm_ds.packing.tokenizer import TokenizerError, TokenizersEncoder, TokenizerSpec, flatten

_NAME = "packed"
DIFFICULT = [
    "a\0b",
    "\ufeffx\ufeff",
    "cafe\u0301 \u212b \ufb01 \u1100\u1161 \u0344",
    "one\u2028two\u2029three\u0085four\u000bfive\u000csix\u001cseven",
    " \t\r\n \r\n\n\n  x   \n",
    "don't I'LL we\u2019ve 'S 'ſ 'Re",
    "1234567890 ٣٤٥ ²³ Ⅷ 1,234.5e-6",
    "日本語テキスト、한국어 텍스트 ไทย हिन्दी العربية עברית",
    "🏳️‍🌈👩‍👩‍👧‍👦 \U000e0041 \U0010ffff \ufdd0 \ufffd",
    "ǅ ǆ ͅ ꙮ a\u0489 \u200b\u200d\u2060",
    "http://a.b/c?d=e&f=%20#g <tag attr='x'>&amp;</tag> {\"k\": [1, 2]}",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa" * 8,
    "=" * 500 + " " * 500 + "\n" * 50,
]


def build(spec: TokenizerSpec, folder: Path) -> None:
    """Write quicktok's tables for this tokenizer into `folder`.

    Raises TokenizerError when quicktok is not installed or does not know the tokenizer's kind.
    """
    try:
        from quicktok.importer import ImportRefused, import_tokenizer
    except ImportError:
        raise TokenizerError(
            "--encoder quicktok needs the package quicktok-v1 (pip install quicktok-v1); "
            "or use --encoder tokenizers"
        ) from None
    if spec.kind != "tokenizers":
        raise TokenizerError(
            f"--encoder quicktok knows byte-level BPE only, {spec.name!r} is of the kind {spec.kind}; "
            f"use --encoder tokenizers"
        )
    folder.mkdir(exist_ok=True)
    source = folder / "tokenizer.json"
    source.write_bytes(spec.payload)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            import_tokenizer(str(source), _NAME, data_dir=str(folder))
    except (ImportRefused, RuntimeError) as error:
        raise TokenizerError(
            f"quicktok does not know tokenizers like {spec.name!r}: {error}; use --encoder tokenizers"
        ) from error


class QuicktokEncoder:
    """Encodes with the tables that `build` wrote.

    quicktok sees no added tokens at all. Texts that contain one which is not special, and which `tokenizers`
    therefore replaces by its id, are left to `tokenizers`.
    """

    def __init__(self, spec: TokenizerSpec, folder: Path) -> None:
        import quicktok

        self._spec = spec
        self._fast = quicktok.Tokenizer(_NAME, str(folder))
        self._reference: TokenizersEncoder | None = None
        replaced = [token for token in json.loads(spec.payload)["added_tokens"] if not token["special"]]
        if any(token["normalized"] for token in replaced):
            # `tokenizers` finds those in the normalised text, where we do not look.
            raise TokenizerError(
                f"quicktok cannot replace {spec.name!r}, which looks for added tokens after normalisation; "
                f"use --encoder tokenizers"
            )
        markers = [re.escape(token["content"]) for token in replaced]
        self._replaced = re.compile("|".join(markers)) if markers else None

    def encode(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """See Encoder.encode."""
        if self._replaced is None or not any(map(self._replaced.search, texts)):
            return self._fast.encode_batch(texts, 1)
        if self._reference is None:
            self._reference = TokenizersEncoder(self._spec)
        lists = []
        for text in texts:
            encoder = self._reference if self._replaced.search(text) else self
            lists.append(encoder.encode([text])[0].tolist())
        return flatten(lists)


def check(spec: TokenizerSpec, folder: Path, sample: list[str]) -> None:
    """Compare with the `tokenizers` encoder; raises TokenizerError at the first text with other ids."""
    added = [token["content"] for token in json.loads(spec.payload)["added_tokens"]]
    texts = [*DIFFICULT, *(f"a {token} b{token}" for token in added), "".join(added), *sample]
    fast, reference = QuicktokEncoder(spec, folder), TokenizersEncoder(spec)
    for text in texts:
        got, expected = fast.encode([text])[0], reference.encode([text])[0]
        if not np.array_equal(got, expected):
            same = min(got.size, expected.size)
            place = int(np.argmax(np.append(got[:same] != expected[:same], True)))
            raise TokenizerError(
                f"quicktok and tokenizers differ on {text[:80]!r} (token {place}: "
                f"{got[place : place + 4].tolist()} instead of {expected[place : place + 4].tolist()}); "
                f"use --encoder tokenizers"
            )
