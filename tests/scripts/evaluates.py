"""Stands in for lm_eval: its results are where lm_eval has them. With local-completions it asks the
server whether it answers."""

import argparse
import json
import time
import urllib.request
from pathlib import Path

parser = argparse.ArgumentParser()
for option in ("model", "model_args", "tasks", "output_path"):
    parser.add_argument(f"--{option}", required=True)
args = parser.parse_args()
model = dict(pair.split("=", 1) for pair in args.model_args.split(","))
if args.model == "local-completions":
    body = json.dumps({"model": model["model"], "prompt": "abc"}).encode()
    with urllib.request.urlopen(urllib.request.Request(model["base_url"], body)) as answer:
        assert json.load(answer)["choices"][0]["text"] == "cba"
name = model.get("pretrained") or model["model"]
folder = Path(args.output_path, name.replace("/", "__"))
folder.mkdir(parents=True, exist_ok=True)
scores = {"name": args.tasks, "alias": args.tasks, "sample_len": 10}
scores |= {"acc,none": 0.5, "acc_stderr,none": 0.1}
results = json.dumps({"results": {args.tasks: scores}})
(folder / f"results_{time.strftime('%Y-%m-%dT%H-%M-%S')}.000000.json").write_text(results)
