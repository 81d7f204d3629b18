"""The Trainer of transformers on many GPUs: the batch of one, and a job that may be stopped.

    sbatch launch_slurm_with_torchrun.sh examples/with_trainer.py [FOLDER]

It needs preemption.py. FOLDER holds the checkpoints of the run that it continues. Without one, each
job has a folder of its own, which a requeue keeps.
"""

import sys

sys.path.append("distributed")  # EDIT: where preemption.py is
import preemption

preemption.listen()  # before the slow imports, because Slurm may ask at any time

import contextlib
import os
import re

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import TrainerState

EPOCHS, BATCH, SAVE_EVERY = 3, 32, 10
world_size = int(os.environ["WORLD_SIZE"])
if BATCH % world_size != 0:
    sys.exit(f"{world_size} ranks cannot share a batch of {BATCH}")
run = os.environ.get("RUN", "by_hand")  # the job's number, which env.sh exports
folder = sys.argv[1] if len(sys.argv) > 1 else f"checkpoints/{run}"


class Stop(TrainerCallback):
    """When Slurm asks, all ranks save after the same step, and rank 0 requeues the job."""

    stopped = False

    def on_step_end(self, args, state, control, **kwargs):
        self.stopped = preemption.asked(args.device, state.global_step)
        control.should_save = control.should_save or self.stopped

    def on_save(self, args, state, control, **kwargs):
        if self.stopped:
            preemption.end(True, arguments=folder)


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


torch.manual_seed(0)  # the same weights, on any number of ranks
# Without dropout, which each rank would draw for itself.
config = GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2)
config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
model = GPT2LMHeadModel(config)
rows = (torch.randint(32, (640, 1)) + torch.arange(16)) % 32  # it learns to count
examples = [{"input_ids": row, "labels": row} for row in rows]

arguments = TrainingArguments(
    output_dir=folder,
    num_train_epochs=EPOCHS,
    per_device_train_batch_size=BATCH // world_size,
    per_device_eval_batch_size=BATCH // world_size,
    learning_rate=0.01,
    save_strategy="steps",
    save_steps=SAVE_EVERY,
    save_total_limit=2,
    logging_steps=1,
    disable_tqdm=True,  # no bar in a log
    report_to="none",
    # On CPUs it has to be told, or each rank trains by itself, also on a Mac.
    use_cpu=not torch.accelerator.is_available() or sys.platform == "darwin",
)
trainer = Trainer(
    model=model,
    args=arguments,
    train_dataset=examples[:512],
    eval_dataset=examples[512:],
    callbacks=[Stop()],
)
trainer.train(resume_from_checkpoint=newest(folder))
trainer.evaluate()
trainer.save_model(f"{folder}/final")

weights = model.lm_head.weight.sum()
print(f"rank {arguments.process_index} of {world_size}: weights {weights:.6f}\n", end="")
preemption.end(preemption.asked(arguments.device), arguments=folder)
