# The commands of this repository, for a machine without Slurm and without a virtual environment. `make help` lists them.
SHELL := /bin/bash -euo pipefail
PYTHON ?= python3
DATA_DIR ?= data/mnist
ARGS ?=

.PHONY: help train cluster cluster-down test test-scale bench lint clean
help:           ## list the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## /  make \1\t/p' $(MAKEFILE_LIST) | expand --tabs=24

train: .venv/ready data  ## set everything up, train train_ddp.py on local ranks (DATA_DIR=data/mnist ARGS="--epochs 3")
	./torchrun.sh distributed/train_ddp.py --data-dir $(DATA_DIR) $(ARGS)

cluster: .venv/ready data slurm  ## start a two-node Slurm cluster on this machine (root), say what to type next
	./local/cluster/namespaces.sh up
	@echo 'Now type, for example:'
	@echo '  ./local/cluster/namespaces.sh exec sinfo -N -l'
	@echo '  ./local/cluster/namespaces.sh exec sbatch launch_slurm_with_torchrun.sh aux/check_ranks.py'
	@echo '  ./local/cluster/namespaces.sh exec squeue'
	@echo '  make cluster-down'

cluster-down:   ## end that cluster, leave nothing behind
	./local/cluster/namespaces.sh down

test: .venv/tests slurm sshd  ## install what the tests need, Slurm and sshd too (root), and run them
	.venv/bin/python -m pytest tests $(ARGS)

test-scale: .venv/tests slurm  ## 4,096 ranks on 512 nodes (root; 4 GB of memory, some minutes)
	.venv/bin/python -m pytest tests -m scale $(ARGS)

bench: .venv/ready  ## the speed of training on MNIST, as ratios
	.venv/bin/python aux/bench/mnist.py

lint: .venv/tests  ## ruff and shellcheck
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	shellcheck --external-sources $$(git ls-files '*.sh') .ci/run

# MNIST, or digits drawn by the program where nothing can be downloaded; the log of every run says which.
.PHONY: data
data: .venv/ready
	@if [[ ! -e $(DATA_DIR)/MNIST/raw/train-images-idx3-ubyte ]]; then \
	    .venv/bin/python aux/prepare_data.py mnist --data-dir $(DATA_DIR) || \
	    .venv/bin/python aux/prepare_data.py mnist --data-dir $(DATA_DIR) --synthetic; \
	fi

# The last line makes the stamp, so that an installation that broke off is done again.
.venv/ready: requirements.txt
	$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || ./aux/install.sh python3-venv
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --requirement requirements.txt
	touch .venv/ready

.venv/tests: .venv/ready requirements-test.txt
	.venv/bin/python -m pip install --quiet --requirement requirements-test.txt
	touch .venv/tests

.PHONY: slurm
slurm:
	@missing=; for tool in slurmctld:slurm-wlm munged:munge ip:iproute2 shellcheck:shellcheck pgrep:procps; do \
	    PATH=$$PATH:/usr/sbin:/usr/local/sbin type -P $${tool%%:*} >/dev/null || missing+=" $${tool##*:}"; done; \
	[[ -z $$missing ]] || ./aux/install.sh $$missing

# For the tests of submission alone: `make cluster` must not leave an SSH server on somebody's machine.
.PHONY: sshd
sshd:
	@PATH=$$PATH:/usr/sbin type -P sshd >/dev/null || ./aux/install.sh openssh-server

clean:          ## remove the virtual environment and the caches, not data or checkpoints
	rm -rf .venv .pytest_cache .ruff_cache
