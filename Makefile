# Every target creates what it needs, so `make demo` and `make test` work on a fresh clone.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
PORTING := .venv-porting
PORTING_OLD := .venv-porting-old
SCHEDULERS := .venv-schedulers
LOOK := .venv-look
SITE := .venv-site
ACCELERATOR := .venv-accelerator
RELEASE := .venv-release
PEERS := .venv-peers

DEVICE ?= vulkan
FUZZ   ?= 500000
SUITES ?=
NAMES  ?= all
VERSIONS ?=

# The tests' programs import the same modules over and over, so compiled ones are kept, whatever the environment says.
export PYTHONDONTWRITEBYTECODE :=

# Three files at a time keep two cores busy, because tests of live runs often wait.
LANES := -n 3 --dist loadfile --no-loadscope-reorder

.PHONY: help install demo check quick test thorough check-models stress chaos fuzz siege clusters porting ray look accelerator release versions peers examples site full bench bench-overlap paper tune docs clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(READY): pyproject.toml constraints.txt
	@echo "Installing PyTorch and Paceline into $(VENV): a few minutes without further output"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

install: $(READY)  ## create .venv and install everything into it

demo: $(READY)  ## train four unequal workers on digits under four sync models, and bsp with balanced batches (under 3 minutes)
	$(BIN)/paceline demo

check: $(READY)  ## run the linter, the formatter's check and the type checker
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

quick: $(READY)  ## run the tests of pure code, which start no process (under a minute on two cores)
	PACELINE_QUICK=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal tests

# The type checker runs beside the first tests, and has the last word.
test: $(READY)  ## run `make check` and all tests, three files at a time (about 6 minutes on two cores)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@said=$$(mktemp); $(BIN)/mypy > $$said 2>&1 & checker=$$!; \
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(LANES); tests=$$?; \
	wait $$checker; types=$$?; echo "mypy:"; cat $$said; rm $$said; exit $$((tests | types))

thorough: $(READY)  ## run the tests that show little more than those of `make test`, three files at a time (about 16 minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(LANES) -m 'thorough and not chaos'

check-models: $(READY)  ## check every interleaving of 3 workers, 2 shards and 4 iterations under every sync model (slow; prints its progress)
	PACELINE_CHECK_MODELS=1 $(BIN)/python -m pytest -s tests/zipline/test_methods.py tests/sync/test_properties.py tests/sync/test_exhaustive.py tests/sync/test_exhaustive_search.py

stress: $(READY)  ## test 100,000 pulls during concurrent pushes on each transport, 10,000 scripts on the double of an accelerator, a million small steps, and the directory of a run of a million iterations; keep workers on a loaded machine for ten minutes (about an hour and a half)
	PACELINE_STRESS=1 $(BIN)/python -m pytest -s tests/run/test_stress.py
	PACELINE_STAGING_EXAMPLES=10000 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal tests/train/test_staging.py
	PACELINE_STRESS=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -s -m chaos tests/start/test_patience.py

chaos: $(READY)  ## test 50 runs in which a random process receives a random signal, 60 faults on emulated machines (root), and other ways in which runs end (about an hour)
	PACELINE_KILLS=$${PACELINE_CHAOS:-4} PACELINE_CHAOS=$${PACELINE_CHAOS:-50} $(BIN)/python -m pytest -s -m chaos

fuzz: $(READY)  ## send 500,000 mutated frames to hosts in the same process and 50,000 over sockets, with a valid token (about 9 minutes; FUZZ=n for fewer)
	PACELINE_FUZZ=$(FUZZ) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -s tests/run/test_fuzz.py

siege: $(READY)  ## during a run with few file descriptors, open 10,000 connections that reset immediately, and hold 2,000 open; try to get into a served run (about 5 minutes)
	PACELINE_SIEGE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -s -m 'not chaos' tests/start/test_siege.py tests/start/test_door.py

clusters: $(READY)  ## train the demo in network namespaces, with torchrun and on Slurm, and compare the accuracy with one machine (root; 3 minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -s -m chaos tests/start/test_clusters.py

$(PORTING)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(PORTING)
	$(PORTING)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(PORTING)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,porting]'
	@touch $@

# The versions of a year ago.
$(PORTING_OLD)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(PORTING_OLD)
	$(PORTING_OLD)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(PORTING_OLD)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]' \
		'lightning<2.6' 'pytorch-lightning<2.6' 'transformers<4.58' 'trl<0.26' 'accelerate<1.9' 'peft<0.18'
	@touch $@

porting: $(PORTING)/.ready $(PORTING_OLD)/.ready  ## create .venv-porting and .venv-porting-old with Hugging Face and Lightning, of today and of a year ago, and run the scripts in docs/start, docs/how-to and examples/frameworks (15 minutes after the installation)
	OMP_NUM_THREADS=1 $(PORTING)/bin/python -m pytest -p no:cacheprovider -m 'not chaos' tests/train/test_porting.py tests/start/test_first_run.py tests/integrations
	OMP_NUM_THREADS=1 $(PORTING_OLD)/bin/python -m pytest -p no:cacheprovider -m 'not chaos' tests/integrations

$(SCHEDULERS)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(SCHEDULERS)
	$(SCHEDULERS)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(SCHEDULERS)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,schedulers]'
	@touch $@

ray: $(SCHEDULERS)/.ready  ## create .venv-schedulers with Ray and Kubernetes' schemas, and test runs and studies on Ray clusters and the manifests (10 minutes after the installation)
	OMP_NUM_THREADS=1 $(SCHEDULERS)/bin/python -m pytest -p no:cacheprovider tests/start/test_ray.py tests/start/test_kubernetes.py tests/lab/test_work.py

# Debian's packages: chromium npm
$(LOOK)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(LOOK)
	$(LOOK)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(LOOK)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,look]'
	npm install --silent --no-fund --no-audit --prefix $(LOOK) axe-core@4
	@touch $@

look: $(LOOK)/.ready site  ## create .venv-look with playwright and axe-core, and look at the report page and the site in Chromium: themes, widths, keyboard, accessibility (needs chromium and npm; 4 minutes after the installation)
	PACELINE_LOOK=1 OMP_NUM_THREADS=1 $(LOOK)/bin/python -m pytest -s -p no:cacheprovider tests/look/test_page_in_browser.py tests/look/test_live_page_in_browser.py tests/look/test_site_in_browser.py

# Debian's packages for the device "vulkan" without a graphics card: mesa-vulkan-drivers libvulkan1
$(ACCELERATOR)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(ACCELERATOR)
	$(ACCELERATOR)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt torch torchvulkan==0.2.1
	$(ACCELERATOR)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

accelerator: $(ACCELERATOR)/.ready  ## create .venv-accelerator with torchvulkan, and train on a device (DEVICE=cuda for another one, if its torch supports it; the default needs a Vulkan driver; 3 minutes after the installation)
	XDG_RUNTIME_DIR=$${XDG_RUNTIME_DIR:-$$(mktemp -d)} $(if $(filter cuda%,$(DEVICE)),TORCH_CUDA_SANITIZER=1) PACELINE_ACCELERATOR=$(DEVICE) OMP_NUM_THREADS=1 \
		$(ACCELERATOR)/bin/python -m pytest -s -p no:cacheprovider tests/accelerator

# The tools need neither torch nor Paceline.
$(RELEASE)/.ready:
	$(PYTHON) -m venv $(RELEASE)
	$(RELEASE)/bin/pip install --quiet --disable-pip-version-check build twine hatchling
	@touch $@

release: $(READY) $(RELEASE)/.ready  ## build what would be uploaded into dist, check it, and run it in an environment that has nothing else (5 minutes after the installation)
	PACELINE_RELEASE=1 $(BIN)/python -m pytest -s -p no:cacheprovider tests/release

versions:  ## run the package's tests with torch 2.7.1, that of constraints.txt and the newest one, on Python 3.11 to 3.13, and train with two versions in one run (an hour; VERSIONS='3.11:2.7.1' for some)
	@$(PYTHON) -m tests.support.versions $(VERSIONS)

# Other systems, without Paceline.
$(PEERS)/.ready: constraints.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(PEERS)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt accelerate torchft hivemind
	@touch $@

peers: $(READY) $(PEERS)/.ready  ## create .venv-peers with Accelerate, torchft and hivemind, and try the benchmark that compares them with Paceline (root; 5 minutes after the installation)
	PACELINE_PEERS=1 $(BIN)/python -m pytest -s -p no:cacheprovider tests/benchmarks/test_peers.py

examples: $(READY)  ## run the examples in the documentation
	$(BIN)/python -m pytest docs README.md

$(SITE)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(SITE)
	$(SITE)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(SITE)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[site]'
	@touch $@

site: $(SITE)/.ready  ## create .venv-site with Sphinx, build the site in build/site, and look for dead links in it (2 minutes after the installation)
	rm -rf build/site build/site-doctrees
	$(SITE)/bin/python -m sphinx --quiet --fail-on-warning --keep-going --jobs 2 -d build/site-doctrees docs build/site
	PACELINE_SITE=1 $(SITE)/bin/python -m pytest --noconftest -p no:cacheprovider tests/site
	@echo "Open build/site/index.html."

full:  ## run every suite but check-models, stress, chaos, fuzz, versions and paper, each in its environment, and end with a table (root; SUITES='look ray' for some; it says which Debian packages are missing)
	@$(PYTHON) tests/support/full.py $(SUITES)

bench: $(READY)  ## measure a training step against plain copies, plain sockets and gloo all-reduce (about 11 minutes, idle machine)
	$(BIN)/python -m benchmarks transport

bench-overlap: $(READY)  ## compare overlap synchronization and even slicing with PS-Lite on slow links (about 5 minutes, root, idle machine)
	$(BIN)/python -m benchmarks overlap --picture docs/pictures/overlap.png

paper: $(READY)  ## reproduce all tables and figures of the papers (about 3 hours; NAMES='zipline-table3 ...' for some)
	$(BIN)/python -m reproductions $(NAMES)

tune: $(READY)  ## find each sync model's best learning rate and momentum for the demo (about 45 minutes)
	$(BIN)/python -m reproductions tune-demo

docs: $(READY)  ## regenerate pages and pictures of the documentation, and run its examples
	$(BIN)/python docs/make_messages.py
	$(BIN)/python docs/make_sync_models.py
	$(BIN)/python docs/make_papers.py
	$(BIN)/python docs/make_when_it_pays.py
	$(BIN)/python docs/make_same_accuracy.py
	$(BIN)/python docs/make_codecs.py
	$(BIN)/python docs/make_comparison.py
	$(BIN)/python docs/make_overview.py
	$(BIN)/python docs/make_reference.py
	$(BIN)/python docs/make_rehearse.py
	$(MAKE) examples

clean:  ## remove the environment and caches
	rm -rf $(VENV) $(PORTING) $(PORTING_OLD) $(SCHEDULERS) $(LOOK) $(SITE) $(ACCELERATOR) $(RELEASE) $(PEERS) dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
