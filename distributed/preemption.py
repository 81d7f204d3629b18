"""Stop together, save, requeue: with this one file any script survives the end of its job.

    import preemption
    preemption.listen()                # before the slow imports, because Slurm may ask at any time
    ...
    for step in ...:                   # with loader workers: worker_init_fn=preemption.ignore
        ...
        stopped = preemption.asked(device, step)
        if stopped:
            break
    ...
    save(step)
    stopped = stopped or preemption.asked(device)    # during a save, or an evaluation
    preemption.end(requeue=stopped)                  # the last line, on every rank

Slurm sends SIGTERM at the time limit and at a preemption, and kills what is left after KillWait (30
seconds by default) or the partition's GraceTime. `sbatch --signal=TERM@300` asks for it earlier.
"""

import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

REQUESTS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
received = False
# How many steps lie between two looks at the other ranks, and the last look: its step and time
every, last = 1, (0, -math.inf)


def listen():
    """From now on SIGTERM, SIGUSR1 and the first Ctrl-C are requests to stop."""
    # The worker of a pool that runs this file anew (spawn, forkserver) has to end when it is told.
    for name in ("multiprocessing", "multiprocess"):
        if name in sys.modules and "PoolWorker" in sys.modules[name].current_process().name:
            return
    for number in REQUESTS:
        signal.signal(number, set_flag)
    os.register_at_fork(after_in_child=in_child)


def set_flag(number: int, frame: object):
    # No more than that, because a handler may run in the middle of anything.
    global received
    received = True
    signal.signal(signal.SIGINT, signal.default_int_handler)


def in_child():
    """In a forked process these signals are no requests: they end it, as they end any other."""
    frame = sys._getframe()
    while frame and "/torch/utils/data/" not in frame.f_code.co_filename:
        frame = frame.f_back
    if frame:
        # A loader worker has to live as long as its rank. Until it calls `ignore` the signals wait.
        signal.pthread_sigmask(signal.SIG_BLOCK, REQUESTS)
        return
    for number in REQUESTS:
        signal.signal(number, signal.SIG_DFL)


def ignore(worker: int):
    """A DataLoader's worker_init_fn: a signal may reach the workers, but it is for the rank."""
    for number in REQUESTS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, REQUESTS)


def asked(device, step: int | None = None) -> bool:
    """Whether any rank was asked to stop. All ranks call it, and all get the same answer.

    A signal may reach one rank only, and each rank in another step. To look at the others is a
    wait for the GPU, so with a `step`, the number of the steps since the run began, it looks in
    every tenth step only, or more often if ten steps take longer than 5 seconds.
    """
    import torch
    import torch.distributed as dist

    global every, last
    if step is not None and step % every != 0:
        return False
    took = 0.0
    if step is not None:
        now = time.monotonic()
        took = (now - last[1]) / max(1, step - last[0])
        last = (step, now)
    values = torch.tensor([float(received), took], device=device)
    if dist.is_initialized():
        dist.all_reduce(values, dist.ReduceOp.MAX)
    found, took = values.tolist()
    if step is not None:
        every = max(1, int(5 / max(took, 0.5)))
    return found > 0


def end(failed: bool = False, arguments: str | None = None):
    """Ends this process as soon as all ranks are here, with status 1 if this one has `failed`.

    With `arguments`, those that resume the run by hand, rank 0 requeues the job first. It leaves
    out Python's own shutdown, which a thread of gloo can crash: close W&B and its like before.
    """
    import torch.distributed as dist

    if arguments is not None and dist.get_rank() == 0 and not failed:
        failed = not requeue(arguments)
    # After a SIGTERM torchrun fails when its ranks have ended, and then srun ends those that still
    # save, or ask Slurm.
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(failed)


def requeue(arguments: str = "") -> bool:
    """Puts this job back into the queue. Only on rank 0, once all is saved; `end` calls it.

    A job that scancel ends stays cancelled. If Slurm refuses, it prints the command that resumes
    the run, this script with its own arguments and the given ones, and returns False. In a
    container it leaves the command for run_script.sh. Without a job there is nothing to do.
    """
    command = f"{shlex.join(sys.argv)} {arguments}"
    if "SLURM_JOB_ID" not in os.environ:
        return True
    if shutil.which("scontrol"):
        return requeue_job(command)
    asks = Path("log", os.environ["SLURM_JOB_ID"], "requeue")
    if not asks.exists():
        reason = "no scontrol here, and the job was not started by run_script.sh"
        return refused(reason, f"LAUNCHER {command}")
    asks.write_text(command)
    return True


def requeue_job(command: str) -> bool:
    """The part of `requeue` that asks Slurm. `command` is the script with its arguments."""
    env = os.environ
    job = env["SLURM_JOB_ID"]
    # launch_slurm_with_spare.sh counts its own restarts in that variable, and has Slurm's in this.
    restarts = int(env.get("JOB_RESTARTS") or env.get("SLURM_RESTART_COUNT") or 0)
    # slurmctld is busy just when many jobs end at the same limit, so it is asked for half a minute.
    for pause in (0, 2, 4, 8, 16):
        time.sleep(pause)
        shown = scontrol("show", "job", job)
        # The id of an array's last task stands for the whole array, and shows all of its tasks.
        found = re.search(rf"JobId={job} .*?(?=\n\n|\Z)", shown.stdout, re.DOTALL)
        record = found[0] if found else ""
        reason = shown.stderr.strip() or "Slurm does not show it"
        if record:
            reason = requeue_recorded(job, record, restarts)
        if not re.search("contact|timed out|connect|zero bytes|try again", reason, re.IGNORECASE):
            break
    if not reason:
        print("Requeued: it resumes by itself", flush=True)
        return True
    launcher = re.search(r"Command=(\S+)|$", record)[1] or "LAUNCHER"
    return refused(reason, f"{launcher} {command}")


def requeue_recorded(job: str, record: str, restarts: int) -> str:
    """Requeues a job that Slurm shows like this. Returns a reason if it does not, or ""."""
    # If Slurm counts more restarts than this start knows of, it has requeued the job by itself, or
    # has heard an earlier request. It counts fewer if the variable is that of another job, which
    # has submitted this one.
    if int(re.search(r"Restarts=(\d+)", record)[1]) > restarts:
        return ""
    # In any state but these two, scancel is ending the job.
    if not re.search("JobState=(RUNNING|COMPLETING Reason=TimeLimit) ", record):
        return "Slurm is ending it"
    # Not by SLURM_ARRAY_TASK_ID, which a job has from an array's task that has submitted it.
    task = re.search(r"ArrayJobId=(\d+) ArrayTaskId=(\d+)", record)
    return scontrol("requeue", "_".join(task.groups()) if task else job).stderr.strip()


def refused(reason: str, command: str) -> bool:
    print(f"Not requeued: {reason}. To resume it, type this with your sbatch options:", flush=True)
    print(f"    sbatch {command}", flush=True)
    return False


def scontrol(*arguments: str) -> subprocess.CompletedProcess:
    # In a session of its own, because torchrun sends a second SIGTERM to all of a rank's processes.
    options = {"capture_output": True, "text": True, "start_new_session": True}
    done = subprocess.run(["scontrol", *arguments], **options)
    if done.returncode != 0 and not done.stderr:
        done.stderr = f"scontrol ended with {done.returncode}: try again"
    return done


# run_script.sh calls it like this, outside the container.
if __name__ == "__main__":
    sys.exit(not requeue_job(sys.argv[1]))
