"""The script asks torch. It says what it has found, so that a job does not train on the CPU for
a week unseen."""

import torch

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = torch.nn.Linear(8, 1).to(device)
print(f"Trains on {model.weight.device}", flush=True)
