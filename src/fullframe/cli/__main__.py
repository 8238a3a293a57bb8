"""`python -m fullframe.cli`: how local ranks are started."""

from fullframe.cli import main

main()
