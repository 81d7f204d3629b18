"""Stop together, save, requeue: with this one file any script survives the end of its job.

    import preemption
    preemption.listen()                # before the slow imports, because Slurm may ask at any time
    ...
    stopped = False
    for step, batch in ...:            # with loader workers: worker_init_fn=preemption.ignore
        ...
        if step % 10 == 0 and preemption.asked(device):
            stopped = True
            break
    ...
    save(step)
    if stopped and rank == 0:
        preemption.requeue()
    dist.barrier()                     # no rank leaves while rank 0 saves and asks Slurm

Slurm sends SIGTERM at the time limit and at a preemption, and kills what is left after KillWait (30
seconds by default) or the partition's GraceTime. `sbatch --signal=TERM@300` asks for it earlier.
"""

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


def listen():
    """From now on SIGTERM, SIGUSR1 and the first Ctrl-C are requests to stop.

    In a process that this one forks the signals wait until it calls `ignore`.
    """
    for number in REQUESTS:
        signal.signal(number, set_flag)
    # torch's own handler would end a loader worker that has not come to worker_init_fn yet.
    os.register_at_fork(after_in_child=block)


def block():
    signal.pthread_sigmask(signal.SIG_BLOCK, REQUESTS)


def set_flag(number: int, frame: object):
    # No more than that, because a handler may run in the middle of anything.
    global received
    received = True
    signal.signal(signal.SIGINT, signal.default_int_handler)


def ignore(worker: int):
    """A DataLoader's worker_init_fn: a signal may reach the workers, but it is for the rank."""
    for number in REQUESTS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, REQUESTS)


def asked(device) -> bool:
    """Whether any rank was asked to stop. All ranks call it, and all get the same answer.

    A signal may reach one rank only, and each rank in another step.
    """
    import torch
    import torch.distributed as dist

    flag = torch.tensor(float(received), device=device)
    if dist.is_initialized():
        dist.all_reduce(flag)
    return flag.item() > 0


def requeue(arguments: str = "") -> bool:
    """Puts this job back into the queue. Only on rank 0, once all is saved.

    A job that scancel ends stays cancelled. If Slurm refuses, it prints the command that resumes
    the run, this script with its own arguments and the given ones, and returns False. In a
    container run_script.sh requeues the job later. Without a job there is nothing to do.
    """
    command = f"{shlex.join(sys.argv)} {arguments}"
    if "SLURM_JOB_ID" not in os.environ:
        return True
    if shutil.which("scontrol"):
        return requeue_job(command)
    # A container has no scontrol: run_script.sh looks for this file.
    folder = Path("log", os.environ["SLURM_JOB_ID"])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "requeue").write_text(command)
    return True


def requeue_job(command: str) -> bool:
    """The part of `requeue` that asks Slurm. `command` is the script with its arguments."""
    env = os.environ
    job = env["SLURM_JOB_ID"]
    if "SLURM_ARRAY_TASK_ID" in env:
        # Only this task, because the array's id alone can mean all of them.
        job = f"{env['SLURM_ARRAY_JOB_ID']}_{env['SLURM_ARRAY_TASK_ID']}"
    # launch_slurm_with_spare.sh counts its own restarts in that variable, and has Slurm's in this.
    restarts = env.get("JOB_RESTARTS", env.get("SLURM_RESTART_COUNT", 0))
    # slurmctld is busy just when many jobs end at the same limit, so it is asked for half a minute.
    for pause in (0, 2, 4, 8, 16):
        time.sleep(pause)
        shown = scontrol("show", "job", job)
        reason, state = shown.stderr.strip(), shown.stdout
        # If Slurm counts more restarts than this start knows of, it has requeued the job by itself,
        # or has heard an earlier request. In any state but these two, scancel is ending the job.
        if f"Restarts={restarts} " in state:
            reason = "Slurm is ending it"
            if re.search("JobState=(RUNNING|COMPLETING Reason=TimeLimit) ", state):
                reason = scontrol("requeue", job).stderr.strip()
        if not re.search("contact|timed out|connect|zero bytes|try again", reason, re.IGNORECASE):
            break
    if not reason:
        print("Requeued: it resumes by itself", flush=True)
        return True
    launcher = re.search(r"Command=(\S+)|$", state)[1] or "LAUNCHER"
    print(f"Not requeued: {reason}. To resume it, type this with your sbatch options:", flush=True)
    print(f"    sbatch {launcher} {command}", flush=True)
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
