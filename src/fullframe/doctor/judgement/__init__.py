"""From the notes of all ranks to findings: pure functions, which need neither torch nor ranks."""
