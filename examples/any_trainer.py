"""Start a program that has a Trainer inside, as it is. It saves when Slurm asks, and resumes.

    sbatch launch_slurm_with_torchrun.sh examples/any_trainer.py -m trl.scripts.sft --output_dir ...
    sbatch launch_slurm_with_torchrun.sh examples/any_trainer.py ../theirs/train.py ...

It needs preemption.py. Each training has an output_dir of its own, which is the run: whoever starts
the same command again, Slurm or you, continues from its newest checkpoint that is whole.
"""

import sys

sys.path.append("distributed")  # EDIT: where preemption.py is
import preemption

preemption.listen()  # before the slow imports, because Slurm may ask at any time

import contextlib
import os
import re
import runpy

from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import TrainerState

typed = sys.argv
if typed[1:] in ([], ["-m"]):
    sys.exit(__doc__)


class Stop(TrainerCallback):
    """When Slurm asks, all ranks save after the same step, and rank 0 requeues the job."""

    stopped = False

    def on_step_end(self, args, state, control, **kwargs):
        self.stopped = preemption.asked(args.device, state.global_step)
        control.should_save = control.should_save or self.stopped

    def on_save(self, args, state, control, **kwargs):
        if self.stopped:
            sys.argv = typed  # which it prints if Slurm refuses the requeue
            preemption.end(True)


def newest(folder: str) -> str | None:
    """The newest checkpoint that is whole. Rank 0 writes trainer_state.json last, so one that a
    kill has cut off has none, or half of one."""
    # On NFS, a node that has looked for it in vain would otherwise not see it for a minute.
    os.makedirs(folder, exist_ok=True)
    names = [re.fullmatch(r"checkpoint-(\d+)", name) for name in os.listdir(folder)]
    for step in sorted((int(name[1]) for name in names if name), reverse=True):
        path = f"{folder}/checkpoint-{step}"
        with contextlib.suppress(FileNotFoundError, ValueError):
            TrainerState.load_from_json(f"{path}/trainer_state.json")
            return path
    return None


train, trained, device = Trainer.train, set(), None


def resume_and_train(self, resume_from_checkpoint=None, *others, **named):
    global device
    device = self.args.device
    if self.args.output_dir in trained:
        sys.exit(f"{self.args.output_dir} has a training already: give the second one another")
    trained.add(self.args.output_dir)
    self.add_callback(Stop())
    return train(self, newest(self.args.output_dir) or resume_from_checkpoint, *others, **named)


Trainer.train = resume_and_train

# What `python -m PACKAGE` or `python SCRIPT` does
sys.argv = typed[1:]
if typed[1] == "-m":
    sys.argv = typed[2:]
    sys.path[0] = os.getcwd()
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
else:
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
sys.argv = typed
preemption.end(bool(trained) and preemption.asked(device))
