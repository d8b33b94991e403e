"""The language model that the harness asks, and one of its requests scored by hand."""

import torch

from wm_ds.evaluate.scheduled_lm import ScheduledLM

EOS = 256  # of exported.make_tokenizer


def make_lm(model, tokenizer, batch: int, schedule=None) -> ScheduledLM:
    return ScheduledLM(model, tokenizer, batch_size=batch, schedule=schedule)


def by_hand(model, tokenizer, context: str, continuation: str, schedule=None) -> tuple[float, bool]:
    """One request alone, from whole logits, in double precision."""
    before = tokenizer.encode(context, add_special_tokens=False) or [EOS]
    both = tokenizer.encode(context + continuation, add_special_tokens=False)
    after = both[len(before) :] if context else both
    ids = torch.tensor([before + after])
    with torch.no_grad():
        logits = model(ids[:, :-1], schedule=schedule).logits[0, len(before) - 1 :].double()
    picked = torch.log_softmax(logits, dim=1).gather(1, torch.tensor(after)[:, None])
    return float(picked.sum()), bool((logits.argmax(dim=1) == torch.tensor(after)).all())
