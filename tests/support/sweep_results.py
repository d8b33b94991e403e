"""Results of sweeps, made up."""

from __future__ import annotations

from wm_ds.sweep.collect import FORMAT, figures, summary


def entry(seed: int, perplexity: float, curve: list[float] = (), **more) -> dict:
    """One run; `more`: flops, cache, exact, groups (passes to within the tolerance by g)."""
    exact = more.get("exact", perplexity)
    groups = [
        {
            "groups": g,
            "reached": {}
            if n is None
            else {k: {"passes": n, "seconds_per_row": 0.01 * n} for k in ("exact", "best")},
            "perplexities": [],
        }
        for g, n in more.get("groups", {}).items()
    ]
    return {
        "seed": seed,
        "digest": "d",
        "code": "c",
        "commit": "0123456789",
        "tokens": 1e6,
        "training_flops": more.get("flops", 1e13),
        "training": {"wall_s": 3600.0, "cpu_s": 7200.0},
        "measured": {
            "settings": more.get("settings", {}),
            "model": {
                "cache_bytes_per_token": more.get("cache", 1024.0),
                "parameters_without_embeddings": 1e6,
            },
            "perplexity": {"perplexity": perplexity},
            "passes": {"as_trained": perplexity, "perplexities": list(curve), "groups": more.get("trained")},
            "starts": {"curves": more.get("starts", [])},
            "exact": {"perplexity": exact, "seconds_per_row": 0.2 if groups else None},
            "converge": {"exact": None, "groups": groups},
        },
    }


def arm(label: str, runs: list[dict], seeds: list[int] | None = None) -> dict:
    return {
        "label": label,
        "seeds": seeds or [run["seed"] for run in runs],
        "runs": runs,
        "summary": summary([figures(run) for run in runs]),
    }


def sweep_report(name: str, arms: dict[str, dict]) -> dict:
    return {
        "format": FORMAT,
        "title": name,
        "sweep": f"configs/sweeps/{name}.yaml",
        "base": {"model.num_hidden_layers": 8},
        "machine": {"cpu": "a CPU", "cores": 2, "gpus": [], "torch": "2"},
        "arms": arms,
    }
