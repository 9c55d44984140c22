#!/usr/bin/env bash
# The first hour on a GPU: what only a GPU can show, measured in one go, in at most 26 minutes, without a network.
#   scripts/gpu_day.sh                          all parts; results below $OUT, else runs/gpu-day-<time>
#   scripts/gpu_day.sh --parts tests,steps FOLDER
#   scripts/gpu_day.sh --dry-run FOLDER         all parts with tiny sizes on the CPU, over gloo
# Writes for each part PART.json and PART.log, then results.json and results.md, the page. A part that fails, or takes longer than
# its limit, keeps what it has measured and stops no other. The exit code is 1 if one did. PYTHON=... chooses the interpreter.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

usage() { echo "usage: scripts/gpu_day.sh [--dry-run] [--parts PART,PART] [FOLDER]: $1" >&2; exit 2; }

dry=() at_once=1 patience=1 out=${OUT:-} parts=()
limits=" environment:60 tests:360 peaks:240 steps:240 offload:240 codecs:120 finetune:240 " # seconds, in the order of value
for pair in $limits; do parts+=("${pair%%:*}"); done
# A dry run times nothing of interest: parts share the cores, of a machine that may be busy. nproc obeys OMP_NUM_THREADS.
while [[ $# -gt 0 ]]; do
    case $1 in
        --dry-run) dry=(--dry-run) patience=8 at_once=$(env -u OMP_NUM_THREADS nproc) ;;
        --parts) IFS=, read -ra parts <<<"${2:?expected parts, as in: --parts tests,steps}"; shift ;;
        -*) usage "unknown option $1" ;;
        *) out=$1 ;;
    esac
    shift
done
for part in "${parts[@]}"; do [[ $limits == *" $part:"* ]] || usage "unknown part $part"; done
out=${out:-runs/gpu-day-$(date +%Y%m%d-%H%M%S)}
mkdir -p "$out" && out=$(cd "$out" && pwd) || exit 1
python=${PYTHON:-${ZEROSHARD_VENV:-.venv}/bin/python}
[[ -x $(command -v "$python") ]] || { echo "gpu_day: expected a Python at $python, found none; run ./test once, or name one with PYTHON=" >&2; exit 1; }
export PYTHONPATH=$PWD/src:$PWD${PYTHONPATH:+:$PYTHONPATH} HF_HUB_OFFLINE=1

one() { # a part: it has its limit, ten seconds to say that it was ended, and then dies with all that it started
    local limit=${limits#*" $1:"} began=$SECONDS code
    timeout --kill-after=10 $((${limit%% *} * patience)) "$python" -m benchmarks.gpu_day "$1" "$out" ${dry[@]+"${dry[@]}"} >"$out/$1.log" 2>&1
    code=$?
    echo "$1: exit code $code after $((SECONDS - began)) s"
}

for part in "${parts[@]}"; do
    rm -f "$out/$part.json"
    while (($(jobs -rp | wc -l) >= at_once)); do wait -n; done
    one "$part" &
done
wait
rm -rf "$out"/zeroshard-bench-* # states on disk, of a part that died at its limit
"$python" -m benchmarks.gpu_day page "$out" "${parts[@]}"
code=$?
echo "written: $out/results.json, $out/results.md"
exit $code
