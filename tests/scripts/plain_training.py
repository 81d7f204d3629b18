"""Run by test_frameworks.py: the same model, data and order without any framework."""

import sys

import torch

torch.manual_seed(0)
inputs = torch.randn(512, 16)
targets = inputs.sum(1, keepdim=True)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
epochs, step = int(sys.argv[1]), 0
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * 16)
for epoch in range(epochs):
    order = torch.randperm(512, generator=torch.Generator().manual_seed(epoch))
    for batch in order.split(32):
        step, rate = step + 1, schedule.get_last_lr()[0]
        loss = torch.nn.functional.mse_loss(model(inputs[batch]), targets[batch])
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        print(f"step={step} learning_rate={rate:.8f} loss={loss.item():.6f}")
