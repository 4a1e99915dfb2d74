# Each target is a line that a person could type; README.md says the same for people without make.
#   make book PYTHON=/path/to/python3.12   uses that Python to create .venv
#   make test NO_SKIPS=1                   turns every skipped test into a failure

BIN := .venv/bin

.PHONY: book serve test test-colab execute bench bench-gpu train clean

# A failed build is removed: built again, unchanged pages would not repeat their warnings.
book: .venv/ready _build/code
	@"$(BIN)"/jupyter-book build . -W -n --keep-going || { rm -rf _build/html; exit 1; }
	@printf '\nThe book is ready. Open _build/html/index.html in a browser, or type: make serve\n'

serve:
	@test -f _build/html/index.html || { echo 'There is no book to serve yet: type `make book` first.'; exit 1; }
	@echo 'The book is at http://127.0.0.1:8000 until you press Ctrl-C.'
	@"$(BIN)"/python -m http.server 8000 --bind 127.0.0.1 --directory _build/html

test: .venv/ready
	"$(BIN)"/python -m pytest $(if $(NO_SKIPS),--no-skips)

# Every notebook alone, in an environment that has only what Colab brings. `make test` tries one of them.
test-colab: .venv/ready
	"$(BIN)"/python -m pytest tests/test_colab.py --all-notebooks

# For authors: runs the notebooks and stores their outputs in them.
execute: .venv/ready
	"$(BIN)"/python tools/notebooks.py execute book/*.ipynb

# Writes the measurements that the book quotes; takes some minutes on a machine that does nothing else.
bench: .venv/ready
	"$(BIN)"/python benchmarks/causal.py
	"$(BIN)"/python benchmarks/decoding.py
	"$(BIN)"/python benchmarks/scans.py
	"$(BIN)"/python benchmarks/family.py
	"$(BIN)"/python benchmarks/exchange.py
	"$(BIN)"/python benchmarks/generation.py
	"$(BIN)"/python benchmarks/registers.py

# Trains the models whose results the book shows: over an hour on two free cores, and it may be stopped and gone on with.
train: .venv/ready
	"$(BIN)"/python benchmarks/recall.py
	"$(BIN)"/python benchmarks/digits.py

# Measures the kernels and the generation of images, on a machine with a GPU.
bench-gpu: .venv/ready
	"$(BIN)"/python benchmarks/kernels.py
	"$(BIN)"/python benchmarks/generation.py --device cuda

clean:
	rm -rf .venv _build

.venv/ready: requirements.txt pyproject.toml
	@sh tools/venv.sh "$(PYTHON)"

# Executed notebooks are kept, keyed by their cells. When the code they import changes, they run again.
_build/code: $(shell find lesson_code -name '*.py' -o -name '*.cu' -o -name '*.h') requirements.txt
	@rm -rf _build && mkdir -p _build && touch $@
