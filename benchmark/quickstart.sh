#!/usr/bin/env bash
# RLHF from nothing, on the embedded world: data -> base -> SFT -> reward model -> PPO -> report.
#
#   bash benchmark/quickstart.sh                  seed 44413
#   SEED=55513 bash benchmark/quickstart.sh       another seed, on the same world and base model
#
# Everything goes to $OUT (benchmark/out); finished stages are not run again, so an interrupted call can be repeated.
set -euo pipefail
cd "$(dirname "$0")/.."
SEED=${SEED:-44413}
OUT=${OUT:-benchmark/out}
VENV=${VENV:-.venv}
PYTHON=$VENV/bin/python
mkdir -p "$OUT"

if ! cmp -s requirements.txt "$VENV/requirements.txt"; then
  python3 -m venv "$VENV"
  "$PYTHON" -m pip install --quiet --disable-pip-version-check -r requirements.txt
  cp requirements.txt "$VENV/requirements.txt"
fi
# No Hub is needed. glibc returns large tensors to the system at every step unless it is told not to.
export HF_HUB_OFFLINE=1 ACCELERATE_USE_CPU=true TOKENIZERS_PARALLELISM=false TRANSFORMERS_VERBOSITY=error
export OMP_WAIT_POLICY=passive  # threads that wait by spinning make a busy machine ten times slower
export MALLOC_MMAP_THRESHOLD_=4294967296 MALLOC_TRIM_THRESHOLD_=17179869184 MALLOC_TOP_PAD_=67108864

# stage NAME MARK COMMAND...: run the command unless the file MARK says that it has finished; note its seconds
stage() {
  local name=$1 mark=$2 start=$SECONDS
  shift 2
  if [[ -f $mark ]] && { [[ $mark != *run.json ]] || grep -q '"finished": true' "$mark"; }; then
    echo "== $name: already there"
    return
  fi
  echo "== $name"
  "$PYTHON" "$@"
  echo "$name,$((SECONDS - start))" >> "$OUT/seconds_$SEED.csv"
}

WORLD=$OUT/world
stage world "$WORLD/world.json" benchmark/synthetic.py --output_dir "$WORLD" --seed 1
for part in pretrain sft; do
  [[ $part == sft ]] && comparisons=$WORLD/comparisons || comparisons=""
  stage "tokenise_$part" "$OUT/data_$part/run.json" tldr_dataset.py --sft "$WORLD/$part" --comparisons "$comparisons" \
    --tokenizer "$WORLD/tokenizer" --max_query_length 144 --output_dir "$OUT/data_$part"
done
common=(--batch_size 32 --micro_batch_size 32)
stage base "$OUT/base/run.json" sft.py --model "$WORLD/init" --dataset "$OUT/data_pretrain/sft" --output_dir "$OUT/base" \
  "${common[@]}" --max_updates 300 --lr 3e-3 --loss_on response --response_length 48 --eval_rows 64 --overwrite
stage sft "$OUT/sft_$SEED/run.json" sft.py --model "$OUT/base" --dataset "$OUT/data_sft/sft" --seed "$SEED" \
  --output_dir "$OUT/sft_$SEED" "${common[@]}" --max_updates 100 --lr 5e-4 --loss_on response --response_length 48 --overwrite
stage reward "$OUT/reward_$SEED/run.json" reward.py --sft_model "$OUT/sft_$SEED" --dataset "$OUT/data_sft/comparisons" \
  --sft_dataset "$OUT/data_sft/sft" --seed "$SEED" --output_dir "$OUT/reward_$SEED" "${common[@]}" --max_updates 500 \
  --lr 7e-4 --normalisation_rows 1000 --overwrite
stage ppo "$OUT/ppo_$SEED/run.json" ppo.py --sft_model "$OUT/sft_$SEED" --reward_model "$OUT/reward_$SEED" \
  --dataset "$OUT/data_sft/sft" --seed "$SEED" --output_dir "$OUT/ppo_$SEED" --batch_size 64 --micro_batch_size 32 \
  --total_episodes 3840 --lr 1e-4 --response_length 48 --overwrite
"$PYTHON" benchmark/report.py --folder "$OUT" --seed "$SEED"
