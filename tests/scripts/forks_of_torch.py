"""Run by test_preemption.py: what signals mean in a process that a module of torch has forked."""

import os

import preemption

preemption.listen()
import meanings

for module in ("torch.utils.data.dataloader", "torch._inductor.compile_worker.subproc_pool"):
    names = {"__name__": module}
    exec("import os; child = os.fork()", names)
    if names["child"] == 0:
        print(f"{module}: {meanings.meaning()}", flush=True)
        os._exit(0)
    os.wait()
