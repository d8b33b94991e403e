"""The whole chain on real text, on this machine, in minutes: `make demo` runs this once it has installed.

Every step is a command of the project, printed as it could be typed. What an earlier demo made and is still
valid (same text, same settings, same code) is used again. The training is stopped half-way by a signal and
resumed in a second launch, as a preempted job would be. Ends with a summary; fails if nothing was learned.
"""

import argparse
import hashlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from tools.plot_run import place, series, sketch
from wm_ds.config import load as configuration
from wm_ds.config.stages import plan
from wm_ds.errors import WmError, run_cli
from wm_ds.files import write_json
from wm_ds.run.metrics_file import read_metrics

ROOT = Path(__file__).resolve().parents[1]
DATA, RUN, CONFIG = Path("data/demo"), Path("runs/demo"), Path("configs/demo.yaml")
TEXT, TOKENIZER, PACKED, EXPORT = DATA / "text.jsonl", DATA / "tokenizer", DATA / "packed", RUN / "export"
STATE = DATA / "state.json"
PROMPTS = ["And it came to pass, that", "SCENE II. A room in the castle.\n\nEnter", "My lord, I will"]
RANKS = 2
# What a training run does not use: to change it does not make the run's result another.
AFTER_TRAINING = [ROOT / "wm_ds" / name for name in ("evaluate", "export", "trained.py")]
# Nothing that ignores context can be better than the unigram entropy; to have learned is to be well below.
MARGIN = 0.5


class DemoError(WmError):
    """The demo cannot go on."""


def known_state() -> dict[str, Any]:
    """What earlier demos have noted; nothing where that is damaged, so that every step is made again."""
    try:
        found = json.loads(STATE.read_text()) if STATE.is_file() else {}
    except ValueError:
        found = None
    if isinstance(found, dict) and all(isinstance(entry, dict | int) for entry in found.values()):
        return found
    print(f"{STATE} is damaged: every step is made again")
    return {}


class Demo:
    """What was done so far: the keys of valid steps, seconds, and the largest memory that was seen."""

    def __init__(self) -> None:
        self.state = known_state()
        self.code = {path: path.read_bytes() for path in sorted((ROOT / "wm_ds").rglob("*.py"))}
        self.passed: set[str] = set()
        self.key = ""
        self.number = 0
        self.peak = 0

    def step(self, name: str, outputs: list[Path], *inputs: bytes) -> bool:
        """Begin a step; True if what is there is not valid and it has to run.

        A step's key covers its inputs, the code, and the step before, so that whatever changes, all that
        follows from it is made again.
        """
        self.number += 1
        after = "training" in self.passed
        unused = [] if after else AFTER_TRAINING
        code = [text for path, text in self.code.items() if not any(path.is_relative_to(p) for p in unused)]
        self.key = _hash(self.key.encode(), name.encode(), *code, *inputs)
        self.passed.add(name)
        valid = self.state.get(name, {}).get("key") == self.key and all(path.exists() for path in outputs)
        note = f"still valid, used again ({', '.join(map(str, outputs))})" if valid else ""
        print(f"\n[{self.number}/8] {name}{': ' + note if note else ''}", flush=True)
        self.begun = time.monotonic()
        return not valid

    def done(self, name: str, **facts: Any) -> None:
        """A step has succeeded."""
        self.state[name] = {"key": self.key, "seconds": round(time.monotonic() - self.begun, 1), **facts}
        self.state["peak_bytes"] = max(self.peak, self.state.get("peak_bytes", 0))
        DATA.mkdir(parents=True, exist_ok=True)
        write_json(STATE, self.state, indent=2)

    def run(self, *command: object, **environment: str) -> None:
        """Run a command of the project; stop here if it fails (it has said why)."""
        process = self.start(*command, **environment)
        self.wait(process)
        if process.returncode:
            raise DemoError(
                f"the demo stopped in step {self.number}, see above; `make demo` goes on from here"
            )

    def start(self, *command: object, **environment: str) -> subprocess.Popen:
        """Start a command that the reader can repeat, and print it."""
        words = [str(word) for word in command]
        if words[0] == "python":
            own = Path(sys.executable)
            words[0] = str(own.relative_to(ROOT) if own.is_relative_to(ROOT) else own)
        shown = [f"{k}={v}" for k, v in environment.items()] + [shlex.quote(word) for word in words]
        print(f"$ {' '.join(shown)}", flush=True)
        return subprocess.Popen(words, cwd=ROOT, env=os.environ | environment)

    def wait(self, process: subprocess.Popen, until: Any = lambda: False) -> None:
        """Until the process ends or `until()` holds; meanwhile its family's memory is watched."""
        try:
            while process.poll() is None and not until():
                self.peak = max(self.peak, _resident(process.pid))
                time.sleep(0.5)
        except KeyboardInterrupt:
            process.wait()
            raise


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    return run_cli(run, argv, interrupted="interrupted; `make demo` goes on from here")


def run(argv: list[str] | None = None) -> None:
    """All steps that are not valid any more, and the summary."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args(argv)
    os.chdir(ROOT)
    demo = Demo()
    source = prepare_text(demo)
    tokenize(demo, source)
    settings = configuration.load(CONFIG)
    train(demo, plan(settings, _seq_len()).total)
    export(demo)
    evaluate(demo)
    summary(demo, settings)


def prepare_text(demo: Demo) -> Path:
    """The text to train on: DEMO_TEXT, or prose that is fetched once."""
    own = os.environ.get("DEMO_TEXT")
    if own:
        source = Path(own).absolute()
        if not source.exists():
            raise DemoError(f"DEMO_TEXT={own} does not exist")
        if not source.is_file() and not source.is_dir():
            raise DemoError(f"DEMO_TEXT={own} is no file and no folder")
        files = [source] if source.is_file() else sorted(p for p in source.rglob("*") if p.is_file())
        demo.step("text", [], *(p.read_bytes() for p in files))
        size = sum(p.stat().st_size for p in files) / 1e6
        print(f"your own text: {source}, {size:.1f} MB in {len(files)} file(s)")
        demo.done("text")
        return source
    if demo.step("text", [TEXT]):
        demo.run("python", "tools/fetch_text.py", "--output", TEXT)
        demo.done("text")
    return TEXT


def tokenize(demo: Demo, source: Path) -> None:
    """Train the tokenizer and pack the text."""
    if demo.step("tokenizer", [TOKENIZER]):
        shutil.rmtree(TOKENIZER, ignore_errors=True)
        command = ["python", "tools/train_tokenizer.py", "--input", source, "--vocab-size", 4096]
        demo.run(*command, "--output", TOKENIZER)
        demo.done("tokenizer")
    if demo.step("packed data", [PACKED / "manifest.json"]):
        shutil.rmtree(PACKED, ignore_errors=True)
        command = ["python", "tools/pack_data.py", "--input", source, "--tokenizer", TOKENIZER]
        demo.run(*command, "--output", PACKED, "--seq-len", 256, "--align", 8, "--holdout", 256)
        demo.done("packed data")


def train(demo: Demo, steps: int) -> None:
    """Two launches of the same command: the first is told to stop half-way, the second goes on to the end."""
    needed = demo.step("training", [RUN / "done", RUN / "checkpoints" / "latest"], CONFIG.read_bytes())
    if not needed:
        return
    if demo.state.get("training begun") != demo.key:
        shutil.rmtree(RUN, ignore_errors=True)
        demo.state.pop("training", None)
        demo.state["training begun"] = demo.key
        write_json(STATE, demo.state, indent=2)
    environment = _threads()
    launch = ["python", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", RANKS]
    launch += ["-m", "wm_ds.train", CONFIG]
    half = steps // 2
    if _step() < half:
        process = demo.start(*launch, **environment)
        demo.wait(process, until=lambda: _step() >= half)
        if process.poll() is None:
            print(
                f"\n--- SIGTERM at step {_step()}, as a scheduler sends it before it takes a node", flush=True
            )
            for rank in _ranks(process.pid):
                rank.send_signal(signal.SIGTERM)
            demo.wait(process)
        if process.returncode or not (RUN / "stopped").is_file():
            raise DemoError("the training did not stop as asked, see above")
        at = json.loads((RUN / "stopped").read_text())["step"]
        print(f"--- stopped and saved at step {at}; the same command again resumes it", flush=True)
        demo.state["stopped at"] = at
    demo.run(*launch, **environment)
    if not (RUN / "done").is_file():
        raise DemoError("the training ended without finishing, see above")
    demo.done("training")


def export(demo: Demo) -> None:
    """Export the run and compare the folder with it."""
    if demo.step("export", [EXPORT / "config.json"]):
        demo.run("python", "tools/export_hf.py", RUN, "--output", EXPORT, "--dtype", "float32")
        demo.done("export")
    check = RUN / "check.json"
    if demo.step("load without wm_ds, compare, generate", [check]):
        prompts = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
        demo.run("python", "tools/check_export.py", EXPORT, "--against", RUN, *prompts, "--json", check)
        demo.done("load without wm_ds, compare, generate")


def evaluate(demo: Demo) -> None:
    """Held-out perplexity by number of passes."""
    numbers = RUN / "perplexity.json"
    if demo.step("held-out perplexity", [numbers]):
        command = ["python", "-m", "wm_ds.evaluate", "perplexity", RUN, "--sequences", 32, "--exact", 4]
        demo.run(*command, "--json", numbers)
        demo.done("held-out perplexity")
    picture, report = RUN / "curves.png", RUN / "report.html"
    if demo.step("picture and report", [picture, report]):
        demo.run("python", "tools/plot_run.py", RUN, "--output", picture)
        demo.run("python", "tools/report.py", RUN, "--output", report)
        demo.done("picture and report")


def summary(demo: Demo, settings: configuration.Config) -> None:
    """One screen: what was trained, how well, what lies where, and what it cost."""
    packed, numbers, check, config = (
        json.loads(path.read_text())
        for path in (
            PACKED / "manifest.json",
            RUN / "perplexity.json",
            RUN / "check.json",
            EXPORT / "config.json",
        )
    )
    rows = read_metrics(RUN / "metrics.jsonl")
    steps = [row for row in rows if "loss" in row]
    first, last = steps[0], steps[-1]
    held_out = [row["holdout_loss"] for row in rows if "holdout_loss" in row][-1]
    entropy = numbers["unigram_entropy"]
    weights = sum(path.stat().st_size for path in EXPORT.glob("model*.safetensors")) / 4e6
    passes = [row for row in numbers["rows"] if row["kind"] == "cyclic" and not row["beside_exact"]]
    exact, trained = (
        next(row["perplexity"] for row in numbers["rows"] if row["beside_exact"] and row[key] == value)
        for key, value in (("kind", "exact"), ("as_trained", True))
    )
    seconds = sum(entry["seconds"] for entry in demo.state.values() if isinstance(entry, dict))
    this_time = ""
    if "DEMO_STARTED" in os.environ:
        this_time = f"{time.time() - float(os.environ['DEMO_STARTED']):.0f} s this time with installation; "

    lines = [
        ("model", f"WhiteMatter, {weights:.1f} M parameters, {settings.model.num_hidden_layers} layers"),
        ("", f"on {config['num_kv_channels']} KV channels"),
        (
            "data",
            f"{packed['counts']['text_bytes'] / 1e6:.1f} MB of text, {packed['counts']['tokens']:,} tokens,",
        ),
        ("", f"vocabulary {packed['vocab_size']:,}, {packed['holdout']} sequences held out"),
        ("training", f"{last['step']} steps, {last['tokens']:,} tokens, {RANKS} ranks, ZeRO-2;"),
        ("", f"stopped by a signal at step {demo.state.get('stopped at')}, resumed"),
        ("loss", f"{first['loss']:.3f} at first, {last['loss']:.3f} at last, {held_out:.3f} held out"),
        ("", f"{entropy:.3f} is the unigram entropy of the held-out text: the best without any context"),
        ("perplexity", ", ".join(f"{row['perplexity']:.2f}" for row in passes)),
        ("", f"held out, with 1 to {len(passes)} passes"),
        ("", f"{trained:.2f} as trained, {exact:.2f} exactly, on the same few sequences"),
        ("export", f"loads without wm_ds, logits as the trainer's to {check['difference']:.0e}"),
        ("time", f"{this_time}{seconds:.0f} s for all steps"),
        ("memory", f"{demo.state['peak_bytes'] / 1e9:.1f} GB at most, all processes together"),
        ("files", f"{RUN}/report.html (open it in a browser), {EXPORT} (the model),"),
        ("", f"{RUN}/curves.png, metrics.jsonl, tensorboard, checkpoints, {DATA}"),
    ]
    points = series(place(rows), "loss", "step")
    print("\n" + sketch(points, "training loss (nats per token) by step", height=8) + "\n")
    print("\n".join(f"{name:>11}  {text}" for name, text in lines))
    for text in check["texts"]:
        words = " / ".join(line.strip() for line in text.splitlines() if line.strip())
        print(f"{'prompt':>11}  {words[:100]}")
    if not held_out < entropy - MARGIN:
        raise DemoError(f"{held_out:.3f} held out is not clearly below the unigram entropy {entropy:.3f}")


# -- helpers -----------------------------------------------------------------------------------------------


def _hash(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:16]


def _seq_len() -> int:
    return json.loads((PACKED / "manifest.json").read_text())["seq_len"]


def _step() -> int:
    """The last step that the run has done."""
    return max((row["step"] for row in read_metrics(RUN / "metrics.jsonl")), default=0)


def _ranks(launcher: int) -> list[psutil.Process]:
    return [
        p for p in psutil.Process(launcher).children(recursive=True) if "wm_ds.train" in " ".join(p.cmdline())
    ]


def _resident(pid: int) -> int:
    """Bytes of memory of a process and its descendants; what they share counts in each."""
    total = 0
    try:
        process = psutil.Process(pid)
        for member in [process, *process.children(recursive=True)]:
            total += member.memory_info().rss
    except psutil.NoSuchProcess:
        pass
    return total


def _threads() -> dict[str, str]:
    """Each rank its share of the cores; on the CPU unless there is a GPU for each rank."""
    environment = {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // RANKS))}
    if shutil.which("nvidia-smi"):
        import torch

        if torch.cuda.device_count() < RANKS:
            environment["DS_ACCELERATOR"] = "cpu"
    return environment


if __name__ == "__main__":
    sys.exit(main())
