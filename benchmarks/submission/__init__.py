"""How long hundreds of runs take to be submitted, and to be shown."""
