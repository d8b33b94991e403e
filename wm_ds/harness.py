"""Downstream tasks with EleutherAI's lm-evaluation-harness, used as a library.

The tasks, prompts and metrics are the harness's own. What is ours is the model behind them: the schedule of
passes is explicit, padding is masked, and log-probabilities are made from hidden states a few rows at a
time, so that T x V logits never exist at once. With `data` the same tasks read local files, not the Hub:

    DIR/TASK/SPLIT.jsonl    TASK as the harness names it, SPLIT "test" or "validation", one record a line with
                            the columns of the Hub's data set; lambada/ and wikitext2/ are found as well, and
                            any *.jsonl whose name holds the split's

Shapes: B requests, T tokens, C continuation tokens, D width, V vocabulary.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from torch import Tensor
from tqdm import tqdm

from wm_ds.model import Converged, Schedule

# The paper's suite (§4.3) and the split that each task is scored on.
PAPER = {
    "lambada_openai": "test",
    "wikitext": "test",
    "piqa": "validation",
    "hellaswag": "validation",
    "arc_easy": "test",
    "arc_challenge": "test",
    "openbookqa": "test",
    "winogrande": "validation",
    "boolq": "validation",
}
LOGITS = 1 << 24  # logits in hand at a time: 64 MiB in fp32, 110 positions at a vocabulary of 151,936
BAR = "log-likelihoods"
FOLDERS = {"lambada_openai": "lambada", "wikitext": "wikitext2"}


class HarnessError(ValueError):
    """A task or its local data cannot be used; the message is one line."""


class ScheduledLM(HFLM):
    """The harness's Hugging Face model with an explicit schedule and bounded logits.

    `schedule`: the passes of every scoring forward; None for the model's own (its prefill schedule, or one
    causal pass for a model without feedback).
    """

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
        self.scored, self.said = 0, time.monotonic()

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        """(sum of log-probabilities, whether greedy decoding gives it) of each (name, context, continuation).

        As in the harness, a request that is too long loses tokens on its left.
        """
        size = override_bs or int(self.batch_size)
        order = sorted(range(len(requests)), key=lambda i: -len(requests[i][1]) - len(requests[i][2]))
        answers: dict[int, tuple[float, bool]] = {}
        # Rolling perplexity calls this once a batch, so its progress is counted here over the calls.
        one_batch = len(requests) <= size
        interval = 0.1 if sys.stderr.isatty() else 30.0  # a line now and then where bars cannot be redrawn
        bar = tqdm(total=len(requests), disable=disable_tqdm or one_batch, desc=BAR, mininterval=interval)
        if one_batch:
            self.scored += len(requests)
            if time.monotonic() - self.said > 30:
                self.said = time.monotonic()
                print(f"{BAR}: {self.scored} windows", file=sys.stderr, flush=True)
        for start in range(0, len(order), size):
            chunk = order[start : start + size]
            rows = [(requests[i][1] + requests[i][2])[-(self.max_length + 1) :] for i in chunk]
            hidden_BTD = self.hidden(rows)
            for i, row, hidden_TD in zip(chunk, rows, hidden_BTD):
                continuation = requests[i][2]
                first = len(row) - 1 - len(continuation)
                targets_C = torch.tensor(continuation, device=hidden_TD.device)
                answers[i] = self.score(hidden_TD[first : len(row) - 1], targets_C)
                if requests[i][0] is not None:
                    self.cache_hook.add_partial("loglikelihood", requests[i][0], answers[i])
                bar.update()
        bar.close()
        return [answers[i] for i in range(len(requests))]

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


@cache
def manager() -> TaskManager:
    """The harness's index of tasks; reading it takes seconds."""
    return TaskManager()


def find_tasks(names: list[str]) -> list[str]:
    """Task names, "paper" standing for the paper's suite. Raises HarnessError for unknown ones."""
    wanted = [task for name in names for task in (PAPER if name == "paper" else [name])]
    for name in wanted:
        if name not in manager().task_index:
            raise HarnessError(f"lm-evaluation-harness has no task {name!r}")
    return list(dict.fromkeys(wanted))


def local_files(name: str, data: Path) -> dict[str, str]:
    """Split -> file of a task's local data. Raises HarnessError where there is none."""
    split = PAPER.get(name)
    folders = [folder for folder in (data / name, data / FOLDERS.get(name, name)) if folder.is_dir()]
    if not folders:
        raise HarnessError(f"no local data for task {name}: {data / name} does not exist")
    files: dict[str, str] = {}
    for wanted in [split] if split else ["train", "validation", "test"]:
        found = sorted(folders[0].glob(f"*{wanted}*.jsonl"), key=lambda p: (p.stem != wanted, p.name))
        if found:
            files[wanted] = str(found[0].resolve())
    if not files:
        raise HarnessError(f"no local data for task {name}: {folders[0]} holds no {split or 'SPLIT'}.jsonl")
    return files


def local_task(name: str, data: Path, folder: Path) -> str:
    """A task file in `folder` that is the stock task but for the place of its data; returns its path."""
    stock = manager().task_index[name].yaml_path
    if stock is None:
        raise HarnessError(f"task {name} is a program and cannot be given local data; run it without --data")
    task: dict[str, Any] = {
        "include": str(Path(stock).resolve()),
        "task": name,
        "dataset_path": "json",
        "dataset_name": None,
    }
    files = local_files(name, data)
    task["dataset_kwargs"] = {"data_files": files}
    for key, split in (("training", "train"), ("validation", "validation"), ("test", "test")):
        task[f"{key}_split"] = split if split in files else None
    task["fewshot_split"] = None
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(task))  # JSON is YAML
    return str(path)


def run(
    lm: HFLM, tasks: list[str], *, data: Path | None = None, limit: int | None = None
) -> dict[str, dict[str, float]]:
    """Zero-shot results, task -> metric -> value."""
    with tempfile.TemporaryDirectory() as scratch:
        entries = [name if data is None else local_task(name, data, Path(scratch)) for name in tasks]
        results = simple_evaluate(
            lm,
            tasks=entries,
            num_fewshot=0,
            limit=limit,
            bootstrap_iters=0,
            log_samples=False,
            task_manager=manager(),
        )
    assert results is not None  # only other ranks get None
    return {
        name: {
            key.removesuffix(",none"): float(value)
            for key, value in metrics.items()
            if key.endswith(",none") and isinstance(value, int | float)
        }
        for name, metrics in results["results"].items()
    }


def table(results: dict[str, dict[str, float]]) -> str:
    """One line a metric."""
    lines = [f"{'task':<18}{'metric':<18}{'value':>10}"]
    for name, metrics in results.items():
        lines += [f"{name:<18}{key:<18}{value:>10.4f}" for key, value in metrics.items()]
    return "\n".join(lines)
