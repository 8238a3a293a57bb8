# Two commands matter: `make train` and `make test`. Each sets up .venv by itself.

.DEFAULT_GOAL := help
.PHONY: help train test further slow quick versions sbom docs clean

# Only used to make .venv; the constraints hold for Python 3.11.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
RUN_DIR := runs/stereo_depth
TRAIN := train examples/stereo_depth/recipe.py --processes 2 --width 2 --run-dir $(RUN_DIR)
COMPARE := examples/stereo_depth/compare.py
PYTEST_ARGS ?=

# Under a minute: what starts no ranks, and every family of rules on two ranks; all of these files, though `make test`
# leaves the last out, for it runs each of those cases by itself.
QUICK := tests/test_house.py tests/test_layers.py tests/test_mirror.py tests/test_public_names.py tests/test_strategy.py \
    tests/geometry tests/data tests/simulation/clock tests/simulation/devices/test_table.py tests/simulation/fake \
    tests/simulation/memory tests/spatial/rules/test_registry.py tests/spatial/rules/test_taps.py \
    tests/spatial/rules/test_unsupported.py tests/spatial/rules/test_window_plan.py tests/spatial/test_expected.py \
    tests/spatial/test_spec.py tests/training/test_microbatches.py tests/training/test_run_directory.py \
    tests/verification/test_verdict.py tests/spatial/test_sweep.py

# These reach every pip call below and, through the environment, the isolated one that installs the build backend;
# an older pip takes the first for both, a newer one wants the second for the backend.
export PIP_CONSTRAINT := constraints.txt
export PIP_BUILD_CONSTRAINT := constraints.txt

help:
	@echo "make train   train the stereo example on 2 ranks, then compare its losses with those of 1 process"
	@echo "make test    ruff, mypy and pytest (PYTEST_ARGS=... goes to pytest)"
	@echo "make further more of the same: cases of which \`make test\` takes a sample, longer tests of numbers and faults"
	@echo "make slow    the tests that take longest: compiled networks, Slurm, the pages of docs, the wheel"
	@echo "make quick   less than a minute of tests: geometry, what runs in one process, all rules on two ranks"
	@echo "make versions  some tests under other Pythons that are here (PYTHONS=\"python3.12 python3.13\")"
	@echo "make sbom    sbom.json: what .venv is made of, as CycloneDX"
	@echo "make docs    the documentation as a site in build/site; it needs no network once .venv-docs is made"
	@echo "make clean   remove .venv, caches and runs/stereo_depth"

# The stamp is written last, so an interrupted set-up is taken up again.
.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --editable '.[test]'
	@touch $@

# A run starts from nothing: what an earlier `make train` left is removed first. With fewer GPUs than the two ranks
# need, both lines are run on the CPU.
train: .venv/.installed
	rm -rf $(RUN_DIR)
	@gpus=$$(.venv/bin/python -c 'import torch; print(torch.accelerator.device_count())'); \
	[ "$$gpus" -ge 2 ] || export CUDA_VISIBLE_DEVICES=; \
	set -x; .venv/bin/fullframe $(TRAIN) && .venv/bin/python $(COMPARE) && .venv/bin/fullframe report $(RUN_DIR)

# One thread a process: the tests start many ranks on few cores. The models are built from configurations, offline.
test further slow quick: export OMP_NUM_THREADS := 1
test further slow quick: export HF_HUB_OFFLINE := 1
test: .venv/.installed
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy --strict src
	$(call tested,)

# Tests start thousands of processes on few cores. One or two that fail are asked once more, by themselves: what fails
# again is a fault, what passes is printed as unstable, and is a fault of the test, or a race, to be found.
FEW_FAILED = [ $$? -eq 1 ] && [ $$(grep -c ': true' .pytest_cache/v/cache/lastfailed) -le 2 ]
LAST_FAILED = --last-failed --last-failed-no-failures none
tested = .venv/bin/pytest -q $(1) $(PYTEST_ARGS) || { $(FEW_FAILED) && \
    .venv/bin/pytest -q $(1) $(LAST_FAILED) $(PYTEST_ARGS) && \
    echo "UNSTABLE: failed among the others, passed alone: see above"; }

further: .venv/.installed
	$(call tested,-m further)

slow: .venv/.installed
	.venv/bin/pytest -q -m slow $(PYTEST_ARGS)

quick: .venv/.installed
	.venv/bin/ruff check .
	.venv/bin/pytest -q -m "" $(QUICK) $(PYTEST_ARGS)

PYTHONS ?= python3.12 python3.13
versions: export QUICK := $(QUICK)
versions:
	.ci/versions $(PYTHONS)

# The tool has an environment of its own, so that it is not part of what it lists.
sbom: .venv/.installed
	$(PYTHON) -m venv .venv-sbom
	.venv-sbom/bin/python -m pip install --quiet cyclonedx-bom
	.venv-sbom/bin/cyclonedx-py environment .venv/bin/python --pyproject pyproject.toml --output-reproducible \
	    --output-file sbom.json
	rm -rf .venv-sbom

# Its own environment, without torch: the reference is read from the source text.
.venv-docs/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet $$(.venv-docs/bin/python docs/site/needs.py)
	@touch $@

docs: .venv-docs/.installed
	.venv-docs/bin/python docs/site/gather.py
	NO_COLOR=1 .venv-docs/bin/zensical build --clean --strict

clean:
	rm -rf .venv .venv-* build .mypy_cache .ruff_cache .pytest_cache .hypothesis $(RUN_DIR)
