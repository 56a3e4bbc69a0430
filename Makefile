# `make check` needs Python 3.11 or newer with venv, and sets up .venv-check in seconds: NumPy, no framework, no MPI; hvdplus
# is installed there as links to the sources. All else lives in .venv and needs headers, a C++ compiler and make as well
# (Debian: apt-get install g++ make python3-venv python3-dev).
#
# In .venv hvdplus is installed as a wheel, not as links: the tests then run against exactly what a user gets. The package
# is reinstalled (seconds) whenever a source file is newer.

PYTHON ?= $(firstword $(shell command -v python3.11) python3)
VENV := $(CURDIR)/.venv
CHECK := $(CURDIR)/.venv-check
SOURCES := setup.py pyproject.toml MANIFEST.in README.md $(shell find hvdplus adapters compression -name '*.py')

# cmake, mpirun and horovodrun come from wheels; a child's plain `python` must be ours as well.
export PATH := $(VENV)/bin:$(PATH)
# Open MPI refuses to run as root unless told twice (containers, CI).
ifeq ($(shell id -u),0)
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
endif
export TF_CPP_MIN_LOG_LEVEL ?= 3

.PHONY: help venv install demo check types test lint docs slurm-up clean

help:
	@echo "make check     little over a minute: ruff, mypy, and the tests that need NumPy alone"
	@echo "make install   set up .venv: PyTorch, TensorFlow, MPI, Horovod (built, some minutes), hvdplus"
	@echo "make demo      hvdplus at work beside stock Horovod on a slow link, in PyTorch and in Keras; a page in runs/"
	@echo "make test      run the tests against the installed package"
	@echo "make lint      ruff and mypy --strict"
	@echo "make docs      the documentation as pages, in build/docs"
	@echo "make slurm-up  install and start a one-node Slurm from Debian's packages (root)"
	@echo "make clean     remove .venv, runs/ and build leftovers"

venv: $(VENV)/.stamp-venv
install: $(VENV)/.stamp-package

$(VENV)/.stamp-venv:
	@command -v $(PYTHON) >/dev/null || { echo "No Python found. Mend it with: sudo apt-get install python3"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is $$($(PYTHON) --version);" \
		"hvdplus wants 3.11 or newer. Name another: make PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "$(PYTHON) cannot make environments." \
		"Mend it with: sudo apt-get install python3-venv"; exit 1; }
	@{ command -v c++ || command -v g++ || command -v clang++; } >/dev/null || { echo "No C++ compiler found." \
		"Mend it with: sudo apt-get install g++"; exit 1; }
	@$(PYTHON) -c 'import pathlib, sys, sysconfig; sys.exit(not (pathlib.Path(sysconfig.get_path("include")) / "Python.h").exists())' \
		|| { echo "Python's headers are missing. Mend it with: sudo apt-get install python3-dev"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

# The packages that hvdplus works with, in the versions that were tried together.
$(VENV)/.stamp-packages: $(VENV)/.stamp-venv constraints.txt pyproject.toml setup.py
	rm -rf build
	$(VENV)/bin/python -m pip install -c constraints.txt '.[torch,keras,mpi,viz,dev]'
	@touch $@

$(VENV)/.stamp-horovod: $(VENV)/.stamp-packages
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(VENV)/bin/hvdplus install-horovod
	@touch $@

# --no-deps: only hvdplus itself. build/ is setuptools' scratch space; what is left there would end up in the wheel.
$(VENV)/.stamp-package: $(VENV)/.stamp-horovod $(SOURCES)
	rm -rf build
	$(VENV)/bin/python -m pip install --quiet --no-deps --force-reinstall .
	@touch $@

# Two hosts on a slow link, as root or where the kernel lets users have networks of their own; else both ranks on one.
demo: install
	$(VENV)/bin/python examples/demo.py

# What starts no jobs needs no more than NumPy, or frameworks where they are. It shares the cores with jobs of one rank.
# Most jobs of several ranks wait more than they compute, for a launcher, a queue, or a time that has to be up: they run
# two at a time, tests of one file one after the other, as they may share something: a Slurm, an environment that is
# built once. What measures times, or computes on all cores, runs alone.
PURE := not (jobs or lab or slurm)
SHARED := $(PURE) or one_rank
# Long tests that mostly tell what others tell, and three quarters of the examples of properties, run with EVERY_TEST=1
# only.
USUAL := $(if $(EVERY_TEST),, and not rarely)
PROFILE := --hypothesis-profile $(if $(EVERY_TEST),full,check)
# pytest ends with 5 where it was told to pick tests and there is none of them in this part.
PICKED := $(if $(PYTEST_ARGS),|| [ $$? -eq 5 ])

$(CHECK)/.stamp: constraints.txt pyproject.toml setup.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is $$($(PYTHON) --version);" \
		"hvdplus wants 3.11 or newer. Name another: make PYTHON=/path/to/python3"; exit 1; }
	$(PYTHON) -m venv $(CHECK)
	$(CHECK)/bin/python -m pip install --quiet -c constraints.txt -e '.[check]'
	@touch $@

# Each in a folder of its own choice: mypy follows the links in hvdplus/, pytest sees what is installed. Frameworks' own
# folders are type-checked where the frameworks are (make lint).
check: export PATH := $(CHECK)/bin:$(PATH)
check: $(CHECK)/.stamp
	$(CHECK)/bin/ruff check .
	$(CHECK)/bin/ruff format --check --quiet .
	@$(MAKE) --no-print-directory types
	cd tests && $(CHECK)/bin/python -m pytest -q -n 2 --hypothesis-profile check -m "$(PURE) and not packaging" . $(PYTEST_ARGS)

types: $(CHECK)/.stamp
	$(CHECK)/bin/mypy --exclude '(^|/)(torch|tensorflow|keras)(/|\.py$$)' hvdplus

# From tests/, so that no folder of the repository can be imported in place of the installed package. With ALL_FRAMEWORKS
# a framework that cannot be imported is a failure; without, its tests are left out.
test: export ALL_FRAMEWORKS := 1
test: install
	cd tests && $(VENV)/bin/python -m pytest -q -n 2 $(PROFILE) -m "($(SHARED))$(USUAL)" . $(PYTEST_ARGS) $(PICKED)
	cd tests && $(VENV)/bin/python -m pytest -q -n 2 $(PROFILE) --dist loadfile -m "not ($(SHARED)) and not alone$(USUAL)" . $(PYTEST_ARGS) $(PICKED)
	cd tests && $(VENV)/bin/python -m pytest $(PROFILE) -m "not ($(SHARED)) and alone$(USUAL)" . $(PYTEST_ARGS) $(PICKED)

# Pages in build/docs. A warning is an error: it is a link that leads nowhere, or a name that is gone.
$(VENV)/.stamp-docs: $(VENV)/.stamp-package
	$(VENV)/bin/python -m pip install --quiet -c constraints.txt '.[docs]'
	@touch $@

docs: $(VENV)/.stamp-docs
	$(VENV)/bin/sphinx-build -q -W --keep-going -b html docs build/docs
	@echo "build/docs/index.html"

lint: install
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check --quiet .
	cd tests && $(VENV)/bin/python -m mypy --config-file ../pyproject.toml -p hvdplus

slurm-up:
	bash examples/slurm/one-node-slurm.sh

clean:
	rm -rf .venv .venv-check build dist runs *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
