"""What does attention of split tokens keep for backward, and how long does a step take, against one process?"""
