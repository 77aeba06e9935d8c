#!/usr/bin/env bash
# Makes an environment, installs the package, downloads a small model, trains it on the sample in the package, and shows
# scores and predictions. Needs Python and no account. The first call needs a network.
#
#   bash scripts/quickstart.sh [key=value ... such as seed=7 or num_train_epochs=3]
#
# PYTHON, MINBERT_VENV  the Python and the folder of the environment; see scripts/environment.sh
#
# If you run it again, it reuses the environment and the weights, and trains again into runs/quickstart.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
say "Step 1 of 2: an environment"
make_environment plain

# Threads that wait by spinning take the cores from each other if another process is busy. Training beside one busy
# process was four times slower.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}
say "Step 2 of 2: weights, training, scores (the same as: $venv/bin/minbert quickstart overwrite=true $*)"
"$venv/bin/minbert" quickstart overwrite=true "$@" || {
    status=$?
    ((status == 130)) && exit "$status" # interrupted, which minbert has said
    fail "the run did not succeed. Its last message, above, says why."
}
say "Done. Next, run: source $venv/bin/activate. The model is in $root/runs/quickstart, or in the output_dir that you gave. docs/quickstart.md continues from here."
