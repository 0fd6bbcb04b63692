#!/usr/bin/env bash
# `make test` so many times in a row, a line a run: a test that fails once in twenty is a fault, of the test or of the product.
#   bash benchmarks/tests_in_a_row.sh 20
# Two clones that run it side by side on two cores find more: everything takes turns then, and what depends on time shows.
set -euo pipefail
runs=${1:?how many runs}
cd "$(dirname "$0")/.."
logs=$(mktemp -d)
failed=0
for run in $(seq "$runs"); do
    start=$SECONDS
    make test >"$logs/$run" 2>&1 || failed=$((failed + 1))
    printf '%3d  %4d s  %s\n' "$run" $((SECONDS - start)) "$(grep -E '(passed|failed).* in ' "$logs/$run" | tail -n 1)"
done
echo "$failed of $runs failed; what they printed is in $logs"
exit "$((failed > 0))"
