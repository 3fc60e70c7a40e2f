# Sourced by quickstart.sh and compare.sh: the virtual environment, settings for small machines, `stage` and `train`.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
SEED=${SEED:-44413}
OUT=${OUT:-benchmark/out}
VENV=${VENV:-.venv}
PYTHON=$VENV/bin/python
PROCESSES=${PROCESSES:-2}
mkdir -p "$OUT"

python3 -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed")'
if ! cmp -s requirements.txt "$VENV/requirements.txt"; then
  python3 -m venv "$VENV"
  # most modules are never imported; those that are get compiled then, and once
  "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-compile -r requirements.txt
  cp requirements.txt "$VENV/requirements.txt"
fi
unset PYTHONDONTWRITEBYTECODE  # or every process would compile them anew
# No Hub is needed. glibc returns large tensors to the system at every step unless it is told not to.
export HF_HUB_OFFLINE=1 ACCELERATE_USE_CPU=true TOKENIZERS_PARALLELISM=false TRANSFORMERS_VERBOSITY=error
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}  # models of this size gain from a second process, not from a second thread
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
  local status=0
  "$PYTHON" "$@" || status=$?
  echo "$name,$((SECONDS - start))" >> "$OUT/seconds_$SEED.csv"  # of a stage that was interrupted, too: they add up
  return $status
}

# train NAME ARGUMENTS...: the script of that stage on $PROCESSES processes, into its folder, a checkpoint every minute
train() {
  local name=$1 script=$1 folder=$OUT/$1_$SEED
  shift
  [[ $name == base ]] && script=sft folder=$OUT/base
  stage "$name" "$folder/run.json" -m torch.distributed.run --standalone --nproc_per_node "$PROCESSES" "$script.py" \
    --output_dir "$folder" --micro_batch_size $((32 / PROCESSES)) --save_minutes 1 "$@"
}
