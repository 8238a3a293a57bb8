"""The machine on which ranks are to run: facts are gathered by small functions, and judged by pure ones."""
