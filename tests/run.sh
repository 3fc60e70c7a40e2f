#!/usr/bin/env bash
# Lint and tests, from a fresh machine on: bash tests/run.sh [--slow] [arguments of pytest]
set -euo pipefail
cd "$(dirname "$0")/.."

selection=()
if [[ "${1:-}" == "--slow" ]]; then
    selection=(-m "slow or not slow")
    shift
fi

[[ -x .venv/bin/python ]] || python3 -m venv .venv
if ! cmp -s requirements.txt .venv/installed.txt; then
    .venv/bin/pip install --quiet -r requirements.txt
    cp requirements.txt .venv/installed.txt
fi

export HF_HUB_OFFLINE=1 WANDB_MODE=offline TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# glibc hands large tensors back to the system at every step unless it is told not to
export MALLOC_MMAP_THRESHOLD_=4294967296 MALLOC_TRIM_THRESHOLD_=17179869184 MALLOC_TOP_PAD_=67108864

.venv/bin/ruff check .
.venv/bin/ruff format --check .
exec .venv/bin/python -m pytest "${selection[@]}" "$@"
