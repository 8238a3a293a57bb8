"""A training script in the six steps of Horovod's documentation; knows nothing of fullframe."""

import json
import sys

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

# 1. Initialize
hvd.init()
# 2. Pin the GPU to be used to the local rank
if torch.cuda.is_available():
    torch.cuda.set_device(hvd.local_rank())
torch.manual_seed(hvd.rank())  # every rank begins with other weights

images = torch.randn(64, 3, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
labels = torch.randint(0, 5, (64,), generator=torch.Generator().manual_seed(2))
train_dataset = TensorDataset(images, labels)
train_sampler = DistributedSampler(train_dataset, num_replicas=hvd.size(), rank=hvd.rank())
train_loader = DataLoader(train_dataset, batch_size=16 // hvd.size(), sampler=train_sampler)

model = torch.nn.Sequential(
    torch.nn.Conv2d(3, 6, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(216, 5)
).double()
# 3. Scale the learning rate (here for a batch of 16 on any number of ranks)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
# 4. Wrap the optimizer
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
# 5. Broadcast the initial state
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)

losses = []
for epoch in range(3):
    train_sampler.set_epoch(epoch)
    for data, target in train_loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data), target)
        loss.backward()
        optimizer.step()
        losses.append(hvd.allreduce(loss.detach(), name="loss").item())
# 6. Save on rank 0 only
if hvd.rank() == 0:
    torch.save(model.state_dict(), sys.argv[1])
    print(json.dumps(losses))
