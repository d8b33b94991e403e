"""Load an exported folder with transformers alone, and say what it computes.

Run as a program of its own, `python -I standalone.py FOLDER REQUEST.json RESULT.safetensors`, it stands for
somebody who has downloaded the folder and knows nothing of wm_ds: importing wm_ds is refused there, and the
Hub is never asked. `probe` is also what the exporter runs on the checkpoint's own model, to compare.

REQUEST: {"tokens": [[id, ...], ...] rows of equal length, "new_tokens": greedy tokens to add to each row,
"dtype": a torch dtype's name or "auto", "prompts": [text, ...], "prompt_tokens": tokens to sample for each}.
RESULT: `logits` fp32 [N, T, V], `greedy` int64 [N, new_tokens]; the prompts' texts are printed as JSON.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class RefuseImport:
    """A finder that raises for wm_ds, wherever it might be installed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Called for every import. Raises ModuleNotFoundError for wm_ds."""
        if name.partition(".")[0] == "wm_ds":
            raise ModuleNotFoundError(f"{name} was imported; an exported folder must stand alone", name=name)


@torch.no_grad()
def probe(model: Any, tokens: list[list[int]], new_tokens: int) -> dict[str, Tensor]:
    """Logits of the rows under the model's default settings, and each row's greedy continuation."""
    input_ids_NT = torch.tensor(tokens)
    result = {"logits": model(input_ids=input_ids_NT, use_cache=False).logits.float().contiguous()}
    if new_tokens:
        out = model.generate(
            input_ids_NT,
            attention_mask=torch.ones_like(input_ids_NT),
            do_sample=False,
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
        )
        result["greedy"] = out[:, input_ids_NT.shape[1] :].contiguous()
    return result


def complete(model: Any, tokenizer: Any, prompts: list[str], new_tokens: int) -> list[str]:
    """One sampled continuation of each prompt (seed fixed), the prompt included."""
    texts = []
    for prompt in prompts:
        torch.manual_seed(0)
        inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
        out = model.generate(**inputs, do_sample=True, temperature=0.8, top_p=0.95, max_new_tokens=new_tokens)
        texts.append(tokenizer.decode(out[0], skip_special_tokens=True))
    return texts


def main() -> None:
    """Load, probe and complete, as the three files on the command line say."""
    folder, request_file, result_file = sys.argv[1:]
    request = json.loads(Path(request_file).read_text())
    sys.meta_path.insert(0, RefuseImport())  # type: ignore[arg-type]
    try:
        import wm_ds  # noqa: F401
    except ModuleNotFoundError:
        pass
    else:
        sys.exit("error: wm_ds is importable here, so this would prove nothing")

    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    dtype = request.get("dtype", "auto")
    model, loading = AutoModelForCausalLM.from_pretrained(
        folder,
        trust_remote_code=True,
        dtype=dtype if dtype == "auto" else getattr(torch, dtype),
        output_loading_info=True,
    )
    problems = {kind: sorted(names) for kind, names in loading.items() if names}
    if problems:
        sys.exit(f"error: {folder} does not fit its own model: {problems}")
    model.eval()
    save_file(probe(model, request["tokens"], request.get("new_tokens", 0)), result_file)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)  # it needs none
    texts = complete(model, tokenizer, request.get("prompts", []), request.get("prompt_tokens", 40))
    print(json.dumps({"class": type(model).__name__, "dtype": str(model.dtype), "texts": texts}))


if __name__ == "__main__":
    main()
