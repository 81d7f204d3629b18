"""Chapter 2's script for one GPU: a resnet learns classes of JPEGs, and keeps its best weights."""

import time

import torch
from torch import nn
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.models import get_model
from torchvision.transforms import v2

NETWORK, SIZE = "resnet18", 64  # for a GPU "resnet50", 224
EPOCHS, BATCH = 3, 64
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

to_tensor = v2.Compose([v2.ToImage(), v2.Resize((SIZE, SIZE)), v2.ToDtype(torch.float32, True)])
train_set = ImageFolder("data/images/train", to_tensor)
test_set = ImageFolder("data/images/test", to_tensor)
workers = {"num_workers": 2, "multiprocessing_context": "fork"}
train_loader = DataLoader(train_set, BATCH, shuffle=True, drop_last=True, **workers)
test_loader = DataLoader(test_set, BATCH, **workers)

torch.manual_seed(0)
model = get_model(NETWORK, num_classes=len(train_set.classes)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(train_loader))

best = -1.0
for epoch in range(EPOCHS):
    start = time.perf_counter()
    model.train()
    for images, labels in train_loader:
        loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    loss = loss.item()  # waits for the GPU
    images_per_second = len(train_loader) * BATCH / (time.perf_counter() - start)
    model.eval()
    correct = torch.zeros(1, device=device)
    with torch.no_grad():
        for images, labels in test_loader:
            correct += (model(images.to(device)).argmax(1) == labels.to(device)).sum()
    accuracy = correct.item() / len(test_set)
    print(f"{epoch=} {loss=:.4f} {accuracy=:.4f} {images_per_second=:.0f}")
    if accuracy > best:
        best = accuracy
        torch.save(model.state_dict(), "best.pt")
