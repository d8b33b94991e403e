"""What the tests of this folder share."""

import sys

import pytest
from transformers import dynamic_module_utils


@pytest.fixture(scope="session", autouse=True)
def modules_cache(tmp_path_factory):
    """Remote code is kept here and not in the user's cache, where older code might lie; no Hub is asked."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
        for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
            del sys.modules[name]
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield
