#!/bin/bash
# torchrun gives each rank one thread, however many CPUs there are.
torchrun --standalone --nproc-per-node=2 --no-python \
    python -c 'import torch; print("threads of a rank:", torch.get_num_threads())'
