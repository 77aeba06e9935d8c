"""`python -m hf_minbert` is `minbert`."""

from .cli import main

main()
