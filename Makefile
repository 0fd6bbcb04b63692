# On a fresh machine, `make demo` and `make test` first create the environment and install everything.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/installed

.PHONY: install demo test test-slow coverage mutants chaos fuzz lab audit format lint types docs check docker-check release-check pin clean

install: $(STAMP)

# Prints one line per step, with its duration. pip prints only errors.
step = @printf '%s ... ' $(1); began=$$(date +%s); $(2) && echo "$$(($$(date +%s) - began)) s"
PIP := $(BIN)/python -m pip --quiet --quiet --disable-pip-version-check install --constraint constraints.txt

$(STAMP): pyproject.toml constraints.txt
	@echo "installing into .venv, which takes one to five minutes"
	$(call step,"making the environment",$(PYTHON) -m venv .venv)
	@# torch is installed first and pinned, so that a later resolution does not choose another build.
	$(call step,"installing torch",$(PIP) torch)
	$(call step,"installing noloco_p2p and what it needs",$(PIP) --editable '.[dev]')
	@touch $(STAMP)
	@echo "installed the command $(BIN)/noloco (see $(BIN)/noloco --help)"

demo: $(STAMP)
	$(BIN)/noloco demo

# Most tests wait for processes and sockets, so more workers than cores are worthwhile. Tests of a file share a worker.
WORKERS ?= 3
test: $(STAMP)
	$(BIN)/python -m pytest -m "not slow" -n $(WORKERS) --dist loadfile

# Runs real swarms for minutes: churn, the monitor's page in a browser, closed ports, and peers with several processes.
# Tests of a file share a worker, and so its swarm, which is not started twice.
test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow -n 2 --dist loadfile

# Runs the tests of `make test`, and prints the lines that neither they nor the processes that they start execute.
coverage: $(STAMP)
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -m "not slow"
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

# Applies small faults one by one to a copy of the code. For each fault, the named test must fail. This takes minutes.
mutants: $(STAMP)
	$(BIN)/python tests/mutants/run.py

# Kills, freezes and stops real peers for eight minutes, as a seed decides. `make test` does not include this.
chaos: $(STAMP)
	$(BIN)/python -m pytest tests/adversarial tests/chaos
	$(BIN)/python benchmarks/soak.py --minutes 8 --mtbf 15 --seed 2506

# Fuzzes every decoder of bytes from the network for the given number of minutes: make fuzz MINUTES=30.
MINUTES ?= 5
fuzz: $(STAMP)
	PYTHONPATH=benchmarks $(BIN)/python tests/fuzzed.py --minutes $(MINUTES)

# First says how long the rest of the ladder of models and rules takes. Then goes on with the ladder, with other slices, and
# with stages, each for the given number of minutes, and writes tables and plots.
lab: $(STAMP)
	$(BIN)/python benchmarks/lab/ladder.py list
	$(BIN)/python benchmarks/lab/ladder.py run --minutes $(MINUTES)
	$(BIN)/python benchmarks/lab/slices.py run --minutes $(MINUTES)
	$(BIN)/python benchmarks/lab/stages.py run --minutes $(MINUTES)
	$(BIN)/python benchmarks/lab/page.py

# Checks the installed packages for known vulnerabilities. This needs the network.
audit: $(STAMP)
	$(PYTHON) -m venv .audit-venv
	.audit-venv/bin/pip install --quiet pip-audit==2.10.1
	.audit-venv/bin/pip-audit --path "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/codespell
	$(BIN)/python proto/generate.py --check
	$(BIN)/python docs/generate.py --check
	$(BIN)/hadolint docker/Dockerfile
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.compose-spec docker/compose.yaml docker/compose.gpu.yaml
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml

types: $(STAMP)
	$(BIN)/basedpyright

# Builds the site into build/site. Dead links and warnings are errors. The tools need neither torch nor .venv.
DOCS_EXTRA := import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])
docs: .docs-venv/installed
	NO_MKDOCS_2_WARNING=1 .docs-venv/bin/mkdocs build --strict

.docs-venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .docs-venv
	.docs-venv/bin/python -m pip install --quiet --constraint constraints.txt $$($(PYTHON) -c '$(DOCS_EXTRA)')
	@touch $@

check: lint types test test-slow

# Checks the wheel, the sdist and the workflows as far as possible without accounts (see CONTRIBUTING.md).
release-check: $(STAMP)
	.ci/release

# Updates actions and base images to the newest commits and digests. This needs the network. Review the diff.
pin:
	$(PYTHON) .ci/pin.py

# Builds and checks the images, which takes minutes and gigabytes, so `check` does not include it. It needs Docker,
# Podman, or root on Debian.
docker-check:
	$(PYTHON) docker/check.py

clean:
	rm -rf .venv .proto-venv .audit-venv .docs-venv build dist *.egg-info .pytest_cache .coverage* .ruff_cache .hypothesis
