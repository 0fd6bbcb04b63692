# Two commands do everything on a fresh machine: `make demo` and `make test`. Both make the environment first.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/installed

.PHONY: install demo test test-slow coverage mutants chaos fuzz audit format lint types docs check docker-check release-check pin clean

install: $(STAMP)

# One line a step, with its time; pip says only what went wrong.
step = @printf '%s ... ' $(1); began=$$(date +%s); $(2) && echo "$$(($$(date +%s) - began)) s"
PIP := $(BIN)/python -m pip --quiet --quiet --disable-pip-version-check install --constraint constraints.txt

$(STAMP): pyproject.toml constraints.txt
	@echo "installing into .venv, which takes one to five minutes"
	$(call step,"making the environment",$(PYTHON) -m venv .venv)
	@# torch first, pinned: a later resolution then finds it and brings no other build.
	$(call step,"installing torch",$(PIP) torch)
	$(call step,"installing noloco_p2p and what it needs",$(PIP) --editable '.[dev]')
	@touch $(STAMP)

demo: $(STAMP)
	$(BIN)/noloco demo

test: $(STAMP)
	$(BIN)/python -m pytest -m "not slow"

# Real swarms for minutes: churn, the monitor in a browser, closed ports, several processes a peer.
test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow

# The same tests with every line counted that they run, in the processes that they start, too; prints what they miss.
coverage: $(STAMP)
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -m "not slow"
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

# Small faults, put into a copy of the code one by one: each must make the test fail that is named beside it. Minutes.
mutants: $(STAMP)
	$(BIN)/python tests/mutants/run.py

# A quarter of an hour of real peers that are killed, frozen and asked to leave, from a seed; not a part of `test`.
chaos: $(STAMP)
	$(BIN)/python -m pytest tests/adversarial tests/chaos
	$(BIN)/python benchmarks/soak.py --minutes 8 --mtbf 15 --seed 2506

# Every decoder of bytes from the network, for so many minutes: make fuzz MINUTES=30.
MINUTES ?= 5
fuzz: $(STAMP)
	PYTHONPATH=benchmarks $(BIN)/python tests/fuzzed.py --minutes $(MINUTES)

# The packages that are installed, against the list of known weaknesses; needs the network.
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
	$(BIN)/python benchmarks/study/tables.py --check
	$(BIN)/python benchmarks/study/quoted.py --check
	$(BIN)/hadolint docker/Dockerfile
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.compose-spec docker/compose.yaml docker/compose.gpu.yaml
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml

types: $(STAMP)
	$(BIN)/basedpyright

# The site, into build/site; a dead link or a warning is an error. Its tools need neither torch nor .venv.
DOCS_EXTRA := import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])
docs: .docs-venv/installed
	NO_MKDOCS_2_WARNING=1 .docs-venv/bin/mkdocs build --strict

.docs-venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .docs-venv
	.docs-venv/bin/python -m pip install --quiet --constraint constraints.txt $$($(PYTHON) -c '$(DOCS_EXTRA)')
	@touch $@

check: lint types test test-slow

# Wheel, sdist and workflows, as far as no account is needed; what runs where is in CONTRIBUTING.md.
release-check: $(STAMP)
	.ci/release

# Actions and base images to the newest commits and digests; needs the network. Read the diff.
pin:
	$(PYTHON) .ci/pin.py

# Minutes, and gigabytes: not a part of `check`. Needs Docker, Podman, or root on Debian.
docker-check:
	$(PYTHON) docker/check.py

clean:
	rm -rf .venv .proto-venv .audit-venv .docs-venv build dist *.egg-info .pytest_cache .coverage* .ruff_cache .hypothesis
