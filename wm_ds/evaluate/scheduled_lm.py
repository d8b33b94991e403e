"""The model behind lm-evaluation-harness's tasks: an explicit schedule, masked padding, bounded logits.

Log-probabilities are made from hidden states a few rows at a time, so that T x V logits never exist at once.

Shapes: B requests, T tokens, C continuation tokens, D width, V vocabulary.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor
from tqdm import tqdm

from wm_ds.model import Converged, Schedule

log = logging.getLogger(__name__)
LOGITS = 1 << 24  # logits in hand at a time: 64 MiB in fp32, 110 positions at a vocabulary of 151,936
BAR = "log-likelihoods"
ANSWER_LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens", "max_length")


class ScheduledLM(HFLM):
    """The harness's Hugging Face model with an explicit schedule and bounded logits.

    `schedule`: the passes over every text to be scored and every prompt to be answered; None for the model's
    own (its prefill schedule, or one causal pass for a model without feedback). `batch_size` changes no
    score.

    `cuts` counts the requests that did not fit into W = max_position_embeddings tokens, by what was done:
    - A context before a continuation loses tokens on its left; at least its last one stays.
    - A continuation longer than W is scored as rolling perplexity scores a text, every token once in windows
      of W, the first one behind the context's last token. Nothing of the continuation is lost.
    - A prompt keeps its last W - max_gen_toks tokens. A task that asks for answers of W tokens or more gets
      answers of at most W // 2.
    Rolling perplexity cuts nothing. Where the harness's own backend accepts a request, both do the same.
    """

    CONTEXT, WINDOWS, PROMPT, ANSWER = (
        "lost tokens on the left of the context",
        "had a continuation longer than the rows, scored in windows",
        "lost tokens on the left of the prompt",
        "got a shorter answer than the task allows",
    )

    def __init__(
        self, model: Any, tokenizer: Any, *, batch_size: int, schedule: Schedule | Converged | None = None
    ) -> None:
        super().__init__(
            pretrained=model,
            tokenizer=tokenizer,
            backend="causal",
            batch_size=batch_size,
            max_length=model.config.max_position_embeddings,
            add_bos_token=False,
        )
        self.schedule = schedule
        self.cuts: Counter[str] = Counter()
        self.scored, self.said = 0, time.monotonic()

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """The harness's method. Nothing behind nothing, which it cannot encode, has probability one."""
        empty = [request.args == ("", "") for request in requests]
        some = [request for request, nothing in zip(requests, empty) if not nothing]
        scores = iter(super().loglikelihood(some, disable_tqdm=disable_tqdm))
        return [(0.0, True) if nothing else next(scores) for nothing in empty]

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        """(sum of log-probabilities, whether greedy decoding gives it) of each (name, context, continuation).

        The name is None for rolling perplexity, whose windows fit.
        """
        size = override_bs or int(self.batch_size)
        windows = [
            (i, *window) for i, (_, *tokens) in enumerate(requests) for window in self.windows(*tokens)
        ]
        windows.sort(key=lambda window: -len(window[1]) - len(window[2]))
        totals, greedy = [0.0] * len(requests), [True] * len(requests)
        # Rolling perplexity calls this once a batch, so its progress is counted here over the calls.
        one_batch = len(windows) <= size
        interval = 0.1 if sys.stderr.isatty() else 30.0  # a line now and then where bars cannot be redrawn
        bar = tqdm(total=len(windows), disable=disable_tqdm or one_batch, desc=BAR, mininterval=interval)
        if one_batch:
            self.scored += len(windows)
            if time.monotonic() - self.said > 30:
                self.said = time.monotonic()
                log.info("%s: %d windows", BAR, self.scored)
        for start in range(0, len(windows), size):
            chunk = windows[start : start + size]
            hidden_BTD = self.hidden([context + continuation for _, context, continuation in chunk])
            for (i, context, continuation), hidden_TD in zip(chunk, hidden_BTD):
                first, targets_C = len(context) - 1, torch.tensor(continuation, device=hidden_TD.device)
                score, best = self.score(hidden_TD[first : first + len(continuation)], targets_C)
                totals[i] += score
                greedy[i] &= best
            bar.update(len(chunk))
        bar.close()
        answers = list(zip(totals, greedy))
        for (name, *_), answer in zip(requests, answers):
            if name is not None:
                self.cache_hook.add_partial("loglikelihood", name, answer)
        return answers

    def windows(self, context: list[int], continuation: list[int]) -> list[tuple[list[int], list[int]]]:
        """(context, continuation) of at most W + 1 tokens each, which together score every token once.

        An empty context becomes the separator; an empty continuation has no window. Counts what is cut.
        """
        context, longest = context or [self.prefix_token_id], self.max_length
        if not continuation:
            return []
        if len(continuation) <= longest:
            kept = context[-(longest + 1 - len(continuation)) :]
            self.cuts[self.CONTEXT] += len(kept) < len(context)
            return [(kept, continuation)]
        self.cuts[self.WINDOWS] += 1
        pairs = get_rolling_token_windows(continuation, context[-1], longest, 1)
        return [make_disjoint_window(pair) for pair in pairs]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The harness's method, for answers that fit into the rows; longer ones are limited first."""
        fitting = []
        for request in requests:
            context, asked = request.args
            wanted = normalize_gen_kwargs(asked, self.max_gen_toks)["max_gen_toks"]
            if wanted >= self.max_length:
                self.cuts[self.ANSWER] += 1
                asked = {key: value for key, value in asked.items() if key not in ANSWER_LIMITS}
                asked["max_gen_toks"] = max(1, self.max_length // 2)
                request = replace(request, arguments=(context, asked))
            fitting.append(request)
        return super().generate_until(fitting, disable_tqdm=disable_tqdm)

    def tok_batch_encode(
        self,
        strings: list[str],
        padding_side: str = "left",
        left_truncate_len: int | None = None,
        truncation: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """(ids, mask), int64 [B, T], of prompts: each cut by itself and counted, an empty one a separator."""
        rows = [self.tok_encode(text) or [self.prefix_token_id] for text in strings]
        if left_truncate_len:
            self.cuts[self.PROMPT] += sum(len(row) > left_truncate_len for row in rows)
            rows = [row[-left_truncate_len:] for row in rows]
        length = max(len(row) for row in rows)
        ids_BT = torch.full((len(rows), length), self.tokenizer.pad_token_id or 0)
        mask_BT = torch.zeros_like(ids_BT)
        for b, row in enumerate(rows):
            place = slice(length - len(row), None) if padding_side == "left" else slice(len(row))
            ids_BT[b, place], mask_BT[b, place] = torch.tensor(row), 1
        return ids_BT, mask_BT

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **settings: Any) -> Tensor:
        """The harness's method, the schedule applied to prompts; ids that have no token are never picked."""
        if max_length > self.max_length:  # a task may say how long prompt and answer are together
            self.cuts[self.ANSWER] += len(context)
            max_length = self.max_length
        if self.schedule is not None:
            settings["schedule"] = self.schedule
        if len(self.tokenizer) < self.model.config.vocab_size:
            settings["suppress_tokens"] = list(range(len(self.tokenizer), self.model.config.vocab_size))
        return super()._model_generate(context, max_length, stop, **settings)

    @torch.no_grad()
    def hidden(self, rows: list[list[int]]) -> Tensor:
        """Final hidden states of each row but its last token, [B, T, D]; padded on the right, masked."""
        length = max(len(row) for row in rows) - 1
        ids_BT = torch.zeros(len(rows), length, dtype=torch.long)
        mask_BT = torch.zeros_like(ids_BT)
        for b, row in enumerate(rows):
            ids_BT[b, : len(row) - 1] = torch.tensor(row[:-1])
            mask_BT[b, : len(row) - 1] = 1
        extra = {} if self.schedule is None else {"schedule": self.schedule}
        out = self.model.model(
            input_ids=ids_BT.to(self.device), attention_mask=mask_BT.to(self.device), use_cache=False, **extra
        )
        return out.last_hidden_state

    @torch.no_grad()
    def score(self, hidden_CD: Tensor, targets_C: Tensor) -> tuple[float, bool]:
        """Sum of the targets' log-probabilities, and whether each is the most probable token."""
        head_VD = self.model.get_output_embeddings().weight
        rows = max(1, LOGITS // head_VD.shape[0])
        total, greedy = 0.0, True
        for start in range(0, len(targets_C), rows):
            logits_CV = F.linear(hidden_CD[start : start + rows], head_VD).float()
            part_C = targets_C[start : start + rows]
            picked_C = logits_CV.gather(1, part_C[:, None])[:, 0]
            total += float((picked_C.double() - logits_CV.logsumexp(dim=1).double()).sum())
            greedy &= bool((logits_CV.argmax(dim=1) == part_C).all())
        return total, greedy
