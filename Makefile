# Everything runs inside $(VENV); `make demo` and `make test` build it when it is missing or old.
PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
WORKERS ?= 2
EXTRAS ?= postgresql,report,delta
ALL_EXTRAS = $(shell $(PY) -c 'import tomllib; \
  print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"], sep=",")')

# Threads that wait for work sleep: the machine may be shared.
export OMP_WAIT_POLICY ?= passive

.DEFAULT_GOAL := help
.PHONY: audit bench bench-equivalence bench-exports bench-fleet bench-gpu bench-heads bench-layouts \
  bench-ledger bench-limits bench-memory bench-peers bench-quick bench-service check constraints \
  contracts demo docs format help k8s-check protos protos-baseline protos-check setup soak test test-audit \
  test-exports test-image test-kill test-model test-node test-observability test-policies \
  test-powerbi test-rollout test-speculators test-thorough test-training types

help: ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## build .venv with the tested versions

$(STAMP): constraints.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Tandem needs Python 3.11 or newer as $(PYTHON); choose another with: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) cannot make virtual environments; on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	@$(PY) -c '' 2>/dev/null || $(PYTHON) -m venv --clear $(VENV)
	@echo "installing the tested versions into $(VENV); the first time takes some minutes"
	@$(PY) -m pip install --quiet --disable-pip-version-check 'pip>=25.1'
	@$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt --group dev -e '.[$(EXTRAS)]'
	@touch $@

demo: $(STAMP) ## run the main job on a real model and check every token
	$(PY) -m service.demo

test: check ## lint, types and contracts, then all tests that need no model
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -n $(WORKERS) -m "not model and not slow and not thorough"

test-thorough: $(STAMP) ## what make test leaves out to stay short: more combinations, longer simulations
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -n $(WORKERS) -m "thorough and not model and not slow"

test-model: $(STAMP) ## the tests that run the real model, which is pulled first
	$(VENV)/bin/tandem models pull smollm2-135m-instruct
	$(PY) -m pytest -q -m "model and not slow"

test-training: $(STAMP) ## train tiny heads: kill and resume, two processes, one conversation by heart
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -m slow tests/engine/training

bench-heads: $(STAMP) ## the shipped head on Spec-Bench: acceptance and speed -> build/bench/heads.json
	$(PY) -m tests.benchmarks.heads

bench: $(STAMP) ## what a step costs -> build/bench/decode.json (needs the model and a quiet machine)
	OMP_WAIT_POLICY=active $(PY) -m tests.benchmarks.decode

bench-quick: $(STAMP) ## what a step does, counted: calls, tokens, allocations; fails when a count grows
	OMP_NUM_THREADS=1 $(PY) -m tests.benchmarks.quick

bench-limits: $(STAMP) ## each phase against the memory's and the processor's limit -> build/bench/limits.json
	OMP_WAIT_POLICY=active $(PY) -m tests.benchmarks.limits

bench-peers: $(STAMP) ## against other engines, in turn -> build/bench/peers.json, .png (PEERS="--medium --minutes 25")
	OMP_WAIT_POLICY=active $(PY) -m tests.benchmarks.peers $(PEERS)

bench-gpu: $(STAMP) ## on CUDA, under eight minutes: equality, host syncs, ratios, limits -> build/bench/gpu.json
	PYTHON=$(PY) sh tests/benchmarks/gpu.sh

bench-layouts: $(STAMP) ## what each layout costs, and latency under arrivals -> build/bench/layouts.json, layouts.png
	OMP_WAIT_POLICY=active $(PY) -m tests.benchmarks.layouts

bench-equivalence: $(STAMP) ## 480 prompts: speculation changes no token -> build/bench/equivalence.json
	$(PY) -m tests.benchmarks.equivalence

test-kill: $(STAMP) ## kill the ledger's writer two hundred times and count what is lost
	$(PY) -m pytest -q -m slow tests/telemetry/test_ledger_kill.py

bench-service: $(STAMP) ## what gRPC costs, and 10,000 cancels -> build/bench/service.json
	$(PY) -m tests.benchmarks.service

soak: $(STAMP) ## 20 minutes of recorded arrivals with chaos and constant memory -> build/bench/soak.json
	$(PY) -m tests.benchmarks.soak

test-audit: $(STAMP) ## 10,000 requests in float32 and in bfloat16: the auditor accuses none
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -s -m slow tests/engine/test_audit_many.py

SPECULATORS := build/speculators

$(SPECULATORS)/.installed:
	@echo "installing the package speculators into $(SPECULATORS), beside our torch"
	@$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --target $(SPECULATORS) \
	  speculators==0.9.0 hs-connectors==0.9.0 'datasets>=4,<5.2' openai distro jiter sniffio loguru dill \
	  multiprocess xxhash pandas pytz python-dateutil six tzdata aiohttp aiosignal frozenlist multidict \
	  yarl propcache attrs aiohappyeyeballs
	@touch $@

test-speculators: $(STAMP) $(SPECULATORS)/.installed ## heads against the package speculators, which is fetched first
	$(PY) -m pytest -q -m slow tests/engine/test_speculators.py --timeout 600

test-node: $(STAMP) ## a Node client against the server; fetches @grpc/grpc-js with npm
	cd tests/e2e/node && npm ci --no-audit --no-fund
	$(PY) -m pytest -q tests/e2e/test_node_client.py

bench-ledger: $(STAMP) ## rates and losses of the ledger, cost of recording -> build/bench/ledger.json, recording.json
	$(PY) -m tests.benchmarks.ledger
	$(PY) -m tests.benchmarks.recording

bench-exports: $(STAMP) ## the ledger's rows into all tables, per second -> build/bench/exports.json
	$(PY) -m tests.benchmarks.exports
	$(PY) -m tests.benchmarks.exports --source postgresql --rows 1350000 --days 1 --workers 1

bench-fleet: $(STAMP) ## a simulated fleet under 1x to 1,000x a recorded load -> build/bench/fleet.json, .png
	$(PY) -m tests.benchmarks.fleet

bench-memory: $(STAMP) ## peak memory of what the pods run, for k8s/figures.toml (needs the model)
	$(PY) -m tests.benchmarks.fleet_memory

FOCUS := build/focus-validator

$(FOCUS)/.installed:
	@for python in python3.13 python3.12 $(PYTHON) $(HOME)/.pyenv/versions/3.1[2-9].*/bin/python; do \
	  $$python -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && \
	  $$python -m venv --clear $(FOCUS) && $(FOCUS)/bin/pip install --quiet --disable-pip-version-check \
	    focus-validator==2.2.1 'pyarrow<20' && touch $@ && break; \
	done || true; test -e $@ || echo "no Python 3.12: the validator of FOCUS is left out"

test-exports: $(STAMP) $(FOCUS)/.installed ## kill exports at many points, emulators, ClickHouse, validators, the HTML report
	npm install --silent --no-audit --no-fund --prefix build/azurite azurite@3.37.0 || \
	  echo "no npm: no export to Azure's emulator"
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS),azure,clickhouse]'
	$(PY) -m pytest -q -m slow tests/exports --ignore tests/exports/powerbi

test-powerbi: $(STAMP) ## the Power BI project under Microsoft's parsers, which are fetched first
	PYTHON=$(PY) sh tests/exports/powerbi/tools.sh
	$(PY) -m pytest -q tests/exports/powerbi

PHOENIX := build/phoenix

$(PHOENIX)/.installed:
	@echo "installing Phoenix, an independent receiver of traces, into $(PHOENIX)"
	@$(PYTHON) -m venv --clear $(PHOENIX)
	@$(PHOENIX)/bin/pip install --quiet --disable-pip-version-check 'arize-phoenix>=20' && touch $@ || \
	  echo "Phoenix cannot be installed here: its test is left out"

test-observability: $(STAMP) $(PHOENIX)/.installed ## send traces and metrics to Phoenix and to Debian's prometheus
	TANDEM_TEST_PHOENIX=$$(ls $(CURDIR)/$(PHOENIX)/bin/phoenix 2>/dev/null) $(PY) -m pytest -q \
	  tests/telemetry/test_observability.py tests/telemetry/test_dashboards.py

k8s-check: $(STAMP) ## the Kubernetes manifests and the Dockerfile (part of make test)
	$(PY) -m pytest -q -m "not slow" tests/k8s

CHECKOV := build/checkov

$(CHECKOV)/.installed:
	@echo "installing checkov into $(CHECKOV)"
	@$(PYTHON) -m venv --clear $(CHECKOV)
	@$(CHECKOV)/bin/pip install --quiet --disable-pip-version-check checkov==3.3.30
	@touch $@

test-policies: $(STAMP) $(CHECKOV)/.installed ## checkov over the built manifests and the Dockerfile; fetches it first
	rm -rf build/manifests && mkdir -p build/manifests && cp k8s/Dockerfile build/manifests
	for folder in k8s/overlays/* k8s/training/cpu k8s/training/gpu k8s/multi-node k8s/experiment; do \
	  $(VENV)/bin/kubectl kustomize $$folder > build/manifests/$$(echo $$folder | tr / -).yaml || exit 1; done
	$(CHECKOV)/bin/checkov -d build/manifests --config-file k8s/checkov.yaml

test-image: $(STAMP) ## the image's install steps in a clean folder, and what they make; fetches every dependency
	$(PY) -m pytest -q -m slow tests/k8s/test_installed_image.py

test-rollout: $(STAMP) ## servers rolled under load or split, an experiment changed, a training Job evicted
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -m slow tests/k8s tests/engine/test_shards.py \
	  --ignore tests/k8s/test_installed_image.py

check: $(STAMP) ## ruff, mypy, import contracts, protos, licences
	@$(MAKE) --no-print-directory -j 2 --output-sync=target types contracts

types: $(STAMP)
	$(VENV)/bin/mypy

contracts: $(STAMP) protos-check
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/lint-imports
	$(PY) .ci/supply_chain.py licences
	$(PY) .ci/supply_chain.py audit

audit: $(STAMP) ## ask an index for known vulnerabilities of the pins, and fail when there are some
	$(PY) .ci/supply_chain.py audit --strict

format: $(STAMP) ## sort imports and format the code
	$(VENV)/bin/ruff check --fix-only
	$(VENV)/bin/ruff format

protos: $(STAMP) ## regenerate the stubs in service/pb
	PYTHON=$(PY) sh protos/generate.sh

docs: $(STAMP) ## rewrite protos/README.md from the guide and the comments of the proto
	$(PY) protos/document.py

protos-check: $(STAMP)
	PYTHON=$(PY) sh protos/check.sh

protos-baseline: $(STAMP) ## at a release: accept the contract as the one to stay compatible with
	$(VENV)/bin/buf build protos --exclude-source-info -o protos/baseline.txtpb

constraints: $(STAMP) ## keep the pins of constraints.txt and add those of new dependencies
	@mkdir -p build
	$(PY) -m pip install --quiet --dry-run --ignore-installed --report build/resolution.json \
	  -c constraints.txt --group dev -e '.[$(ALL_EXTRAS)]'
	@{ echo "# One tested set, for pip install -c. Extended by: make constraints"; \
	  $(PY) -c 'import json; print(*sorted(("{name}=={version}".format_map(i["metadata"]).split("+")[0] \
	    for i in json.load(open("build/resolution.json"))["install"] if "dir_info" not in i["download_info"]), key=str.lower), sep="\n")'; \
	} > build/constraints.txt && mv build/constraints.txt constraints.txt
