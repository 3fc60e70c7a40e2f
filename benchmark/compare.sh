#!/usr/bin/env bash
# The quickstart, then DPO and ILQL from the same SFT model on the same comparisons, and one table of all policies.
#
#   bash benchmark/compare.sh                  seed 44413
#   SEED=55513 bash benchmark/compare.sh       another seed; then `python benchmark/compare.py --all` for one table
#
# Finished stages are not run again, and an interrupted one goes on, as in the quickstart.
set -euo pipefail
bash "$(dirname "$0")/quickstart.sh"
source "$(dirname "$0")/common.sh"

common=(--sft_model "$OUT/sft_$SEED" --dataset "$OUT/data_sft/comparisons" --sft_dataset "$OUT/data_sft/sft" --seed "$SEED"
  --batch_size 32 --response_length 48)
train dpo "${common[@]}" --max_updates 500 --lr 2e-4 --beta 0.1
train ilql "${common[@]}" --max_updates 200 --lr 5e-4 --alpha 0.01
"$PYTHON" benchmark/compare.py --folder "$OUT" --seed "$SEED"
