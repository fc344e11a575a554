#!/usr/bin/env bash
# Runs MindSpore Lite's converter on a fused model and keeps what it says.
#
#     scripts/convert_check.sh FUSED.onnx OUT_DIR [OPTION...]
#
# OPTIONs go to the converter as they are, e.g. --configFile=dims.ini. The converter is looked for in CONVERTER_LITE,
# then on PATH. What it prints is OUT_DIR/convert.log.
#
# exit 0  converted
#      1  the call is wrong: see the message
#      3  there is no converter_lite here: nothing was run
#      4  the converter failed: its complaints are shown
set -euo pipefail

if [ $# -lt 2 ]; then
  echo "usage: $0 FUSED.onnx OUT_DIR [OPTION...]" >&2
  exit 1
fi
model=$1 out=$2
shift 2
if [ ! -f "$model" ]; then
  echo "$model does not exist: check the path" >&2
  exit 1
fi

converter=${CONVERTER_LITE:-$(command -v converter_lite || true)}
if [ -z "$converter" ] || [ ! -x "$converter" ]; then
  echo "there is no converter_lite on PATH or in CONVERTER_LITE: install MindSpore Lite's cloud package," >&2
  echo "put its tools/converter/converter on PATH and its tools/converter/lib into LD_LIBRARY_PATH; nothing was run" >&2
  exit 3
fi

mkdir -p "$out"
log=$out/convert.log
command=("$converter" --fmk=ONNX "--modelFile=$model" "--outputFile=$out/$(basename "$model" .onnx)"
  --saveType=MINDIR --optimize=ascend_oriented "$@")
printf '%s\n' "${command[*]}" >"$log"
status=0
"${command[@]}" >>"$log" 2>&1 || status=$?

# The last word is the line that it prints, not its exit code alone.
if [ "$status" -eq 0 ] && grep -q "CONVERT RESULT SUCCESS:0" "$log"; then
  echo "converted: $out"
  exit 0
fi
echo "converter_lite failed with status $status; all it said is in $log" >&2
grep -E "ERROR|UNSUPPORTED|OP TYPE|INPUT ILLEGAL|failed|unknown error" "$log" >&2 || tail -n 5 "$log" >&2
exit 4
