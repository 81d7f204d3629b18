"""An ordinary script for one GPU: resnet18, AdamW, a schedule, loader workers, best.pt."""

import torch
from torch import nn
from torch.utils.data import DataLoader, random_split
from torchvision.datasets import FakeData
from torchvision.models import resnet18
from torchvision.transforms import v2

EPOCHS, BATCH = 2, 16
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

to_tensor = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
data = FakeData(112, (3, 32, 32), num_classes=4, transform=to_tensor)
train_set, test_set = random_split(data, [96, 16])
workers = {"num_workers": 2, "multiprocessing_context": "fork"}
train_loader = DataLoader(train_set, BATCH, shuffle=True, drop_last=True, **workers)
test_loader = DataLoader(test_set, BATCH, **workers)

torch.manual_seed(0)
model = resnet18(num_classes=4).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(train_loader))

best = -1.0
for epoch in range(EPOCHS):
    model.train()
    for images, labels in train_loader:
        loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    model.eval()
    correct = torch.zeros(1, device=device)
    with torch.no_grad():
        for images, labels in test_loader:
            correct += (model(images.to(device)).argmax(1) == labels.to(device)).sum()
    accuracy = correct.item() / len(test_set)
    print(f"epoch {epoch}: loss {loss.item():.4f}, test accuracy {accuracy:.4f}")
    if accuracy > best:
        best = accuracy
        torch.save(model.state_dict(), "best.pt")
