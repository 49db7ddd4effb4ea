#!/usr/bin/env bash
# Ten minutes of a real GPU, the most important part first. Run in the repository's root:
#
#     bash tests/benchmarks/gpu.sh [FOLDER] [PART…]
#
# Each part has its own limit in seconds. Its output is written to FOLDER/PART.txt as it comes, and
# its exit code and seconds to FOLDER/parts.tsv; _gpu.py makes a table of them, also of a run that
# was stopped. Parts that are there already are not run again. PYTHON names the interpreter.
# DRY=1 only asks each program for its help: to see that all start.
set -u
FOLDER=${1:-gpu_results}
shift || true
WANTED=" $* "
PYTHON=${PYTHON:-.venv/bin/python}
HERE=$(dirname "$0")
export SPEEDKIT_DATA="$FOLDER/data"  # nothing learned before
mkdir -p "$FOLDER"

part() {  # NAME LIMIT_S COMMAND…
  local name=$1 limit=$2 begun=$SECONDS code
  shift 2
  [[ $WANTED == "  " || $WANTED == *" $name "* ]] || return 0
  grep -q "^$name	" "$FOLDER/parts.tsv" 2>/dev/null && return 0
  echo "$name: at most $limit s"
  [[ ${DRY:-} ]] && set -- "${@:1:2}" --help
  [[ ${DRY:-} && $2 == -m ]] && set -- "$1" -m pytest --version
  timeout --kill-after 5 "$limit" "$@" >"$FOLDER/$name.txt" 2>&1
  code=$?
  printf '%s\t%s\t%s\t%s\n' "$name" "$code" $((SECONDS - begun)) "$limit" >>"$FOLDER/parts.tsv"
}

part tests 120 "$PYTHON" -m pytest -n 0 -q -m "gpu and not compile" --profile here -p no:cacheprovider
part linear 45 "$PYTHON" "$HERE/tuned.py" "Linear(4096) × 3, training"
part tuned 110 "$PYTHON" "$HERE/tuned.py" "GPT of 30 M, 16 x 512" "ResNet-18, batch 256"
part gemm 110 "$PYTHON" "$HERE/gemm_choices.py" "$FOLDER/gemm" --seconds 90
part attention 60 "$PYTHON" "$HERE/attention.py" --lengths 1024 --rounds 7 --file "$FOLDER/attention.jsonl"
part auto 40 "$PYTHON" "$HERE/live.py" --only "transformer, training" --seconds 8 --file "$FOLDER/auto.jsonl"
part busy 20 "$PYTHON" "$HERE/_gpu.py" busy
part cold 60 "$PYTHON" "$HERE/cold_start.py" --rounds 1 --file "$FOLDER/cold.jsonl"
part two 35 "$PYTHON" "$HERE/distributed.py" --processes 2 --steps 30
"$PYTHON" "$HERE/_gpu.py" table "$FOLDER" | tee "$FOLDER/table.md"
