"""The random number generators of one rank as JSON: Python, NumPy, torch on the host and on its device."""

import base64
import hashlib
import random
from typing import Any

import numpy as np
import torch


def capture() -> dict[str, Any]:
    """The state of this process's generators, in plain JSON types."""
    kind, keys, at, has_gauss, gauss = np.random.get_state()
    version, words, spare = random.getstate()
    state = {
        "python": [version, list(words), spare],
        "numpy": [kind, keys.tolist(), int(at), int(has_gauss), float(gauss)],
        "torch": _to_text(torch.get_rng_state()),
    }
    if torch.cuda.is_available():
        state["cuda"] = _to_text(torch.cuda.get_rng_state())
    return state


def restore(state: dict[str, Any]) -> None:
    """Put the generators of this process back; a generator that this machine does not have is left out."""
    version, words, spare = state["python"]
    random.setstate((version, tuple(words), spare))
    kind, keys, at, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), at, has_gauss, gauss))
    torch.set_rng_state(_from_text(state["torch"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(_from_text(state["cuda"]))


def restore_derived(state: dict[str, Any], rank: int) -> None:
    """Seed the generators of a rank that did not exist when `state` (of another rank) was saved.

    The same checkpoint and rank give the same seed, and no two ranks share one.
    """
    digest = hashlib.sha256(f"{state['torch']}:{rank}".encode()).digest()
    seed = int.from_bytes(digest[:4], "little")
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _to_text(state: torch.Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode()


def _from_text(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
