"""Run for the fixture qwen: a tiny Qwen3 in bfloat16, with a tokenizer of bytes, and a template
that shows an empty thought before the last answer only, as Qwen3's does."""

import sys

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
words = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
words.decoder = decoders.ByteLevel()
made = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<|im_end|>", pad_token="<|pad|>")
made.add_tokens(["<|im_start|>"], special_tokens=True)
made.chat_template = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == "assistant" and loop.last %}<think></think>{% endif %}{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
made.save_pretrained(sys.argv[1])
torch.manual_seed(1)
config = Qwen3Config(
    vocab_size=320,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=256,
    tie_word_embeddings=True,
)
Qwen3ForCausalLM(config).bfloat16().save_pretrained(sys.argv[1])
