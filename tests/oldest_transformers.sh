#!/usr/bin/env bash
# The model's tests of generation, cache, saving and the LCKV sandwich under the oldest supported transformers:
# a second environment that sees the first one's packages and overrides a few of them.
#   tests/oldest_transformers.sh [VERSION] [pytest arguments]      (VENV=DIR chooses where; default .venv/oldest)
set -euo pipefail
cd "$(dirname "$0")/.."

version=5.0.0
case ${1:-} in [0-9]*) version=$1 && shift ;; esac
main=.venv
oldest=${VENV:-.venv/oldest}
test -x $main/bin/python || { echo "error: no $main here; run 'make install' first" >&2; exit 1; }

site() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
if [ "$("$oldest/bin/python" -c 'import transformers; print(transformers.__version__)' 2>/dev/null)" != "$version" ]; then
  rm -rf "$oldest"
  $main/bin/python -m venv "$oldest"
  site $main/bin/python >"$(site "$oldest/bin/python")/zz_main_environment.pth"
  "$oldest/bin/pip" install --quiet --disable-pip-version-check "transformers==$version"
fi
"$oldest/bin/python" -c 'import transformers, torch; print("transformers", transformers.__version__, "torch", torch.__version__)'
PYTHONPATH=. "$oldest/bin/python" -m pytest tests/model/test_generation.py tests/model/test_cache.py \
  tests/model/test_hf.py tests/model/test_lckv.py tests/model/test_arguments.py tests/model/test_outputs.py \
  tests/model/test_training_behind_a_cache.py "$@"
