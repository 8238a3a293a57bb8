"""Are the numbers of a split step those of one process?"""
