#!/bin/sh
# Two workers on this machine fill the tuning database URL with predictions for a V100, and end.
#   examples/cluster/local.sh postgresql+psycopg://kerngen@localhost/kerngen --kernel embed,rmsnorm
set -eu
url=$1
shift
kerngen worker --db "$url" --kind predict --arch sm70 --jobs 1 &
first=$!
kerngen worker --db "$url" --kind predict --arch sm70 --jobs 1 &
second=$!
trap 'kill "$first" "$second" 2>/dev/null || true; wait' EXIT
kerngen tune --db "$url" --submit --objective predicted --arch sm70 --model gemma-4-31b "$@"
kerngen tune --db "$url" --status
