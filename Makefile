# Each target is a line that a person could type; README.md says the same for people without make.
#   make book PYTHON=/path/to/python3.12   uses that Python to create .venv
#   make test NO_SKIPS=1                   turns every skipped test into a failure
#   make test JOBS=0                       runs the tests in one process, not in two

BIN := .venv/bin

.PHONY: book pdf serve test quick test-colab lint format types hooks execute tidy bench bench-gpu train clean help

# A failed build is removed with what it has read: built again, unchanged pages would not repeat their warnings.
book: .venv/ready _build/tools  ## build the book into _build/html (plain `make` does that too)
	@"$(BIN)"/jupyter-book build . -W -n --keep-going || { rm -rf _build/html _build/.doctrees; exit 1; }
	@printf '\nThe book is ready. Open _build/html/index.html in a browser, or type: make serve\n'

serve:  ## show the book at http://127.0.0.1:8000
	@test -f _build/html/index.html || { echo 'There is no book to serve yet: type `make book` first.'; exit 1; }
	@echo 'The book is at http://127.0.0.1:8000 until you press Ctrl-C.'
	@"$(BIN)"/python -m http.server 8000 --bind 127.0.0.1 --directory _build/html

# Needs Chromium, takes some minutes, and puts a link on the landing page.
pdf: book  ## print the whole book into _build/html/linear-attention.pdf
	@"$(BIN)"/python -m tools.pdf

test: .venv/ready  ## run all tests, style and types among them, and every cell of every notebook
	"$(BIN)"/python -m pytest -n $(or $(JOBS),2) --dist loadfile $(if $(NO_SKIPS),--no-skips)

quick: .venv/ready  ## run what a change in lesson_code needs: no notebooks, no pages
	"$(BIN)"/python -m pytest -n $(or $(JOBS),2) --dist loadfile --quick lesson_code tests

# Every notebook alone, chapters and exercises, in an environment that has only what Colab brings. `make test`
# tries one of each.
test-colab: .venv/ready  ## run each notebook in an environment that has only what Colab has
	"$(BIN)"/python -m pytest tests/test_colab.py --all-notebooks

lint: .venv/ready  ## look for mistakes and for lines that are not formatted
	"$(BIN)"/ruff check .
	"$(BIN)"/ruff format --check .

format: .venv/ready  ## format the code, and mend the mistakes that ruff can mend
	"$(BIN)"/ruff check --fix .
	"$(BIN)"/ruff format .

types: .venv/ready  ## check the types of lesson_code
	"$(BIN)"/mypy

hooks: .venv/ready  ## let git look at style, types and notebooks before each commit
	"$(BIN)"/pre-commit install

# For authors: runs the notebooks and stores their outputs in them.
execute: .venv/ready  ## run all notebooks and store their outputs in them
	"$(BIN)"/python tools/notebooks.py execute book/*.ipynb

tidy: .venv/ready  ## put the notebooks into the form in which they are committed, outputs as they are
	@"$(BIN)"/python tools/notebooks.py tidy || true

# Writes the measurements that the book quotes; takes some minutes on a machine that does nothing else.
bench: .venv/ready  ## measure again what the book quotes
	"$(BIN)"/python benchmarks/causal.py
	"$(BIN)"/python benchmarks/habits.py
	"$(BIN)"/python benchmarks/crossings.py
	"$(BIN)"/python benchmarks/decoding.py
	"$(BIN)"/python benchmarks/readers.py
	"$(BIN)"/python benchmarks/bracket.py
	"$(BIN)"/python benchmarks/forms.py
	"$(BIN)"/python benchmarks/scans.py
	"$(BIN)"/python benchmarks/family.py
	"$(BIN)"/python benchmarks/delta.py
	"$(BIN)"/python benchmarks/exchange.py
	"$(BIN)"/python benchmarks/real_models.py
	"$(BIN)"/python benchmarks/regression.py
	"$(BIN)"/python benchmarks/generation.py
	"$(BIN)"/python benchmarks/registers.py
	"$(BIN)"/python benchmarks/stalls.py
	"$(BIN)"/python benchmarks/predictions.py
	"$(BIN)"/python benchmarks/chapters.py

# Trains the models whose results the book shows: about eleven hours on one core, by the seconds in the files. It may be
# stopped anywhere and gone on with, and most scripts say beforehand how long they take.
train: .venv/ready  ## train the models again whose results the book shows
	"$(BIN)"/python benchmarks/pronouns.py
	"$(BIN)"/python benchmarks/pronouns.py --scale --seeds 0 1 2
	"$(BIN)"/python benchmarks/pronouns.py --linear
	"$(BIN)"/python benchmarks/layer.py
	"$(BIN)"/python benchmarks/recall.py
	"$(BIN)"/python benchmarks/overwriting.py
	"$(BIN)"/python benchmarks/letters.py
	"$(BIN)"/python benchmarks/forgetting.py
	"$(BIN)"/python benchmarks/lookup.py
	"$(BIN)"/python benchmarks/tracking.py
	"$(BIN)"/python benchmarks/needle.py
	"$(BIN)"/python benchmarks/language.py
	"$(BIN)"/python benchmarks/conversion.py
	"$(BIN)"/python benchmarks/digits.py
	"$(BIN)"/python benchmarks/heads.py

# Measures the kernels and the generation of images, on a machine with a GPU.
bench-gpu: .venv/ready  ## measure the kernels on a GPU
	"$(BIN)"/python benchmarks/kernels.py
	"$(BIN)"/python benchmarks/generation.py --device cuda

clean:  ## remove .venv and everything that was built
	rm -rf .venv _build build

help:  ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-11s %s\n", $$1, $$2 }' Makefile

.venv/ready: requirements.txt pyproject.toml
	@sh tools/venv.sh "$(PYTHON)"

# Executed notebooks are kept, keyed by their cells. When the code they import changes, they run again.
_build/code: $(shell find lesson_code -name '*.py' -o -name '*.cu' -o -name '*.h') requirements.txt
	@rm -rf _build && mkdir -p _build && touch $@

# A page does not know the tools that made it. When these change, all pages are made again; no notebook runs.
_build/tools: _build/code $(wildcard tools/*.py tools/templates/*)
	@rm -rf _build/html _build/.doctrees && touch $@
