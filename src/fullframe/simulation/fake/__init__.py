"""Torch without numbers: the job, the model, the batch and the kernels of a step that is only traced."""
