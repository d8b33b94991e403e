"""What is found at a path."""

import pytest

from wm_ds import trained


def test_unknown_model_type_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(trained.TrainedError, match="type 'gpt2'"):
        trained.find(tmp_path)


@pytest.mark.parametrize("content", [b"{\xff", b"[1]", b""])
def test_a_damaged_config_of_a_folder_is_one_line(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(trained.TrainedError, match=r"config\.json is damaged") as caught:
        trained.find(tmp_path)
    assert "\n" not in str(caught.value)
