"""One page about a run, or about several side by side: self-contained HTML that needs no network."""
