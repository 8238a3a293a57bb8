"""GPUs without a GPU, to run what needs torch's build for CUDA: see README.md."""
