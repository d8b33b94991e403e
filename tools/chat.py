"""Talk to a trained model: a prompt in, its continuation as it is made.

    python tools/chat.py DIR                         # ask, read, ask again; an empty line or Ctrl-D ends it
    python tools/chat.py DIR "Once upon a time"      # one prompt
    echo "Once upon a time" | python tools/chat.py DIR

DIR is an exported folder, a run's directory (its newest checkpoint) or one checkpoint. Where the tokenizer
has a chat template the whole conversation goes through it; a base model continues each text as it stands
(--raw does so with any). Ctrl-C ends an answer, and a second one the program. No code of the folder is run:
the model is this project's own.
"""

import argparse
import queue
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wm_ds.errors import WmError, run_cli

if TYPE_CHECKING:
    import torch

PREFILLS = ("trained", "exact")


class ChatError(WmError):
    """A prompt that cannot be answered; the message says why."""


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    return run_cli(run, argv)


def parser() -> argparse.ArgumentParser:
    """The command line's options."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("folder", type=Path, metavar="DIR")
    found.add_argument("prompt", nargs="?", help="default: what is typed, or all of standard input")
    found.add_argument("--tokens", type=int, default=200, help="longest answer (default: 200)")
    found.add_argument(
        "--temperature", type=float, default=0.8, help="0 takes the likeliest token (default: 0.8)"
    )
    found.add_argument("--top-p", type=float, default=0.95, help="default: 0.95")
    found.add_argument("--seed", type=int, help="the same answers again")
    found.add_argument("--raw", action="store_true", help="no chat template, also where there is one")
    found.add_argument(
        "--prefill",
        choices=PREFILLS,
        help="how a prompt is read: as the model's configuration says (default), with the trained passes, or "
        "exactly, token by token",
    )
    found.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    return found


def run(argv: list[str] | None = None) -> int:
    """The command, its errors as exceptions; returns the exit code."""
    options = parser().parse_args(argv)
    for name, value, fits in (
        ("--tokens", options.tokens, options.tokens > 0),
        ("--temperature", options.temperature, options.temperature >= 0),
        ("--top-p", options.top_p, 0 < options.top_p <= 1),
    ):
        if not fits:
            raise ChatError(f"{name} {value} is out of range")
    chat = open_chat(options)
    if options.prompt is not None or not sys.stdin.isatty():
        prompt = sys.stdin.read() if options.prompt is None else options.prompt
        for piece in chat.answer(prompt):
            print(piece, end="", flush=True)
        print()
        return 0
    converse(chat)
    return 0


def converse(chat: "Chat") -> None:
    """Ask and answer until an empty line or the end of input."""
    print(chat.about)
    while True:
        try:
            prompt = input("> ")
        except EOFError:
            print()
            return
        if not prompt.strip():
            return
        try:
            for piece in chat.answer(prompt):
                print(piece, end="", flush=True)
        except KeyboardInterrupt:
            print(" …", end="")
        except ChatError as error:
            print(f"error: {error}", end="")
        print("\n")


def open_chat(options: argparse.Namespace) -> "Chat":
    """The model and its tokenizer. Raises WmError where one of them is not there."""
    import torch
    import transformers

    from wm_ds import trained

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    source = trained.find(options.folder)
    folder = source.tokenizer_dir()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ChatError(f"{folder} holds no tokenizer that transformers reads: {reason}") from None
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    lm = source.load(getattr(torch, options.dtype), device)
    if options.prefill is not None:
        if not hasattr(lm.config, "prefill"):
            raise ChatError(f"--prefill {options.prefill}: {lm.config.model_type} has no passes to choose")
        lm.config.prefill = options.prefill
    if options.seed is not None:
        torch.manual_seed(options.seed)
    return Chat(lm, tokenizer, options)


class Chat:
    """A model, its tokenizer, and the conversation so far."""

    def __init__(self, lm: Any, tokenizer: Any, options: argparse.Namespace) -> None:
        self.lm, self.tokenizer, self.options = lm, tokenizer, options
        self.templated = bool(getattr(tokenizer, "chat_template", None)) and not options.raw
        self.messages: list[dict[str, str]] = []
        self.longest = lm.config.max_position_embeddings
        kind = "a conversation by its chat template" if self.templated else "texts, which it continues"
        self.about = f"{options.folder}: {lm.config.model_type}, rows of {self.longest} tokens; takes {kind}."

    def ids(self, prompt: str) -> "torch.Tensor":
        """[1, T] of the prompt, with the conversation before it where there is a template."""
        if not self.templated:
            found = self.tokenizer(prompt, add_special_tokens=False)["input_ids"]
            if not found and self.tokenizer.eos_token_id is not None:
                found = [self.tokenizer.eos_token_id]  # what a document begins behind
        else:
            asked = [*self.messages, {"role": "user", "content": prompt}]
            found = self.tokenizer.apply_chat_template(
                asked, add_generation_prompt=True, tokenize=True, return_dict=False
            )
        import torch

        return torch.tensor([found], dtype=torch.long, device=self.lm.device)

    def answer(self, prompt: str) -> Iterator[str]:
        """The answer piece by piece; it joins the conversation once it is complete or was cut off.

        Raises ChatError for a prompt that leaves no room for an answer.
        """
        ids = self.ids(prompt)
        room = self.longest - ids.shape[1]
        if room < 1:
            raise ChatError(
                f"the prompt{' and what was said before' * bool(self.messages)} has {ids.shape[1]} tokens, "
                f"and the model's rows have {self.longest}: shorten it"
            )
        new: list[int] = []
        shown = ""
        try:
            for token in self.tokens(ids, min(self.options.tokens, room)):
                new.append(token)
                text = self.tokenizer.decode(new, skip_special_tokens=True)
                if text.endswith("\N{REPLACEMENT CHARACTER}"):  # a character of several tokens
                    continue
                piece, shown = text[len(shown) :], text
                yield piece
        finally:
            if self.templated:
                self.messages += [
                    {"role": "user", "content": prompt},
                    {"role": "assistant", "content": shown},
                ]

    def tokens(self, ids: "torch.Tensor", most: int) -> Iterator[int]:
        """The answer's tokens as they are made, without the one that ends it."""
        stream = _Stream()
        worker = threading.Thread(target=self._generate, args=(ids, most, stream), daemon=True)
        worker.start()
        ends = self.lm.generation_config.eos_token_id
        ends = set(ends) if isinstance(ends, list) else {ends}
        try:
            while (token := stream.made.get()) is not None:
                if isinstance(token, BaseException):
                    raise token
                if token not in ends:
                    yield token
        finally:
            stream.left.set()
            worker.join()

    def _generate(self, ids: "torch.Tensor", most: int, stream: "_Stream") -> None:
        import torch

        o = self.options
        how: dict[str, Any] = {"do_sample": o.temperature > 0}
        if o.temperature > 0:
            how |= {"temperature": o.temperature, "top_p": o.top_p, "top_k": 0}
        padding = self.tokenizer.pad_token_id
        how["pad_token_id"] = self.tokenizer.eos_token_id if padding is None else padding
        end: BaseException | None = None
        try:
            with torch.no_grad():
                mask = torch.ones_like(ids)
                self.lm.generate(ids, attention_mask=mask, max_new_tokens=most, streamer=stream, **how)
        except _Stopped:
            pass
        except BaseException as error:
            end = error
        stream.made.put(end)


class _Stream:
    """What `generate` gives its tokens to: first the prompt, then one after another.

    Attributes:
        made: the tokens; at the end None, or what went wrong.
        left: set where nobody reads any more: the next token ends the generation.
    """

    def __init__(self) -> None:
        self.made: queue.Queue[int | BaseException | None] = queue.Queue()
        self.left = threading.Event()
        self._prompt_seen = False

    def put(self, value: Any) -> None:
        """Called by generate."""
        if self.left.is_set():
            raise _Stopped
        if self._prompt_seen:
            self.made.put(int(value.flatten()[0]))
        self._prompt_seen = True

    def end(self) -> None:
        """Called by generate; the worker says it."""


class _Stopped(Exception):
    """The reader of the stream has gone."""


if __name__ == "__main__":
    sys.exit(main())
