#!/usr/bin/env bash
# The main job from nothing: makes an environment, installs the package, fetches small weights, trains on the sample
# in the package, and shows scores and predictions. Needs Python, a network for the first time, and no account.
#
#   bash scripts/quickstart.sh [key=value ... such as seed=7 or num_train_epochs=3]
#
# PYTHON, MINBERT_VENV  the interpreter and where the environment lies; see scripts/environment.sh
#
# Again, it uses the environment and the weights that are there, and trains anew into runs/quickstart.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
say "Step 1 of 2: an environment"
make_environment plain

# Threads that wait by spinning take the cores from each other as soon as something else runs here: training was four
# times slower beside one busy process.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}
say "Step 2 of 2: weights, training, scores (the same as: $venv/bin/minbert quickstart overwrite=true $*)"
"$venv/bin/minbert" quickstart overwrite=true "$@" || fail "the run did not succeed: the reason is above."
say "Done. To go on, first: source $venv/bin/activate. The model is in $root/runs/quickstart unless you gave another output_dir. docs/quickstart.md goes on from here."
