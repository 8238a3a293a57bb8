"""Training that goes on when workers come and go (`horovod.torch.elastic`)."""

from fullframe.horovod.elastic.loop import run
from fullframe.horovod.elastic.sampler import ElasticSampler
from fullframe.horovod.elastic.state import ObjectState, State, TorchState

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]
