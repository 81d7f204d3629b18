"""trainer.py on many GPUs, in a job that Slurm may end: the lines of docs/frameworks.md."""

import preemption

preemption.listen()

import argparse
import contextlib
import os
import sys
from pathlib import Path

import torch
from exam_data import LONGEST, TOKENS, Sequences
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import TrainerState

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--checkpoint", default="trainer_output", help="the folder of the checkpoints")
options = parser.parse_args()
world_size = int(os.environ["WORLD_SIZE"])
if options.batch_size % world_size != 0:
    sys.exit(f"{world_size} ranks cannot share a batch of {options.batch_size}")


class Print(TrainerCallback):
    def on_log(self, args, state, control, logs, **kwargs):
        if "loss" in logs and state.is_world_process_zero:
            said = f"loss={logs['loss']:.9f} learning_rate={logs['learning_rate']:.9f}"
            print(f"step={state.global_step} {said}", flush=True)


class Stop(TrainerCallback):
    stopped = False

    def on_step_end(self, args, state, control, **kwargs):
        self.stopped = preemption.asked(args.device, state.global_step)
        control.should_save = control.should_save or self.stopped

    def on_save(self, args, state, control, **kwargs):
        if self.stopped:
            preemption.end(True)


def newest(folder: str) -> str | None:
    found = Path(folder).glob("checkpoint-*")
    for path in sorted(found, key=lambda path: int(path.name.split("-")[1]), reverse=True):
        with contextlib.suppress(OSError, ValueError):
            TrainerState.load_from_json(path / "trainer_state.json")
            return str(path)
    return None


def padded(sequences: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    tokens = nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    seen = tokens != 0
    labels = tokens.where(seen, -100)  # which the loss leaves out
    return {"input_ids": tokens, "attention_mask": seen.long(), "labels": labels}


torch.manual_seed(0)
config = GPT2Config(vocab_size=TOKENS, n_positions=LONGEST, n_embd=32, n_layer=2, n_head=4)
config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
arguments = TrainingArguments(
    output_dir=options.checkpoint,
    num_train_epochs=options.epochs,
    per_device_train_batch_size=options.batch_size // world_size,
    learning_rate=0.003,
    warmup_steps=5,
    logging_steps=1,
    save_strategy="epoch",
    disable_tqdm=True,
    report_to="none",
    use_cpu=not torch.cuda.is_available(),
)
trainer = Trainer(
    model=GPT2LMHeadModel(config),
    args=arguments,
    data_collator=padded,
    train_dataset=Sequences(),
    callbacks=[Print(), Stop()],
)
trainer.train(resume_from_checkpoint=newest(options.checkpoint))
trainer.save_model(f"{options.checkpoint}/final")
preemption.end(preemption.asked(arguments.device))
