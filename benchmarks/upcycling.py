"""What is left of a trained vanilla model the moment it is upcycled, by how layers become channels.

    python benchmarks/upcycling.py VANILLA_RUN [--channels 8 4 2 1] [--rows 16] [--passes 8]

Prints the held-out loss, in fp32 and without any training, of the vanilla model itself, of the run without
feedback, and of the pool with each number of channels and each choice of tools/upcycle.py --pool. Passes are
cyclic with 16 groups; give enough that one more changes nothing.
"""

import argparse
from pathlib import Path

import torch

from wm_ds import trained
from wm_ds.data.sequences import PackedSequences
from wm_ds.engine.loss import TokenLoss
from wm_ds.families import model_class, model_config
from wm_ds.upcycle import mapping
from wm_ds.upcycle.dense import Dense, open_dense


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--channels", type=int, nargs="+", help="default L, L/2, L/4, 1")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--passes", type=int, default=8)
    args = parser.parse_args()
    source = trained.find(args.run)
    held_out = PackedSequences(source.run.data.sources()[0].path, "holdout")
    rows = [held_out[i] for i in range(min(args.rows, len(held_out)))]
    inputs = ("input_ids", "labels", "document_ids")
    batch = {name: torch.stack([getattr(row, name) for row in rows]) for name in inputs}
    print(f"vanilla {loss(source.load(torch.float32), batch):.4f}")
    depth = source.run.model.num_hidden_layers
    channels = args.channels or sorted({depth, depth // 2, depth // 4, 1}, reverse=True)
    with open_dense(args.run) as dense:
        plain = {"num_kv_channels": depth, "feedback": False}
        print(f"no feedback {loss(upcycled(source, dense, plain, 'nearest'), batch):.4f}")
        for k in channels:
            fields = {"num_kv_channels": k, "num_groups": 16, "prefill_passes": args.passes}
            found = {c: loss(upcycled(source, dense, fields, c), batch) for c in mapping.CHOICES}
            print(f"k = {k}: " + ", ".join(f"{choice} {value:.4f}" for choice, value in found.items()))


def upcycled(source: trained.Trained, dense: Dense, fields: dict, choice: str) -> torch.nn.Module:
    """The WhiteMatter model that a run with these fields would start from."""
    section = source.run.model.model_copy(update={"family": "whitematter", **fields})
    config = model_config(
        section,
        vocab_size=source.data["vocab_size"],
        seq_len=source.data["seq_len"],
        eos_id=source.data["eos_id"],
    )
    model = model_class(config)(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(mapping.value(name, tuple(parameter.shape), config, dense, choice))
    return model.eval()


@torch.no_grad()
def loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> float:
    """Mean cross-entropy of the rows."""
    return float(TokenLoss(model).eval()(**batch)) / int((batch["labels"] != -100).sum())


if __name__ == "__main__":
    main()
