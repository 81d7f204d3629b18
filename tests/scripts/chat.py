"""Run by test_hugging_face.py: the loss over all windows of val.bin, what counts in them, and an
answer to a question."""

import sys

sys.path.insert(0, "distributed")
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import token_files

known = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
text = token_files.TokenDataset(sys.argv[2], 128, 1)
[(inputs, targets)] = text.eval_batches(8, 8, 0, 1)
with torch.no_grad():
    logits = model(inputs).logits
print(torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).item())
print(repr(known.decode(targets[targets >= 0])))
question = [{"role": "user", "content": "What is 7?"}]
prompt = known.apply_chat_template(
    question, add_generation_prompt=True, return_tensors="pt", return_dict=True
)
written = model.generate(**prompt, do_sample=False, max_new_tokens=40)[0]
print(repr(known.decode(written[prompt["input_ids"].size(1) :])))
