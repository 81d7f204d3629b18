"""Two workers read the next batches while this process trains."""

import time

from torch.utils.data import DataLoader, Dataset


class Images(Dataset):
    def __len__(self):
        return 320

    def __getitem__(self, index):
        time.sleep(0.02)  # in place of a file on a slow disk
        return index


loader = DataLoader(Images(), batch_size=8, num_workers=2, multiprocessing_context="fork")
waited, start = 0.0, time.perf_counter()
asked = start
for _ in loader:
    waited += time.perf_counter() - asked
    time.sleep(0.1)  # in place of a step
    asked = time.perf_counter()
print(
    f"waits for data: {100 * waited / (time.perf_counter() - start):.0f} % of the time", flush=True
)
