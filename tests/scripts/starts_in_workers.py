"""Run by test_preemption.py: what a loader worker starts takes no signal for a request."""

import os
import re
import subprocess
import sys

import preemption

preemption.listen()
import meanings


class Meanings:
    def __len__(self):
        return 1

    def __getitem__(self, index):
        reader, writer = os.pipe()
        if os.fork() == 0:
            os.write(writer, meanings.meaning().encode())
            os._exit(0)
        os.wait()
        status = subprocess.run(["cat", "/proc/self/status"], capture_output=True, text=True).stdout
        masks = [int(mask, 16) for mask in re.findall("^Sig(?:Blk|Ign):(.*)", status, re.M)]
        requests = sum(1 << number - 1 for number in preemption.REQUESTS)
        return os.read(reader, 99).decode(), [mask & requests for mask in masks]


if __name__ == "__main__":
    from torch.utils.data import DataLoader

    options = {"batch_size": None, "num_workers": 1, "worker_init_fn": preemption.ignore}
    print(list(DataLoader(Meanings(), multiprocessing_context=sys.argv[1], **options)))
