"""A loop of one's own on one device; `after.py` is the same on as many as there are."""

import os

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

import fullframe as ff
from examples.shapes import Network, Shapes

mesh = ff.init_mesh(width=int(os.environ.get("WORLD_SIZE", "1")))
torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = Network().to(device)
model = ff.parallelize(model, mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
loader = DataLoader(Shapes(), batch_size=4)
loader = ff.ShardedLoader(loader, mesh)

losses = []
for _ in range(3):
    for batch in loader:
        image, mask = batch["image"].to(device), batch["mask"].to(device)
        loss = F.cross_entropy(model(image), mask)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
print(losses)
