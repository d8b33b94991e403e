"""What is not supported is refused by name, in one line, before an engine starts."""

import json
import shutil
import tomllib
from pathlib import Path

import pytest
from whitematter_vllm import versions


@pytest.fixture(scope="module")
def folder(engines):
    return engines.folder("trained")


def config_for(folder, **settings):
    """vLLM's configuration for a folder, as it is made before any worker starts."""
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(model=str(folder), enforce_eager=True, **settings).create_engine_config()


NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
CONNECTOR = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {
                "pipeline_parallel_size": 2,
                "tensor_parallel_size": 4,
                "kv_cache_dtype": "fp8",
                "enable_lora": True,
            },
            [
                "whitematter models are not served with ",
                "--pipeline-parallel-size",
                "--tensor-parallel-size 4 (it must divide the 2 KV heads)",
                "--kv-cache-dtype fp8",
                "LoRA",
            ],
        ),
        (
            {
                "speculative_config": NGRAM,
                "kv_transfer_config": CONNECTOR,
                "hf_overrides": {"feedback": False, "routing": "hard"},
            },
            ["speculative decoding", "a KV connector", "feedback: false", "routing 'hard'"],
        ),
        (
            {"enable_prompt_embeds": True, "hf_overrides": {"prefill_border": 32}},
            ["--enable-prompt-embeds", "--no-enable-chunked-prefill"],
        ),
        ({"quantization": "fp8"}, ["quantization 'fp8'"]),
        (
            {"hf_overrides": {"prefill": "jacobi"}},
            ["prefill 'jacobi' is not supported; choose one of trained, exact"],
        ),
        ({"hf_overrides": {"prefil": "exact"}}, ["did you mean 'prefill'?"]),
        (
            {"hf_overrides": {"prefill_border": 48}, "block_size": 128, "enable_chunked_prefill": False},
            ["prefill_border 48 and --block-size 128"],
        ),
    ],
)
def test_all_that_is_not_supported_is_said_at_once_in_one_line(folder, settings, said):
    with pytest.raises(Exception, match="Value error") as caught:
        config_for(folder, **settings)
    line = next(line for line in str(caught.value).splitlines() if said[0] in line)
    assert line.startswith("  Value error, ")
    assert all(words in line for words in said), line


def test_a_border_that_is_possible(folder):
    made = config_for(
        folder, hf_overrides={"prefill_border": 64}, block_size=128, enable_chunked_prefill=False
    )
    assert made.model_config.hf_config.prefill_border == 64


@pytest.mark.parametrize("family", ["cla", "yoco", "fusedkv"])
def test_other_families_are_named(folder, tmp_path, family):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, "architectures": ["X"]}))
    with pytest.raises(Exception, match=f"models of the family {family} are not served"):
        config_for(tmp_path)


def test_no_code_of_the_folder_runs(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "copy")
    for file in (tmp_path / "copy").glob("*.py"):
        file.write_text("raise SystemExit('the code of the export ran')\n")
    assert config_for(tmp_path / "copy").model_config.hf_config.model_type == "whitematter"


def test_a_field_of_a_newer_export_is_named(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "copy")
    entry = json.loads((folder / "config.json").read_text()) | {"zigzag": 3}
    (tmp_path / "copy" / "config.json").write_text(json.dumps(entry))
    with pytest.raises(Exception, match="the field 'zigzag'"):
        config_for(tmp_path / "copy")


def test_another_version_of_vllm_is_one_clear_line(folder, monkeypatch):
    monkeypatch.setattr(versions, "found", lambda: "0.99.1")
    with pytest.raises(Exception, match=r"tested with vLLM 0\.32\.0 and not with 0\.99\.1") as caught:
        config_for(folder)
    assert "install vllm==0.32.0" in str(caught.value)


def test_the_version_is_found_under_the_name_of_any_build():
    assert versions.found() == versions.TESTED[0]
    names = tomllib.loads((Path(__file__).parents[1] / "name_of_cpu_build" / "pyproject.toml").read_text())
    assert names["project"]["version"] == f"{versions.TESTED[-1]}+cpu"


def test_a_folder_that_lacks_a_weight_is_refused(engines, folder, tmp_path):
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, tmp_path / "copy")
    weights = load_file(folder / "model.safetensors")
    del weights["model.dummy_key"]
    save_file(weights, tmp_path / "copy" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(Exception, match=r"model\.dummy_key"):
        engines.engine(tmp_path / "copy")
