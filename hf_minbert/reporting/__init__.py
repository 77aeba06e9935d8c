"""The report of a run: what its folder contains, as text and pictures."""
