"""`minbert train` as a script, for several processes:

accelerate launch scripts/train.py RECIPE.yaml [key=value ...]
"""

import sys

from hf_minbert.cli import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:]])
