"""Run by test_answers.py: what the model of argv's folder answers by its
template, without a work list."""

import json
import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

known = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto")
question = [{"role": "user", "content": "prompt 7"}]
inputs = known.apply_chat_template(
    question, add_generation_prompt=True, return_tensors="pt", return_dict=True
)
written = model.generate(**inputs, max_new_tokens=100)[0, inputs["input_ids"].size(1) :]
print(json.dumps(known.decode(written, skip_special_tokens=True)))
