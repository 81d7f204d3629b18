#!/bin/bash
# Submitted by test_programs.py: a generator and a trainer, each on a node.
set -euo pipefail
source ./env.sh
source aux/launch/programs.sh
export PYTHONPATH=distributed
start GENERATOR 1 ./torchrun.sh tests/scripts/beats.py 7
start TRAINER 1 ./torchrun.sh tests/scripts/beats.py 9
finish
