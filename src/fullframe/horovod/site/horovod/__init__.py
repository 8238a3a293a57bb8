"""Stands where `import horovod` looks, under `fullframe horovodrun`: only torch is there."""

from fullframe import __version__

__all__ = ["__version__"]
