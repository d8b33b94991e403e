"""The page of every key is the schema's, and says something of each."""

from pathlib import Path

import pytest

from wm_ds import train
from wm_ds.config import reference
from wm_ds.config.schema import Config

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_page_is_current():
    assert PAGE.read_text() == reference.page(), (
        "run: python -m wm_ds.config.reference > docs/configuration.md"
    )


def test_every_key_of_the_schema_is_in_the_page_with_a_meaning():
    rows = {
        line.split("|")[1].strip(): line for line in reference.page().splitlines() if line.startswith("| `")
    }
    keys = {f"`{key}`" for key in Config.model_fields} - {f"`{key}`" for key, _ in reference.sections()}
    for section, kind in reference.sections():
        assert kind.__doc__
        keys |= {f"`{section}.{key}`" for key in kind.model_fields}
    assert keys <= rows.keys()
    assert {"`path`", "`weight`"} <= rows.keys(), "what a list of sources holds"
    for key, row in rows.items():
        cells = [cell.strip() for cell in row.replace("\\|", "").strip("|").split("|")]
        assert len(cells) == 5, row
        assert all(cells), f"{key} lacks a type, default, unit or meaning"


@pytest.mark.parametrize(
    ("key", "cells"),
    [
        ("run.timeout_minutes", "number > 0 | `30.0` | minutes"),
        ("optim.warmup", "integer or text | `2%` | optimizer steps, a share of the run, or tokens"),
        ("batch.micro_batch", "integer > 0 | **required** | sequences"),
        ("model.relaxation", "number > 0 or list of number > 0 | not set | –"),
        ("evaluate.double_passes", "true or false | `true` | –"),
        ("optim.betas", "list of 2 numbers | `[0.9, 0.95]` | –"),
        ("recompute", "`none` or `layer` or `group` or `group+layer` | `none` | –"),
    ],
)
def test_types_defaults_and_units(key, cells):
    assert f"| `{key}` | {cells} |" in reference.page()


def test_help_says_where_the_page_is_and_lists_the_sections(capsys):
    with pytest.raises(SystemExit):
        train.main(["--help"])
    shown = capsys.readouterr().out
    assert "docs/configuration.md" in shown
    for section, kind in reference.sections():
        assert f"  {section:12} {kind.__doc__}" in shown
