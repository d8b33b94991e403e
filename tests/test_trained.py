"""What is found at a path."""

import pytest

from wm_ds import trained


def test_unknown_model_type_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(trained.TrainedError, match="type 'llama'"):
        trained.find(tmp_path)
