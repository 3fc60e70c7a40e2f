#!/usr/bin/env bash
# Lint and tests, from a fresh machine on: bash tests/run.sh [--slow] [arguments of pytest]
set -euo pipefail
cd "$(dirname "$0")/.."

selection=()
if [[ "${1:-}" == "--slow" ]]; then
    selection=(-m "slow or not slow")
    shift
fi

OMP_NUM_THREADS=1
source benchmark/environment.sh
export WANDB_MODE=offline

"$VENV"/bin/ruff check .
"$VENV"/bin/ruff format --check .
exec "$VENV"/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder "${selection[@]}" "$@"
