"""Text to token ids, with one rule for every tokenizer: a document's text stays text.

No template, no BOS, no EOS from the tokenizer (the packer adds its EOS), and the characters of a special
token inside a document are characters. `open_tokenizer` reads a tokenizer once; the `TokenizerSpec` it
returns is plain data that goes to worker processes, where `make_encoder` turns it into an encoder.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from wm_ds.errors import WmError
from wm_ds.files import temporary


class TokenizerError(WmError, ValueError):
    """A tokenizer cannot be loaded, or lacks what packing needs."""


@dataclass(frozen=True)
class TokenizerSpec:
    """A tokenizer as data.

    kind: "tokenizers" (payload: tokenizer.json), "sentencepiece" (payload: the .model file) or "python"
        (no payload: loaded from `folder` by transformers).
    vocab_size: highest id + 1, added tokens included. sha256: of the payload or of the folder's files.
    """

    name: str
    kind: str
    payload: bytes
    folder: str | None
    vocab_size: int
    eos_id: int
    eos_token: str
    sha256: str


class Encoder(Protocol):
    """What turns texts into ids."""

    def encode(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Concatenated ids (uint32), offsets int64 [len(texts)+1]: text i is ids[offsets[i]:offsets[i+1]]."""
        ...


def open_tokenizer(name: str, eos: str | None = None, literal_tokens: str = "special") -> TokenizerSpec:
    """Load a tokenizer by Hugging Face name, folder, tokenizer.json or sentencepiece .model.

    eos: the token that ends a document, default the tokenizer's own.
    literal_tokens: which added tokens' characters stay characters inside a document. "special": those that
        the tokenizer marks as special. "all": every added token, also the markers that some tokenizers add
        without that mark (Qwen's <think>, <|fim_prefix|>); wrong for tokenizers that add ordinary vocabulary
        that way (GPT-NeoX's runs of spaces).

    Raises TokenizerError when the tokenizer cannot be loaded, or when there is no such EOS in its vocabulary.
    """
    if name.endswith(".model") and os.path.isfile(name):
        return _open_sentencepiece(name, eos)
    tokenizer = _load_transformers(name)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = tokenizer.get_vocab()
    eos = eos if eos is not None else tokenizer.eos_token
    if eos is None:
        raise TokenizerError(
            f"the tokenizer {name!r} defines no EOS token; name one with --eos, a token of its vocabulary"
        )
    if eos not in vocabulary:
        raise TokenizerError(f"the EOS token {eos!r} is not in the vocabulary of {name!r}")
    vocab_size = max(vocabulary.values()) + 1
    if backend is None:
        identity = repr((type(tokenizer).__name__, sorted(vocabulary.items()))).encode()
        sha256 = hashlib.sha256(identity).hexdigest()
        return TokenizerSpec(name, "python", b"", name, vocab_size, vocabulary[eos], eos, sha256)
    backend.no_truncation()
    backend.no_padding()
    payload = backend.to_str()
    sha256 = hashlib.sha256(payload.encode()).hexdigest()
    if literal_tokens == "all":
        definition = json.loads(payload)
        for token in definition["added_tokens"]:
            token["special"] = True
        payload = json.dumps(definition, ensure_ascii=False)
    return TokenizerSpec(name, "tokenizers", payload.encode(), None, vocab_size, vocabulary[eos], eos, sha256)


def _load_transformers(name: str) -> Any:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast
    from transformers.utils import logging

    logging.set_verbosity_error()
    path = Path(name)
    try:
        if path.is_file() and path.suffix == ".json":
            return PreTrainedTokenizerFast(tokenizer_file=name)
        # A tokenizer is data. Left open, transformers would ask on the terminal whether to run the code of
        # an exported model that lies in the same folder.
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds; for the user it is one
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise TokenizerError(f"cannot load the tokenizer {name!r}: {_remedy(name, reason)}") from error


def _remedy(name: str, reason: str) -> str:
    if os.path.exists(name):
        return (
            f"its files are incomplete, damaged or of no kind that transformers knows ({reason}); give a "
            f"folder with tokenizer.json or a sentencepiece .model file"
        )
    if name.startswith(("/", "./", "../", "~")) or name.count("/") > 1:
        return "there is no such file or folder"
    return (
        f"{reason}. There is no folder of that name here; a Hugging Face name needs the network, or "
        f"the tokenizer in the hub's cache"
    )


def _open_sentencepiece(name: str, eos: str | None) -> TokenizerSpec:
    import sentencepiece

    payload = Path(name).read_bytes()
    try:
        model = sentencepiece.SentencePieceProcessor(model_proto=payload)
    except RuntimeError as error:
        raise TokenizerError(f"{name} is not a sentencepiece model: {error}") from error
    if eos is None:
        if model.eos_id() < 0:
            raise TokenizerError(f"the tokenizer {name!r} defines no EOS token; name one with --eos")
        eos_id = model.eos_id()
        eos = model.id_to_piece(eos_id)
    else:
        eos_id = model.piece_to_id(eos)
        if model.id_to_piece(eos_id) != eos:
            raise TokenizerError(f"the EOS token {eos!r} is not in the vocabulary of {name!r}")
    digest = hashlib.sha256(payload).hexdigest()
    return TokenizerSpec(name, "sentencepiece", payload, None, model.vocab_size(), eos_id, eos, digest)


def make_encoder(spec: TokenizerSpec) -> Encoder:
    """The encoder of a tokenizer, for this process."""
    if spec.kind == "sentencepiece":
        return _SentencePieceEncoder(spec)
    if spec.kind == "python":
        return _PythonEncoder(spec)
    return TokenizersEncoder(spec)


def flatten(lists: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Lists of ids -> (uint32 ids concatenated, int64 offsets)."""
    offsets = np.zeros(len(lists) + 1, dtype=np.int64)
    np.cumsum([len(ids) for ids in lists], out=offsets[1:])
    flat = np.empty(int(offsets[-1]), dtype=np.uint32)
    for ids, start, stop in zip(lists, offsets[:-1], offsets[1:], strict=True):
        flat[start:stop] = ids
    return flat, offsets


class TokenizersEncoder:
    """Encodes with a tokenizer.json."""

    def __init__(self, spec: TokenizerSpec) -> None:
        from tokenizers import Tokenizer

        # Workers are processes; threads inside them would only fight over the same cores.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        self._tokenizer = Tokenizer.from_str(spec.payload.decode())
        self._tokenizer.encode_special_tokens = True  # special-token text in a document stays text
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def encode(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """See Encoder.encode."""
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return flatten([encoding.ids for encoding in encodings])


class _SentencePieceEncoder:
    def __init__(self, spec: TokenizerSpec) -> None:
        import sentencepiece

        self._model = sentencepiece.SentencePieceProcessor(model_proto=spec.payload)

    def encode(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        return flatten(self._model.encode(texts, add_bos=False, add_eos=False, num_threads=1))


class _PythonEncoder:
    def __init__(self, spec: TokenizerSpec) -> None:
        assert spec.folder is not None
        self._tokenizer = _load_transformers(spec.folder)

    def encode(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        return flatten(
            [
                self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
                for text in texts
            ]
        )


def copy_tokenizer(spec: TokenizerSpec, folder: Path) -> None:
    """Put the tokenizer beside the data, so that packed tokens can always be read as text again."""
    if folder.exists():
        return
    part = temporary(folder)
    if spec.kind == "sentencepiece":
        part.mkdir(parents=True)
        (part / "tokenizer.model").write_bytes(spec.payload)
    else:
        tokenizer = _load_transformers(spec.name)
        # How it was loaded is no part of it: kept, the folder would depend on whether the hub was reachable.
        tokenizer.init_kwargs.pop("local_files_only", None)
        tokenizer.save_pretrained(part)
    try:
        part.rename(folder)
    except OSError:  # another task of the array was first
        shutil.rmtree(part)
        if not folder.exists():
            raise


def open_decoder(folder: Path) -> Callable[[list[int]], str]:
    """ids -> text, for the tokenizer that `copy_tokenizer` put into `folder`."""
    model = folder / "tokenizer.model"
    if model.is_file():
        import sentencepiece

        return sentencepiece.SentencePieceProcessor(model_file=str(model)).decode
    tokenizer = _load_transformers(str(folder))
    return lambda ids: tokenizer.decode(ids, clean_up_tokenization_spaces=False)
