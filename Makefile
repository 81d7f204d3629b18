# The commands of this repository, for a machine without Slurm and without a virtual environment. `make help` lists them.
SHELL := /bin/bash -euo pipefail
PYTHON ?= python3
VENV = .venv
DATA_DIR ?= data/mnist
ARGS ?=
NODES ?= 2
# The oldest that the large models support, the newest, and those between that changed checkpoints
TORCH ?= 2.10.0 2.11.0 2.12.1 2.14.1 2.15.0
# Debian's releases, which have Slurm 22.05, 24.11 and 26.05
SLURM ?= bookworm trixie forky
COMPOSE = $(shell docker compose version >/dev/null 2>&1 && echo docker compose || echo docker-compose)

.PHONY: help train cluster cluster-down docker-cluster docker-cluster-down test test-all record test-torch test-slurm test-kernels test-scale test-gpu lint clean
help:           ## list the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## /  make \1\t/p' $(MAKEFILE_LIST) | expand --tabs=28

train: .venv/ready data  ## set everything up and run train_ddp.py on local ranks (DATA_DIR=data/mnist ARGS="--epochs 3")
	source .venv/bin/activate; ./torchrun.sh distributed/train_ddp.py --data-dir $(DATA_DIR) $(ARGS)

cluster: .venv/ready data slurm  ## start a two-node Slurm cluster on this machine (root), and say what to type next
	./local/cluster/namespaces.sh up
	@echo 'Now type, for example:'
	@echo '  ./local/cluster/namespaces.sh exec sinfo -N -l'
	@echo '  ./local/cluster/namespaces.sh exec sbatch launch_slurm_with_torchrun.sh aux/check_ranks.py'
	@echo '  ./local/cluster/namespaces.sh exec squeue'
	@echo '  make cluster-down'

cluster-down:   ## stop that cluster and leave nothing behind
	./local/cluster/namespaces.sh down

docker-cluster:  ## start a Slurm cluster with Docker Compose (NODES=2, up to 8), and say what to type next
	@[[ "$(NODES)" =~ ^[2-8]$$ ]] || { echo "NODES takes a number from 2 to 8, not '$(NODES)'" >&2; exit 1; }
	@docker version >/dev/null || { echo "It needs a running Docker engine" >&2; exit 1; }
	$(COMPOSE) build
	NODES=$(NODES) $(COMPOSE) up --detach ready $(wordlist 1,$(NODES),$(all_nodes))
	@echo 'Now type, for example:'
	@echo '  docker exec node-1 sinfo -N -l'
	@echo '  docker exec node-1 sbatch launch_slurm_to_torch.sh aux/check_ranks.py'
	@echo '  docker exec node-1 squeue'
	@echo '  make docker-cluster-down'
all_nodes = node-1 node-2 node-3 node-4 node-5 node-6 node-7 node-8

docker-cluster-down:  ## stop that cluster and leave nothing behind but the image
	$(COMPOSE) --profile more down --volumes

test: .venv/tests slurm docker sshd  ## install what the tests need (root: Slurm, Docker, sshd), and run them
	.venv/bin/python -m pytest tests --numprocesses 2 $(ARGS)

test-all: .venv/tests .venv-guests/ready slurm docker sshd accounting  ## what make test leaves out, such as the whole failure matrix, and the oldest and the newest torch: an hour
	.venv/bin/python -m pytest tests -m matrix --numprocesses 2 $(ARGS)
	.venv/bin/python -m pytest tests/test_gpu.py -m gpu --device cpu --numprocesses 2 --dist load
	$(MAKE) test-torch TORCH="$(sort $(firstword $(TORCH)) $(lastword $(TORCH)))"

record: .venv/tests slurm  ## write the pages' outputs anew, on an idle machine: run, and look at git diff (root; twelve minutes)
	RECORD=1 .venv/bin/python -m pytest tests/test_docs.py \
	    -m 'not scale' -k 'make_train or chapter or test_lab' $(ARGS)

test-torch:     ## every script under other versions of torch, each in its own environment (TORCH="2.10.0 2.12.1")
	for version in $(TORCH); do \
	    venv=.venv-torch-$$version; \
	    if [[ ! -e $$venv/ready ]]; then \
	        $(new_venv) $$venv; \
	        $$venv/bin/python -m pip install --quiet torch==$$version torchvision; \
	        $(call install_group,$$venv,test); \
	        touch $$venv/ready; \
	    fi; \
	    $$venv/bin/python -m pytest tests/test_gpu.py -m gpu --device cpu --numprocesses 2 --dist load; \
	done

test-slurm: .venv/tests docker  ## the launchers, signals and sites' variants under other versions of Slurm, each in a root of its own (root; SLURM="bookworm trixie forky")
	failed=; \
	test() { ./dev/slurm_root.sh $$release .venv/bin/python -m pytest --numprocesses 2 "$$@" $(ARGS); }; \
	for release in $(SLURM); do \
	    version=$$(./dev/slurm_root.sh $$release slurmd -V) || { failed+=" $$release"; continue; }; \
	    echo "$$release: $$version"; \
	    test $(addprefix tests/test_,$(slurm_tests:=.py)) || failed+=" $$release"; \
	    test -m matrix tests/test_slurm_conf.py tests/test_apptainer.py \
	        tests/test_fault_tolerance.py::test_stopped_requeued_and_cancelled || failed+=" $$release"; \
	done; \
	[[ -z $$failed ]] || { echo "Not reached, or with failures:$$failed" >&2; exit 1; }
slurm_tests = launchers env_sh namespaces check_ranks train_preemptible preemption heartbeat watch_job job_end fault_tolerance

test-kernels: export BACKEND = kernels
test-kernels: .venv/tests slurm kernels  ## on nodes with a kernel each, cgroup v2 and NFS (root; Debian)
	.venv/bin/python -m pytest -m 'not scale and not gpu' $(addprefix tests/test_,$(kernels_tests)) $(ARGS)
	.venv/bin/python -m pytest -m kernels tests/test_kernels.py $(ARGS)
kernels_tests = launchers.py::test_three_files_and_a_strangers_script \
    launchers.py::test_a_failing_rank_ends_the_job launchers.py::test_in_salloc \
    watch_job.py::test_a_script_without_heartbeats

test-scale: .venv/tests slurm  ## 4,096 ranks on 512 nodes (root; 10 GB of memory, four minutes)
	.venv/bin/python -m pytest tests -m scale $(ARGS)

test-gpu: $(VENV:=/tests)  ## every script on this machine's GPUs, NCCL with one rank (with your own torch: PYTHON=python3 VENV=)
	$(if $(VENV),$(VENV)/bin/python,$(PYTHON)) -m pytest tests/test_gpu.py -m gpu $(ARGS)

lint: .venv/tests  ## ruff and shellcheck
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	shellcheck --external-sources $$(git ls-files '*.sh' tests/scripts/stand-ins) .ci/run

# MNIST, or synthetic digits if it cannot be downloaded; the log of every run says which.
.PHONY: data
data: .venv/ready
	@if [[ ! -e $(DATA_DIR)/MNIST/raw/t10k-labels-idx1-ubyte ]]; then \
	    .venv/bin/python aux/prepare_data.py mnist --data-dir $(DATA_DIR) || \
	    { echo "make: drawing synthetic digits instead, which takes some ten seconds"; \
	      .venv/bin/python aux/prepare_data.py mnist --data-dir $(DATA_DIR) --synthetic; }; \
	fi

# The last line makes the stamp, so that an interrupted installation is repeated.
new_venv = $(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || ./dev/install.sh python3-venv; $(PYTHON) -m venv
# A torch of your own in .venv, as chapter 1 installs it, stays. The stamp of make's own is not empty.
.venv/ready: requirements.txt dev/constraints.txt
	$(new_venv) .venv
	pinned='--constraint dev/constraints.txt'; \
	if [[ ! -s $@ ]] && .venv/bin/python -c 'import torch' 2>/dev/null; then pinned=; fi; \
	.venv/bin/python -m pip install --quiet --requirement requirements.txt $$pinned; \
	.venv/bin/python dev/mend_torchvision.py; \
	printf %s "$$pinned" >$@

# Installs a dependency group of pyproject.toml, because Debian 12's pip has no --group yet.
install_group = $(1)/bin/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"]["$(2)"], sep="\n")' \
	    | $(1)/bin/python -m pip install --quiet --requirement /dev/stdin

.venv/tests: .venv/ready pyproject.toml
	$(call install_group,.venv,test)
	touch .venv/tests

# Frameworks for examples/. The .pth file points to .venv, whose torch they share.
site_packages = $$($(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
.venv-guests/ready: .venv/ready pyproject.toml
	$(new_venv) .venv-guests
	echo "$(call site_packages,.venv)" >"$(call site_packages,.venv-guests)/venv.pth"
	$(call install_group,.venv-guests,guests)
	touch .venv-guests/ready

# Installs the programs that are missing, each given as PROGRAM:PACKAGE.
install = missing=; for tool in $(1); do \
	    PATH=$$PATH:/usr/sbin:/usr/local/sbin type -P $${tool%%:*} >/dev/null || missing+=" $${tool\#\#*:}"; done; \
	[[ -z $$missing ]] || ./dev/install.sh $$missing

.PHONY: slurm docker sshd accounting kernels
slurm:
	@$(call install,slurmctld:slurm-wlm munged:munge ip:iproute2 shellcheck:shellcheck pgrep:procps mksquashfs:squashfs-tools)
# Only for the tests: `make cluster` must not leave an engine or an SSH server on somebody's machine.
docker:
	@$(call install,dockerd:docker.io docker-compose:docker-compose debootstrap:debootstrap iptables-save:iptables)
sshd:
	@$(call install,sshd:openssh-server curl:curl)
kernels:
	@$(call install,linux.uml:user-mode-linux ganesha.nfsd:nfs-ganesha-vfs mount.nfs4:nfs-common \
	    modprobe:kmod sshd:openssh-server ssh:openssh-client)
# Only on Debian 12 do slurmdbd and MariaDB work together.
accounting:
	@$(call install,slurmdbd:slurmdbd mariadbd:mariadb-server)

clean:          ## remove the virtual environments and the caches, but not data or checkpoints
	rm -rf .venv .venv-guests .venv-torch-* .pytest_cache .ruff_cache
