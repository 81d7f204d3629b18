#!/bin/bash
# The CPUs, divided among its two ranks.
export OMP_NUM_THREADS=$((($(nproc) + 1) / 2))
torchrun --standalone --nproc-per-node=2 --no-python \
    python -c 'import torch; print("threads of a rank:", torch.get_num_threads())'
