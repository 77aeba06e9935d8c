"""Runs the command line: `python -m hf_minbert` is the same as `minbert`."""

from .cli import main

main()
