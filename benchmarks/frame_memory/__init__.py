"""How much of a GPU does a frame take, when 1 to 8 GPUs share it?"""
