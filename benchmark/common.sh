# Sourced by quickstart.sh and compare.sh: the virtual environment, settings for small machines, and `stage`.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
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
