#!/bin/sh
# step.sh WHAT COMMAND...: says what is done and how long it took; what the command printed only when it failed.
what=$1
shift
printf '%s ... ' "$what"
began=$(date +%s)
if printed=$("$@" 2>&1); then
  echo "$(($(date +%s) - began)) s"
else
  code=$?
  printf 'failed\n%s\n' "$printed"
  exit "$code"
fi
