"""Recipes that leak and recipes that only look as if they did, each a small script.

In those that leak the line that keeps something ends in `# kept`, the one that made it in `# made`.
"""

HEAD = """
import collections, functools, random
import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset
import fullframe as ff

class Frames(Dataset):
    def __len__(self):
        return 12
    def __getitem__(self, index):
        return {"image": torch.randn(3, 24, 32), "index": index}  # data

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 1, 1)
    def forward(self, x):
        return self.last(torch.relu(self.first(x)))  # model

def loss(model, batch):
    return model(batch["image"]).square().mean()

def job(**changes):
    fields = dict(model=Net, loss=loss, optimizer=lambda p: torch.optim.AdamW(p), data=Frames, batch_size=2, steps=200)
    return ff.Recipe(**(fields | changes))

def recipe():
    return job()
"""

LEAKS = {
    # name: (kind, what comes after HEAD)
    "total_in_a_module": ("graph", """
total = 0.0
def loss(model, batch):
    global total
    value = model(batch["image"]).square().mean()
    total += value  # kept made
    return value
"""),
    "total_in_an_object": ("graph", """
class Meter:
    def __init__(self):
        self.total = torch.zeros(())
    def add(self, value):
        self.total = self.total + value  # kept made
meter = Meter()
def loss(model, batch):
    value = model(batch["image"]).square().mean()
    meter.add(value)
    return value
"""),
    "total_in_a_dict": ("graph", """
stats = {"loss": 0.0}
def loss(model, batch):
    value = model(batch["image"]).square().mean()
    stats["loss"] = stats["loss"] + value  # kept made
    return value
"""),
    "average_with_its_graph": ("graph", """
class Net2(Net):
    smooth = None
    def forward(self, x):
        y = super().forward(x)
        level = y.mean()
        self.smooth = level if self.smooth is None else 0.9 * self.smooth + 0.1 * level  # kept made
        return y
def recipe():
    return job(model=Net2)
"""),
    "losses_in_a_list": ("graphs", """
losses = []
def loss(model, batch):
    value = model(batch["image"]).square().mean()  # made
    losses.append(value)  # kept
    return value
"""),
    "losses_in_a_closure": ("graphs", """
def make():
    history = []
    def loss(model, batch):
        value = model(batch["image"]).square().mean()  # made
        history.append(value)  # kept
        return value
    return loss
def recipe():
    return job(loss=make())
"""),
    "losses_by_name_in_an_object": ("graphs", """
class Log:
    def __init__(self):
        self.rows = []
    def __call__(self, **row):
        self.rows.append(row)  # kept
log = Log()
def loss(model, batch):
    value = model(batch["image"]).square().mean()  # made
    log(loss=value, again=float(value))
    return value
"""),
    "outputs_in_a_list": ("outputs", """
outputs = []
def loss(model, batch):
    out = model(batch["image"])
    outputs.append(out.detach())  # kept made
    return out.square().mean()
"""),
    "outputs_as_arrays": ("arrays", """
outputs = []
def loss(model, batch):
    out = model(batch["image"])
    outputs.append(out.detach().numpy().copy())  # kept
    return out.square().mean()
"""),
    "a_row_of_a_large_output": ("outputs", """
rows = []
def loss(model, batch):
    out = model(batch["image"])
    rows.append(out.detach()[0, 0, 0])  # kept made
    return out.square().mean()
"""),
    "outputs_by_step": ("outputs", """
outputs, step = {}, 0
def loss(model, batch):
    global step
    step += 1
    out = model(batch["image"])
    outputs[f"step {step}"] = out.detach()  # kept made
    return out.square().mean()
"""),
    "batches_in_a_list": ("outputs", """
hard = []
def loss(model, batch):
    value = model(batch["image"]).square().mean()
    if value > 0:
        hard.append(batch)  # kept
    return value
"""),
    "activations_on_a_module": ("activations", """
class Net2(Net):
    def __init__(self):
        super().__init__()
        self.features = []
    def forward(self, x):
        y = torch.relu(self.first(x))
        self.features.append(y.detach().clone())  # kept made
        return self.last(y)
def recipe():
    return job(model=Net2)
"""),
    "activations_with_graph_on_a_module": ("activations", """
class Net2(Net):
    def __init__(self):
        super().__init__()
        self.features = {}
    def forward(self, x):
        y = torch.relu(self.first(x))  # made
        self.features[len(self.features)] = y  # kept
        return self.last(y)
def recipe():
    return job(model=Net2)
"""),
    "a_list_of_the_class": ("outputs", """
class Net2(Net):
    seen = []
    def forward(self, x):
        y = super().forward(x)
        Net2.seen.append(y.detach())  # kept made
        return y
def recipe():
    return job(model=Net2)
"""),
    "a_bank_that_is_joined": ("growing tensor", """
class Net2(Net):
    def __init__(self):
        super().__init__()
        self.bank = torch.zeros(0, 1, 24, 32)
    def forward(self, x):
        y = super().forward(x)
        self.bank = torch.cat([self.bank, y.detach()])  # kept made
        return y
def recipe():
    return job(model=Net2)
"""),
    "a_buffer_that_is_joined": ("growing tensor", """
class Net2(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("bank", torch.zeros(0, 1, 24, 32), persistent=False)
    def forward(self, x):
        y = super().forward(x)
        self.bank = torch.cat([self.bank, y.detach()])  # kept made
        return y
def recipe():
    return job(model=Net2)
"""),
    "hooks_on_a_module": ("hooks", """
def loss(model, batch):
    model.register_forward_hook(lambda module, inputs, output: None)  # kept
    return model(batch["image"]).square().mean()
"""),
    "hooks_that_capture": ("hooks", """
def loss(model, batch):
    seen = []
    first = next(module for module in model.modules() if isinstance(module, nn.Conv2d))
    def keep(module, inputs, output):
        seen.append(output.detach())  # made
    first.register_forward_hook(keep)  # kept
    return model(batch["image"]).square().mean()
"""),
    "hooks_on_a_parameter": ("hooks", """
def loss(model, batch):
    parameter = next(model.parameters())
    parameter.register_hook(lambda gradient: None)  # kept
    return model(batch["image"]).square().mean()
"""),
    "functions_that_capture": ("closures", """
callbacks = []
def loss(model, batch):
    out = model(batch["image"])
    callbacks.append(lambda: out.mean().item())  # kept by-model
    return out.square().mean()
"""),
    "a_cache_without_bound": ("cache", """
@functools.cache
def spectrum(image):
    return torch.fft.rfft2(image).abs()  # made
def loss(model, batch):
    weight = spectrum(batch["image"]).mean()  # kept
    return model(batch["image"]).square().mean() * weight.detach()
"""),
    "an_optimizer_that_remembers": ("outputs", """
class Remembers(torch.optim.SGD):
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            if not hasattr(self, "history"):
                self.history = []
            if parameter.dim() == 4 and parameter.shape[1] == 3:
                self.history.append(parameter.grad.repeat(8, 1, 1, 1))  # kept made
        return super().step(closure)
def recipe():
    return job(optimizer=lambda p: Remembers(p, lr=1e-3))
"""),
    "outputs_of_evaluation": ("evaluation", """
predictions = []
def evaluate(model, batch):
    out = model(batch["image"])
    predictions.append(out)  # kept by-model
    return {"level": (out.sum(), torch.tensor(float(out.numel())))}
def recipe():
    return job(evaluate=evaluate, evaluation_data=Frames, evaluate_every=5)
"""),
    "evaluation_that_builds_graphs": ("evaluation", """
predictions = []
def evaluate(model, batch):
    with torch.enable_grad():
        out = model(batch["image"])
        predictions.append(out.mean())  # kept made
    return {"level": (out.detach().sum(), torch.tensor(float(out.numel())))}
def recipe():
    return job(evaluate=evaluate, evaluation_data=Frames, evaluate_every=5)
"""),
    "a_data_set_that_notes": ("outputs", """
class Noting(Frames):
    def __init__(self):
        self.drawn = []
    def __getitem__(self, index):
        sample = super().__getitem__(index)
        self.drawn.append(sample["image"])  # kept by-data
        return sample
def recipe():
    return job(data=Noting)
"""),
    "a_data_set_that_notes_in_its_workers": ("workers", """
class Noting(Frames):
    def __init__(self):
        self.drawn = []
    def __len__(self):
        return 400
    def __getitem__(self, index):
        sample = super().__getitem__(index)
        self.drawn.append(torch.ones(256, 1024))  # kept
        return sample
def recipe():
    return job(data=Noting, workers=1)
"""),
    "objects_without_tensors": ("objects", """
events = []
def loss(model, batch):
    value = model(batch["image"]).square().mean()
    events.append([float(value) * number for number in range(500)])  # kept
    return value
"""),
}  # fmt: skip

HONEST = {
    "nothing": "",
    "a_running_mean": """
mean = 0.0
def loss(model, batch):
    global mean
    value = model(batch["image"]).square().mean()
    mean = 0.9 * mean + 0.1 * value.item()
    return value
""",
    "a_running_mean_of_tensors": """
mean = torch.zeros(())
def loss(model, batch):
    global mean
    value = model(batch["image"]).square().mean()
    mean = 0.9 * mean + 0.1 * value.detach()
    return value
""",
    "a_total_of_numbers": """
total, count = 0.0, 0
def loss(model, batch):
    global total, count
    value = model(batch["image"]).square().mean()
    total, count = total + float(value), count + 1
    return value
""",
    "a_history_of_numbers": """
losses, norms = [], {}
def loss(model, batch):
    value = model(batch["image"]).square().mean()
    losses.append(value.item())
    norms[len(norms)] = value.detach()
    return value
""",
    "a_bounded_deque": """
recent = collections.deque(maxlen=25)
def loss(model, batch):
    out = model(batch["image"])
    recent.append(out.detach())
    return out.square().mean()
""",
    "a_bounded_deque_with_graphs": """
recent = collections.deque(maxlen=15)
def loss(model, batch):
    value = model(batch["image"]).square().mean()
    recent.append(value)
    return value
""",
    "a_list_that_is_cut": """
recent = []
def loss(model, batch):
    out = model(batch["image"])
    recent.append(out.detach())
    if len(recent) > 40:
        recent.pop(0)
    return out.square().mean()
""",
    "a_list_that_is_emptied": """
outputs = []
def loss(model, batch):
    out = model(batch["image"])
    outputs.append(out.detach())
    if len(outputs) == 30:
        torch.stack(outputs).mean()
        outputs.clear()
    return out.square().mean()
""",
    "a_list_of_this_step": """
class Net2(Net):
    def forward(self, x):
        self.features = []
        y = torch.relu(self.first(x))
        self.features.append(y)
        return self.last(y)
def recipe():
    return job(model=Net2)
""",
    "the_last_output": """
last = None
def loss(model, batch):
    global last
    last = model(batch["image"])
    return last.square().mean()
""",
    "a_cache_of_grids": """
class Net2(Net):
    def __init__(self):
        super().__init__()
        self.grids = {}
    def forward(self, x):
        key = (x.shape[-1], random.choice(range(8)))
        if key not in self.grids:
            self.grids[key] = torch.linspace(0, 1, 4096)
        return super().forward(x)
def recipe():
    return job(model=Net2)
""",
    "a_bounded_cache": """
@functools.lru_cache(maxsize=8)
def grid(seed):
    return torch.zeros(4096)
count = 0
def loss(model, batch):
    global count
    count += 1
    grid(count)
    return model(batch["image"]).square().mean()
""",
    "a_bank_by_sample": """
bank = {}
def loss(model, batch):
    out = model(batch["image"])
    for index, one in zip(batch["index"].tolist(), out.detach()):
        bank[index] = one.clone()
    return out.square().mean()
""",
    "a_data_set_that_caches": """
class Cached(Frames):
    def __init__(self):
        self.cache = {}
    def __len__(self):
        return 60
    def __getitem__(self, index):
        if index not in self.cache:
            self.cache[index] = super().__getitem__(index)
        return self.cache[index]
def recipe():
    return job(data=Cached)
""",
    "a_data_set_that_caches_in_a_list": """
class Cached(Frames):
    def __init__(self):
        self.cache, self.known = [], {}
    def __len__(self):
        return 60
    def __getitem__(self, index):
        if index not in self.known:
            self.known[index] = len(self.cache)
            self.cache.append(super().__getitem__(index))
        return self.cache[self.known[index]]
def recipe():
    return job(data=Cached)
""",
    "a_data_set_that_caches_in_its_workers": """
class Cached(Frames):
    def __init__(self):
        self.cache = {}
    def __len__(self):
        return 200
    def __getitem__(self, index):
        if index not in self.cache:
            self.cache[index] = torch.ones(256, 1024)
        return super().__getitem__(index)
def recipe():
    return job(data=Cached, workers=1)
""",
    "momentum": """
def recipe():
    return job(optimizer=lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9, nesterov=True))
""",
    "lbfgs_like_history": """
class Few(torch.optim.SGD):
    old = collections.deque(maxlen=20)
    def step(self, closure=None):
        parameters = self.param_groups[0]["params"]
        self.old.append([parameter.grad.repeat(8, *[1] * (parameter.dim() - 1)) for parameter in parameters])
        return super().step(closure)
def recipe():
    return job(optimizer=lambda p: Few(p, lr=1e-3))
""",
    "hooks_that_are_removed": """
def loss(model, batch):
    seen = []
    handle = model.register_forward_hook(lambda module, inputs, output: seen.append(output))
    value = model(batch["image"]).square().mean()
    handle.remove()
    return value
""",
    "a_hook_that_is_there_once": """
hooked = []
def loss(model, batch):
    if not hooked:
        hooked.append(model.register_forward_hook(lambda module, inputs, output: None))
    return model(batch["image"]).square().mean()
""",
    "a_bank_of_fixed_size": """
class Net2(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("bank", torch.zeros(64, 1, 24, 32))
        self.at = 0
    def forward(self, x):
        y = super().forward(x)
        with torch.no_grad():
            self.bank[self.at % 64] = y[0]
        self.at += 1
        return y
def recipe():
    return job(model=Net2)
""",
    "a_bank_up_to_a_size": """
class Net2(Net):
    def __init__(self):
        super().__init__()
        self.bank = torch.zeros(0, 1, 24, 32)
    def forward(self, x):
        y = super().forward(x)
        self.bank = torch.cat([self.bank, y.detach()])[-20:]
        return y
def recipe():
    return job(model=Net2)
""",
    "truncated_backpropagation": """
state, count = torch.zeros(()), 0
def loss(model, batch):
    global state, count
    value = model(batch["image"]).square().mean()
    count += 1
    state = (state.detach() if count % 5 == 0 else state) * 0.5 + 0.5 * model(batch["image"]).mean()
    return value
""",
    "sizes_that_change": """
held = None
def loss(model, batch):
    global held
    out = model(batch["image"])
    held = torch.zeros(random.randint(1, 1000))
    return out.square().mean()
""",
    "outputs_of_one_evaluation": """
predictions = []
def evaluate(model, batch):
    out = model(batch["image"])
    if batch["index"].item() == 0:
        predictions.clear()
    predictions.append(out)
    return {"level": (out.sum(), torch.tensor(float(out.numel())))}
def recipe():
    return job(evaluate=evaluate, evaluation_data=Frames, evaluate_every=5)
""",
}  # fmt: skip
