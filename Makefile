# `make demo` and `make test`, each of which makes its own .venv first; `make apk` and `make android-test` for phones.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
BUNDLE := build/tiny-int8

.PHONY: demo test setup apk android-test

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	@echo 'setting up $(VENV): about 2 GB, minutes the first time'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install -q -c constraints.txt setuptools torch==2.13.0
	$(VENV)/bin/pip install -q -c constraints.txt -e '.[export,executorch,optimum,serve,bench,test]'
	touch $@

demo: setup
	$(RUN) -m export tiny --int8 --out $(BUNDLE) --force
	$(RUN) -m runtime_py generate $(BUNDLE) --prompt 'ROMEO:' --max-new-tokens 200 --draft-tokens 3 --temperature 0

test: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(RUN) -m pytest -n 2 --dist worksteal

apk:
	bash android_demo/build.sh

android-test: setup
	$(RUN) -m pytest -n 2 --dist worksteal tests/test_android_*.py tests/test_chat_turns.py
