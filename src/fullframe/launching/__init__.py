"""Jobs on a cluster: scripts and manifests that start them, and what became of them. Loads no torch."""
