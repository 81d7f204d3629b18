"""Fine-tune a Hugging Face language model: all weights with FSDP2, or LoRA's few.

    sbatch launch_slurm_with_torchrun.sh fine_tune.py --model qwen --text my.txt --lora 16

It needs transformers (and peft for --lora), preemption.py, and checkpoint.py. A job that is stopped
saves, is requeued, and resumes. At the end OUT/model is a folder for from_pretrained().
"""

import argparse
import os
import sys
from pathlib import Path

sys.path.append("distributed")  # EDIT: where preemption.py and checkpoint.py are
import preemption

preemption.listen()  # before the slow imports, because Slurm may ask at any time

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import checkpoint

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("--model", required=True, help="a folder, downloaded on the login node")
parser.add_argument("--text", type=Path, required=True)
parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="of its matrices; 16, say")
parser.add_argument("--steps", type=int, default=1000)
parser.add_argument("--batch-size", type=int, default=64, help="sequences, over all ranks")
parser.add_argument("--context", type=int, default=1024, help="tokens of a sequence")
parser.add_argument("--learning-rate", type=float, default=1e-5, help="for LoRA ten times as much")
parser.add_argument("--save-every", type=int, default=200, metavar="STEPS")
parser.add_argument("--out", type=Path, default=Path("checkpoints", os.environ.get("RUN", "tuned")))
args = parser.parse_args()

device = torch.device("cpu")
if torch.accelerator.is_available():
    number = int(os.environ["LOCAL_RANK"]) if torch.accelerator.device_count() > 1 else 0
    torch.accelerator.set_device_index(number)
    device = torch.device(torch.accelerator.current_accelerator().type, number)
dist.init_process_group(dist.get_default_backend_for_device(device))
rank, world_size = dist.get_rank(), dist.get_world_size()
if args.batch_size % world_size != 0:
    sys.exit(f"--batch-size must be a multiple of {world_size} (ranks)")

# --- data: the tokens of a text, cut into sequences ---
tokenizer = AutoTokenizer.from_pretrained(args.model)
tokens = tokenizer(args.text.read_text(), return_tensors="pt").input_ids[0]
if len(tokens) < args.context:
    sys.exit(f"{args.text} has {len(tokens)} tokens, which is less than --context {args.context}")
sequences = tokens[: len(tokens) // args.context * args.context].view(-1, args.context)

# --- model: rank 0 reads it into its node's memory, and sends each rank its part ---
with torch.device("meta"):  # without memory
    config = AutoConfig.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
whole = None
if rank == 0:
    whole = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
layers = model.model.layers  # EDIT: of GPT-2 it is model.transformer.h
# Computes a layer's activations again in the backward pass, instead of keeping them.
model.gradient_checkpointing_enable({"use_reentrant": False})
if args.lora:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)  # the new matrices are the same on any number of ranks
    lora = LoraConfig(task_type="CAUSAL_LM", r=args.lora, target_modules="all-linear")
    model = get_peft_model(model, lora)
    whole = get_peft_model(whole, lora) if rank == 0 else None
policy = MixedPrecisionPolicy(None if device.type == "cpu" else torch.bfloat16, torch.float32)
for layer in layers:
    fully_shard(layer, mp_policy=policy)
fully_shard(model, mp_policy=policy)
model.to_empty(device=device)
model.tie_weights()
sent = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
set_model_state_dict(model, whole.state_dict() if rank == 0 else {}, options=sent)
for name, buffer in model.named_buffers():  # RoPE's frequencies are in no state_dict
    if rank == 0:
        buffer.copy_(whole.get_buffer(name))
    dist.broadcast(buffer, 0)
del whole
trained = [weight for weight in model.parameters() if weight.requires_grad]
optimizer = torch.optim.AdamW(trained, args.learning_rate, weight_decay=0, fused=True)
if rank == 0:
    # 4 bytes of a weight, as many of its gradient and each moment; 10 of a logit
    bytes_of = [w.numel() * (16 if w.requires_grad else 4) for w in model.parameters()]
    logits = 10 * args.batch_size * args.context * config.vocab_size
    per_rank = [f"{size / world_size / 2**30:.1f} GiB" for size in (sum(bytes_of), logits)]
    print(f"Each rank: {per_rank[0]} of states, {per_rank[1]} of logits", flush=True)

# --- training ---
# With other values a run is another one, which does not resume this one's.
own = {name: str(vars(args)[name]) for name in ("model", "text", "lora", "batch_size", "context")}
checkpoints = checkpoint.Folder(args.out / "steps", metadata=own)
first, stopped = checkpoints.load(model, optimizer), False
model.train()
for step in range(first + 1, args.steps + 1):
    # The step is the seed, so a run that resumes, on any number of ranks, reads what it would have.
    generator = torch.Generator().manual_seed(step)
    rows = torch.randint(len(sequences), (args.batch_size,), generator=generator)
    batch = sequences[rows[rank::world_size]].to(device)
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(trained, 1.0)
    optimizer.step()
    optimizer.zero_grad()

    if step % 10 == 0 or step == args.steps:
        mean_loss = loss.detach() / world_size
        dist.all_reduce(mean_loss)
        if rank == 0:
            print(f"step={step}/{args.steps} loss={mean_loss.item():.6f}", flush=True)
    stopped = preemption.asked(device, step)
    if stopped or step % args.save_every == 0:
        checkpoints.save(step, model, optimizer)
    if stopped:
        break

# --- the end: requeued, or a model for from_pretrained() ---
saved = checkpoints.wait()
if stopped:
    if rank == 0:
        print(checkpoints.outcome(step, stopped), flush=True)
    preemption.end(True, not saved)
# All ranks send their parts. Only rank 0 gets the whole, in the CPU's memory.
whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
state = get_model_state_dict(model, options=whole)
if rank == 0:
    model.save_pretrained(args.out / "model", state_dict=state)
    tokenizer.save_pretrained(args.out / "model")
    print(f"Finished: {args.out / 'model'}", flush=True)
# A signal may have come meanwhile, after which torchrun would fail.
preemption.end(preemption.asked(device))
