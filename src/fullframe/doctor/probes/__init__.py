"""Probes in a running job: each rank notes what it sees and sends nothing; the notes of all ranks are judged after."""
