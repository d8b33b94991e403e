"""Continuations of fixed prompts while a run trains: `log.samples`.

Every token is chosen from a whole forward with the passes of training, so that what is written is what the
trained schedule would score; nothing is cached. The numbers that choose come from generators of their own:
training's are not touched. All ranks run the same forwards, since at ZeRO stage 3 each needs the others for
its parameters; rank 0's choices are what is written.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch

from wm_ds.config.schema import Config, ConfigError, Samples
from wm_ds.data.shards import load_manifest
from wm_ds.engine.engine import Engine
from wm_ds.errors import WmError
from wm_ds.packing.tokenizer import make_encoder, open_decoder, open_tokenizer


class Sampler:
    """The prompts as ids, and how their continuations become text."""

    def __init__(
        self,
        said: Samples,
        seed: int,
        prompts: list[list[int]],
        decode: Callable[[list[int]], str],
        size: int,
    ) -> None:
        """`size`: of the tokenizer; ids beyond are padding of the vocabulary and are never chosen."""
        self.said, self.seed, self.prompts, self.decode, self.size = said, seed, prompts, decode, size

    def texts(self, engine: Engine) -> list[dict[str, str]]:
        """`prompt` and `text` for each prompt. Collective. The same draws at every step of the run, so that
        two texts differ by what was learned between them."""
        found = []
        for number, ids in enumerate(self.prompts):
            generator = torch.Generator().manual_seed(self.seed + number)
            row = list(ids)
            for _ in range(self.said.tokens):
                logits_V = engine.next_token_logits(row)[: self.size]
                row.append(choose(logits_V, self.said.temperature, generator))
            found.append({"prompt": self.said.prompts[number], "text": self.decode(row[len(ids) :])})
        return found


def choose(logits_V: torch.Tensor, temperature: float, generator: torch.Generator) -> int:
    """An id: the likeliest at temperature 0, else drawn. Logits that are no numbers give id 0: a run whose
    weights are spoiled is ended by what counts its steps, not by its samples."""
    if not bool(torch.isfinite(logits_V).all()):
        return 0
    if temperature == 0:
        return int(logits_V.argmax())
    return int(torch.multinomial((logits_V / temperature).softmax(-1), 1, generator=generator))


def open_sampler(config: Config, seq_len: int) -> Sampler | None:
    """The run's sampler, None where it asks for none; `seq_len`: the model's longest row.

    Raises ConfigError where the tokenizer cannot be opened, or a prompt is empty or too long.
    """
    said = config.log.samples
    if said is None:
        return None
    folder = tokenizer_folder(config)
    try:
        spec = open_tokenizer(
            str(folder if (folder / "tokenizer.json").is_file() else folder / "tokenizer.model")
        )
        ids, offsets = make_encoder(spec).encode(said.prompts)
        decode = open_decoder(folder)
    except WmError as error:
        raise ConfigError(f"log.samples: {error}") from None
    data = config.data.sources()[0].path
    packed = load_manifest(data)["tokenizer"].get("sha256")
    if packed is not None and packed != spec.sha256:
        raise ConfigError(
            f"log.samples: {folder} is not the tokenizer that packed {data} (its sha256 differs); give the "
            "right folder as data.tokenizer"
        )
    prompts = [ids[a:b].tolist() for a, b in pairwise(offsets)]
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise ConfigError(f"log.samples.prompts.{number} is empty; give at least a token to go on from")
        if len(prompt) + said.tokens > seq_len:
            raise ConfigError(
                f"log.samples.prompts.{number} has {len(prompt)} tokens, and with log.samples.tokens = "
                f"{said.tokens} more it is longer than the model's rows of {seq_len}; shorten one of them"
            )
    return Sampler(said, config.run.seed, prompts, decode, spec.vocab_size)


def tokenizer_folder(config: Config) -> Path:
    """Where the data's tokenizer lies. Raises ConfigError where it is not there."""
    data = Path(config.data.sources()[0].path)
    named = load_manifest(data)["tokenizer"]["name"]
    candidates = [Path(config.data.tokenizer)] if config.data.tokenizer else [data / "tokenizer", Path(named)]
    for folder in candidates:
        if any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
            return folder
    raise ConfigError(
        f"log.samples needs the data's tokenizer, and {candidates[0]} has no tokenizer.json or "
        "tokenizer.model; give its folder as data.tokenizer, or leave log.samples out"
    )
