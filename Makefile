# The two commands: make demo, make test. Both set up .venv first; Python 3.10 or newer is all they need.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test properties fuzz soak sanitize neon mutants lint types wheel docs bench clean

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: .venv/ready  ## the same small GPT with DDP + AdamW and with compressed optimizers, on two processes, side by side
	$(BIN)/python examples/demo.py

test: .venv/ready  ## everything, in a few minutes on two cores
	$(BIN)/pytest -q -n 2 --dist worksteal

properties: .venv/ready  ## hypothesis draws 2000 new examples of models, options and faults
	COMPOPT_EXAMPLES=2000 $(BIN)/pytest -q tests/faults/test_properties.py

fuzz: .venv/ready  ## 3000 new examples of shapes, layouts, dtypes and options, for every class and back end here
	COMPOPT_FUZZ=3000 $(BIN)/pytest -q tests/test_fuzz.py

soak: .venv/ready  ## 20,000 steps on four simulated ranks with random faults
	COMPOPT_SOAK=20000 $(BIN)/pytest -q tests/faults/test_soak.py

mutants: .venv/ready  ## deliberate faults, each put into a copy of the package: the tests must see every one
	$(BIN)/python tests/mutants.py

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
	$(BIN)/python bench/links.py --rates 100mbit unshaped
	for table in radius scape separate tagc; do $(BIN)/python bench/quality.py $$table --show || exit; done
	$(BIN)/python bench/quality_per_byte.py --show
	$(BIN)/python bench/time_to_loss.py --show
	@echo "What these figures mean, and where compression loses: bench/RESULTS.md"

clean:
	rm -rf .venv build dist docs/_build *.egg-info runs
