# make demo      the whole chain on real text: install, train, export, evaluate (see tools/demo.py)
# make test      the tests                 ARGS="tests/export/test_export.py -x" passes arguments to pytest
# make test-long the tests that take long for what they add; CI runs them, too
# make test-slurm the SLURM scripts on a real SLURM of four nodes on this machine (root; Debian's packages are fetched)
# make test-serving the vLLM plugin (serving/vllm) in an environment of its own, .venv-serving (3.4 GB; see docs/serving.md)
# make prose     public-domain prose, tokenized and packed, for the sweeps of docs/sweeps.md (9 MB; two minutes)
# make same-numbers BASE=main  shows that no number differs from a revision's (ARGS=--all: the whole matrix, minutes)
# make lint      formatting, lint, type hints
# make clean     removes what make demo, make prose and make test made, except .venv; make distclean removes that and .venv-serving
#
# Settings, on the command line or in the environment:
#   PYTHON       the interpreter to build .venv with (3.11 or newer)
#   TORCH_INDEX  an extra package index, for instance one with CPU builds of torch; without it pip decides,
#                and PyPI's torch for Linux is the CUDA build (several GB, runs on a CPU as well)
#   WORKERS      processes for `make test`; default: one per core, at most 8
#   RANK_WORKERS the same for the tests that start ranks or watch clocks; default: 2, each starts up to four ranks
#   DEMO_TEXT    a text file or a folder of them to train the demo on, instead of fetching public-domain prose

PYTHON ?= python3
TORCH_INDEX ?=
ARGS ?=
WORKERS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 8 ? n : 8)))

RANK_WORKERS ?= $(shell n=$(WORKERS); echo $$((n < 2 ? n : 2)))

VENV := .venv
PIN := $(shell cat requirements.txt pyproject.toml 2>/dev/null | cksum | cut -d' ' -f1)
INSTALLED := $(VENV)/.installed-$(PIN)
# DeepSpeed's compiled helper lies in one fixed folder per installation (see wm_ds/distributed/process_group.py), not here.
BUILT := $(VENV)/.built-$(PIN)

# When this make began, so that the demo's summary can count the installation in.
STARTED := $(shell date +%s)

.PHONY: demo prose test test-long test-slurm test-serving same-numbers lint clean distclean install
.DELETE_ON_ERROR:

demo: $(BUILT)
	@DEMO_STARTED=$(STARTED) $(VENV)/bin/python tools/demo.py

# The data of configs/sweeps/: the demo's text, held out by document.
prose: data/prose/packed/manifest.json

data/prose/text.jsonl: | $(BUILT)
	@$(VENV)/bin/python tools/fetch_text.py --output $@

data/prose/tokenizer/tokenizer.json: data/prose/text.jsonl
	@rm -rf $(@D)
	@$(VENV)/bin/python tools/train_tokenizer.py --input $< --vocab-size 4096 --output $(@D)

data/prose/packed/manifest.json: data/prose/tokenizer/tokenizer.json
	@rm -rf $(@D)
	@$(VENV)/bin/python tools/pack_data.py --input data/prose/text.jsonl --tokenizer data/prose/tokenizer \
	  --output $(@D) --seq-len 256 --align 8 --holdout 256 --holdout-by document

DEFAULT := not slow and not long and not slurm

# Two runs: tests that share nothing on all cores (at most 8: each loads torch), then those that start ranks or wait for
# processes, two files at a time: much of their time is waiting.
test: $(BUILT)
ifeq ($(ARGS),)
	@OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n $(WORKERS) --dist loadfile -m "not alone and $(DEFAULT)"
	@OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n $(RANK_WORKERS) --dist loadfile -m "alone and $(DEFAULT)"
else
	@$(VENV)/bin/python -m pytest $(ARGS)
endif

test-long: $(BUILT)
	@OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n $(WORKERS) --dist loadfile -m "long and not alone and not slow"
	@OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n $(RANK_WORKERS) --dist loadfile -m "long and alone and not slow"

# Says why and succeeds where there is no root or the packages cannot be had; SLURM_DEV_REQUIRED=1 makes that a failure.
test-slurm: $(BUILT)
	@tests/slurm/cluster.sh build/slurm run $(VENV)/bin/python -m pytest -m slurm --basetemp build/slurm/tests tests/slurm $(ARGS)

# Says why and succeeds where the CPU build of vLLM cannot be had; SERVING_REQUIRED=1 makes that a failure.
test-serving:
	@PYTHON="$(PYTHON)" TORCH_INDEX="$(TORCH_INDEX)" serving/vllm/tests/run.sh .venv-serving $(ARGS)

same-numbers: $(BUILT)
	@$(VENV)/bin/python -m tests.goldens.compare $(or $(BASE),main) $(ARGS)

lint: $(INSTALLED)
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/mypy

install: $(BUILT)

# The stamp carries the pins' checksum: changed pins install again, unchanged ones cost nothing.
$(INSTALLED):
	@command -v $(PYTHON) >/dev/null || { \
	  echo "error: no '$(PYTHON)' on PATH; install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: $$($(PYTHON) --version) is too old, 3.11 or newer is needed; name one: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "installing the pinned requirements into $(VENV) (once; one to three minutes)"
	@test -x $(VENV)/bin/pip || $(PYTHON) -m venv $(VENV) || { \
	  echo "error: $(PYTHON) cannot make a virtual environment; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --requirement requirements.txt \
	  $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) || { \
	  echo "error: pip could not install requirements.txt (its message is above); run the same command again to go on" >&2; exit 1; }
	@# compat: one path for the whole checkout, so that the tools find each other, too
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation \
	  --config-settings editable_mode=compat --editable . || { \
	  echo "error: pip could not install this checkout into $(VENV) (its message is above)" >&2; exit 1; }
	@rm -f $(VENV)/.installed-*
	@touch $@

$(BUILT): $(INSTALLED)
	@$(VENV)/bin/python tools/build_extensions.py
	@rm -f $(VENV)/.built-*
	@touch $@

clean:
	rm -rf runs/demo data/demo data/prose .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) .venv-serving
