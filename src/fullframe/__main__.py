"""`python -m fullframe`: the command line."""

from fullframe.cli import main

main()
