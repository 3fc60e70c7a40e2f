#!/usr/bin/env bash
# Lint and tests, from a fresh machine on: bash tests/run.sh [--slow] [arguments of pytest]
set -euo pipefail
cd "$(dirname "$0")/.."

selection=()
if [[ "${1:-}" == "--slow" ]]; then
    selection=(-m "slow or not slow")
    shift
fi

VENV=${VENV:-.venv}
if ! cmp -s requirements.txt "$VENV/requirements.txt"; then
    python3 -m venv "$VENV"
    # most modules are never imported; those that are get compiled then, and once
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile -r requirements.txt
    cp requirements.txt "$VENV/requirements.txt"
fi
unset PYTHONDONTWRITEBYTECODE  # or every process would compile them anew

export HF_HUB_OFFLINE=1 WANDB_MODE=offline TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1
# glibc hands large tensors back to the system at every step unless it is told not to
export MALLOC_MMAP_THRESHOLD_=4294967296 MALLOC_TRIM_THRESHOLD_=17179869184 MALLOC_TOP_PAD_=67108864

"$VENV"/bin/ruff check .
"$VENV"/bin/ruff format --check .
exec "$VENV"/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder "${selection[@]}" "$@"
