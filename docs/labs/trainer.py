"""A Trainer of transformers on one GPU, as people have it, to be ported: see grade_port.py.

python docs/labs/trainer.py
"""

import argparse

import torch
from exam_data import LONGEST, TOKENS, Sequences
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--checkpoint", default="trainer_output", help="the folder of the checkpoints")
options = parser.parse_args()


class Print(TrainerCallback):
    def on_log(self, args, state, control, logs, **kwargs):
        if "loss" in logs:
            said = f"loss={logs['loss']:.9f} learning_rate={logs['learning_rate']:.9f}"
            print(f"step={state.global_step} {said}", flush=True)


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
    per_device_train_batch_size=options.batch_size,
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
    callbacks=[Print()],
)
trainer.train()
trainer.save_model(f"{options.checkpoint}/final")
