#!/usr/bin/env bash
# All stages for a few steps on real TL;DR posts and comparisons, on a CPU.
#
#   bash benchmark/real_data.sh            the trained 260k-parameter Llama-kind model, with its own tokenizer
#   MODEL=neox bash benchmark/real_data.sh a random GPT-NeoX with Pythia's tokenizer, at the paper's lengths
#
# $DATA (../shared/data) holds tldr/{sft,comparisons}, tokenizers/pythia and models/stories260k; results go to $OUT.
set -euo pipefail
cd "$(dirname "$0")/.."
DATA=${DATA:-../shared/data}
MODEL=${MODEL:-stories260k}
OUT=${OUT:-benchmark/out/real_$MODEL}
UPDATES=${UPDATES:-20}
[[ -d $DATA/tldr ]] || { echo "no real data in $DATA; set DATA to a folder with tldr/, tokenizers/ and models/"; exit 1; }
OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(nproc)}  # one process a stage
source benchmark/environment.sh
export ACCELERATE_USE_CPU=true TRANSFORMERS_VERBOSITY=error

mkdir -p "$OUT"
if [[ $MODEL == neox ]]; then
  model=$OUT/model tokenizer=$DATA/tokenizers/pythia query_length=512 response_length=53
  "$PYTHON" - "$tokenizer" "$model" <<'PY'
import sys
import torch
from transformers import AutoTokenizer, GPTNeoXConfig, GPTNeoXForCausalLM
torch.manual_seed(0)
shape = {"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=50304, bos_token_id=0, eos_token_id=0, **shape)).save_pretrained(sys.argv[2])
AutoTokenizer.from_pretrained(sys.argv[1]).save_pretrained(sys.argv[2])
PY
else
  model=$DATA/models/$MODEL tokenizer=$DATA/models/$MODEL query_length=352 response_length=96
fi
batch=(--batch_size 16 --micro_batch_size 8 --eval_rows 16)
"$PYTHON" tldr_dataset.py --tokenizer "$tokenizer" --sft "$DATA/tldr/sft" --comparisons "$DATA/tldr/comparisons" \
  --max_query_length $query_length --output_dir "$OUT/data" --overwrite
"$PYTHON" sft.py --model "$model" --dataset "$OUT/data/sft" --output_dir "$OUT/sft" "${batch[@]}" \
  --max_updates "$UPDATES" --lr 1e-3 --response_length $response_length --overwrite
"$PYTHON" reward.py --sft_model "$OUT/sft" --dataset "$OUT/data/comparisons" --sft_dataset "$OUT/data/sft" \
  --eval_splits validation --output_dir "$OUT/reward" "${batch[@]}" --max_updates "$UPDATES" --lr 1e-3 \
  --normalisation_rows 64 --overwrite
"$PYTHON" ppo.py --sft_model "$OUT/sft" --reward_model "$OUT/reward" --dataset "$OUT/data/sft" --output_dir "$OUT/ppo" \
  "${batch[@]}" --total_episodes $((16 * ((UPDATES + 3) / 4))) --lr 1e-4 --response_length $response_length --overwrite
offline=(--sft_model "$OUT/sft" --dataset "$OUT/data/comparisons" --sft_dataset "$OUT/data/sft" --response_length $response_length
  "${batch[@]}" --max_updates "$UPDATES" --lr 1e-4 --overwrite)
"$PYTHON" dpo.py "${offline[@]}" --eval_splits validation --output_dir "$OUT/dpo"
"$PYTHON" ilql.py "${offline[@]}" --output_dir "$OUT/ilql"
