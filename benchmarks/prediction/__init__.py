"""Does a simulated step hold as many bytes as the real one?"""
