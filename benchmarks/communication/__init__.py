"""How many bytes does a split step send, against the fewest that its windows allow?"""
