"""A server of the newest weights that a trainer has written, such as train_and_publish.py.

    python examples/serve_newest.py weights --port 8000
    curl http://localhost:8000/v1/completions --data '{"prompt": "import ", "max_tokens": 20}'

When it starts it loads the newest folder weights/step_N, or waits for the first, and then answers
/health. `curl http://localhost:8000/reload --data step_40` has it load that one. Until that is done
it answers with the weights that it has.

It needs checkpoint.py, hugging_face.py, transformer.py, token_files.py and heartbeat.py.
"""

import sys

sys.path.append("distributed")  # EDIT: where these files are

import argparse
import contextlib
import json
import os
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch

import checkpoint
import hugging_face
from transformer import Transformer

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("weights", type=Path, help="the folder in which the trainer writes step_N")
parser.add_argument("--port", type=int, default=8000)
args = parser.parse_args()

# heartbeat.fail then raises at once, on whichever node of a job this is: a client gets its words.
os.environ["RANK"] = "0"
# A mapped file that the trainer deletes on another node would end this process (SIGBUS).
hugging_face.mapped = Path.read_bytes
device = torch.device("cpu")
if torch.accelerator.is_available():
    device = torch.accelerator.current_accelerator()
serving = ("", None)  # the name of a folder, and its model
newest, loading = "", threading.Lock()  # the name that was asked for last


def load(name: str):
    """Has the next requests answered with these weights."""
    global serving, newest
    if not re.fullmatch(r"step_\d+", name):
        raise ValueError(f"no folder step_N: {name!r}")
    path = args.weights / name
    newest = name
    with loading:  # one after the other, because two models are in memory meanwhile
        if newest != name:
            raise ValueError(f"{newest} was asked for meanwhile")
        with torch.device("meta"):
            model = Transformer(hugging_face.read_config(path))  # EDIT: your model
        model.init_weights(device, 0, hugging_face.open_weights(path, model))
        serving = (name, model.eval())


def complete(prompt: str, count: int) -> dict:
    """An answer, by one model from its first to its last token."""
    if not prompt:
        raise ValueError("the prompt is empty")
    name, model = serving
    tokens = torch.tensor([list(prompt.encode())], device=device)
    written = model.generate(tokens, count, vocab_size=256, temperature=0)[0, tokens.size(1) :]
    text = bytes(written.tolist()).decode(errors="replace")
    return {"model": name, "choices": [{"text": text}]}


class Handler(BaseHTTPRequestHandler):
    def answer(self, status: int, body: str):
        with contextlib.suppress(ConnectionError):  # the client may have gone
            self.send_response(status)
            self.send_header("Content-Length", str(len(body.encode())))
            self.end_headers()
            self.wfile.write(body.encode())

    def do_GET(self):
        self.answer(200 if self.path == "/health" else 404, serving[0])

    def do_POST(self):
        status, body = 200, ""
        try:
            size = int(self.headers.get("Content-Length", 0))
            if not 0 <= size <= 1_000_000:
                raise ValueError("a body may have 1 MB")
            content = self.rfile.read(size)
            if self.path == "/reload":
                load(content.decode())
            else:
                asked = json.loads(content)
                count = min(int(asked["max_tokens"]), 1000)
                body = json.dumps(complete(asked["prompt"], count))
        except (SystemExit, Exception) as error:
            status, body = 500, str(error)
            self.log_error("%s", error)
        self.answer(status, body)

    def log_request(self, *_):
        """Not a line for each request."""


# It listens before it looks. So if weights are published meanwhile, their /reload waits.
server = ThreadingHTTPServer(("", args.port), Handler)
while not serving[0]:
    time.sleep(0.5)
    for step in checkpoint.steps(args.weights)[:1]:
        try:
            load(f"step_{step}")
        except SystemExit as error:  # the trainer may have deleted it meanwhile, for a newer one
            print(error, file=sys.stderr, flush=True)
print(f"Serving {serving[0]} on port {args.port}", flush=True)
server.serve_forever()
