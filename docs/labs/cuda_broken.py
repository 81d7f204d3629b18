"""The device is written into the script, whatever the node and this torch have."""

import torch

model = torch.nn.Linear(8, 1).cuda()
print(f"Trains on {model.weight.device}", flush=True)
