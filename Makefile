# The two commands: make demo, make test. Both set up .venv first; Python 3.10 or newer is all they need.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt

# Where torch for CPUs is: the torch that registries have for Linux brings 2.6 GB of CUDA packages along. It is asked first,
# and your registry where it does not answer. `make test TORCH_INDEX=`, for a machine with GPUs, asks the registry alone.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
ANSWERS = $(BIN)/python -c 'import urllib.request as u; u.urlopen("$(TORCH_INDEX)/torch/", timeout=3)' 2>/dev/null

.PHONY: demo kernels test slow properties fuzz soak quorum elastic sites sanitize neon mutants versions lint types wheel docs bench gpu clean

.venv/demo: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed: make PYTHON=...")'
	@echo "Setting up .venv, 1 of 3: an empty environment"
	@$(PYTHON) -m venv .venv
	@if [ -n "$(TORCH_INDEX)" ] && $(ANSWERS); then \
		echo "2 of 3: torch for CPUs, about 200 MB, from $(TORCH_INDEX)" && $(PIP) --index-url $(TORCH_INDEX) torch; \
	else \
		echo "2 of 3: torch from your package registry, on Linux perhaps with 2.6 GB of CUDA packages:" && \
		echo "        $(if $(TORCH_INDEX),$(TORCH_INDEX) does not answer,TORCH_INDEX is empty)" && $(PIP) torch; \
	fi
	@echo "3 of 3: compopt, and what the demo draws with, about 50 MB"
	@$(PIP) --editable '.[demo]'
	@touch $@

# Installing compopt compiles the C passes; this compiles them again where they have changed since.
.venv/passes: .venv/demo $(wildcard kernels/native/*.[ch]) kernels/native/build_passes.py
	@$(BIN)/python kernels/native/build_passes.py
	@touch $@

.venv/ready: .venv/demo | .venv/passes
	@echo "Installing what the tests need into .venv"
	@$(PIP) --quiet --editable '.[dev]'
	@touch $@

demo:  ## the same small GPT with DDP + AdamW and with each of compopt's optimizers, on two processes, side by side
	@echo "This trains a small GPT with DDP + AdamW and with each of compopt's optimizers, on two processes of this machine,"
	@echo "about 5 minutes on two idle cores, longer on busy ones, and shows loss, bytes and step times side by side, with what they mean."
	@test -e .venv/demo || echo "First it sets up .venv, which downloads about 250 MB; nothing outside this folder changes."
	@$(MAKE) --no-print-directory .venv/demo
	@$(BIN)/python examples/demo.py

kernels: .venv/passes  ## compile the C passes of kernels/native that are older than their sources

# Three: there is one to work while another waits for ranks. Bytecode is kept also where the environment says otherwise:
# tests start some hundred processes.
TEST := env PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -q -n 3 --dist worksteal

test: .venv/ready  ## all tests but the slow ones, in about five minutes on two cores; what each costs: runs/processor_times.txt
	COMPOPT_PROCESSOR_TIMES=runs/processor_times.txt $(TEST) -m "not slow"

slow: .venv/ready  ## the slow tests: killed torchrun agents, scripts on sockets, kernels for GPUs, a simulated device, benchmarks
	$(TEST) -m slow

properties: .venv/ready  ## 2000 new examples of models, options and faults, 500 of advice; every toy problem on 1 and 4 ranks
	COMPOPT_EXAMPLES=2000 $(BIN)/pytest -q tests/faults/test_properties.py
	COMPOPT_EXAMPLES=500 $(BIN)/pytest -q tests/planning/test_advice.py tests/planning/test_layers_advice.py -k impossible
	COMPOPT_EXAMPLES=1 $(BIN)/pytest -q tests/conformance/test_training.py -k stated_loss

fuzz: .venv/ready  ## 3000 new examples of shapes, layouts, dtypes and options, for every class and back end here
	COMPOPT_FUZZ=3000 $(BIN)/pytest -q tests/conformance/test_fuzz.py

soak: .venv/ready  ## 20,000 steps with random faults; optimizers made and dropped; 2,000 damaged snapshots, 100 kills of real ranks
	COMPOPT_SOAK=20000 $(BIN)/pytest -q tests/faults/test_soak.py
	COMPOPT_DAMAGES=2000 $(BIN)/pytest -q tests/integrations/test_snapshot_faults.py -k damaged
	COMPOPT_KILLS=100 $(BIN)/pytest -q tests/integrations/test_snapshot_faults.py -k killed_ranks

quorum: .venv/demo  ## three replica groups under torchft: one is killed, one is stopped, both return; two minutes
	@$(PIP) --quiet --editable '.[demo,torchft]'
	@$(BIN)/python examples/quorum.py

elastic: .venv/ready  ## torchrun agents on this machine that are killed and added during a run, in about ten minutes
	$(BIN)/python tests/elastic_run.py

sites: .venv/ready  ## DDP inside a site, compression between sites: 2 x 2 processes train, then are compared; two minutes
	OMP_NUM_THREADS=1 $(BIN)/torchrun --nproc-per-node 4 --standalone examples/hsdp.py --ddp --optimizer separate --steps 40
	$(BIN)/pytest -q tests/integrations/test_ddp_sites.py

mutants: .venv/ready  ## deliberate faults, each put into a copy of the package: the tests must see every one
	$(BIN)/python tests/mutants.py

versions: .venv/ready  ## a part of the tests, and two ranks, on the oldest and the newest torch; 10 GB in runs/versions, ten minutes
	$(BIN)/python tests/check_versions.py --index "$(TORCH_INDEX)" $(VERSIONS)

sanitize: .venv/ready  ## the C passes under AddressSanitizer and UndefinedBehaviorSanitizer: random shapes, two minutes
	$(BIN)/python tests/check_sanitizers.py

neon: .venv/ready  ## the C passes for 64-bit ARM in an emulator, against this machine's (gcc-aarch64-linux-gnu, qemu-user)
	$(BIN)/python tests/check_neon.py

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/ready  ## mypy --strict over the package and its kernels; what is relaxed, and why, is in pyproject.toml
	$(BIN)/mypy

wheel: .venv/ready  ## build the wheel, install it into an empty environment, train one step there
	$(BIN)/python tests/check_wheel.py

docs: .venv/ready  ## these pages and the reference, from the docstrings, as HTML in docs/_build
	$(BIN)/sphinx-build -q -W --keep-going -b html docs docs/_build

bench: .venv/ready  ## ten minutes: step() alone, steps over shaped links (root) or loopback, tables of the runs that are kept
	$(BIN)/python bench/step.py
	$(BIN)/python bench/launches.py
	$(BIN)/python bench/links.py --rates 100mbit unshaped
	$(BIN)/python bench/ladder.py --show
	$(BIN)/python bench/ladder.py seconds --show
	$(BIN)/python bench/_table.py quality run width ranks steps lr seeds loss to_adamw run_share
	$(BIN)/python bench/_table.py time_to_loss-100mbit run steps loss seconds seconds_to_1.1
	@echo "What these figures mean, and where compression loses: bench/RESULTS.md"

gpu:  ## one prepared run on a GPU, at most nine minutes: tests, correctness, kernels, steps, training; see bench/gpu.py
	bash bench/gpu.sh

clean:
	rm -rf .venv build dist docs/_build *.egg-info runs
