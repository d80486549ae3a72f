#!/usr/bin/env bash
# Runs the tests in three parts: those that start no cluster and then clusters of mock engines, several side by side; at last
# real engines, one after the other, since they are pinned to cores. All parts run even if one fails.
#
# usage: PYTEST=.venv/bin/pytest MARKERS="not gpu and not long" scripts/test.sh [pytest's options]     (make test)

set -uo pipefail
cd "$(dirname "$0")/.."

NO_TESTS=5 # pytest's exit status when its options leave none over
MARKERS=${MARKERS:-engine or not engine}
processes=$(nproc)
side_by_side=(--numprocesses "$((processes < 8 ? processes : 8))" --dist loadfile)
clusters=(tests/end_to_end tests/browser)
statuses=()

part() {
  "$PYTEST" "$@"
  statuses+=($?)
}

part "${side_by_side[@]}" "${clusters[@]/#/--ignore=}" -m "$MARKERS" "$@"
part "${side_by_side[@]}" "${clusters[@]}" -m "($MARKERS) and not engine" "$@"
part "${clusters[@]}" -m "($MARKERS) and engine" "$@"

[ "${statuses[*]}" = "$NO_TESTS $NO_TESTS $NO_TESTS" ] && exit $NO_TESTS
for status in "${statuses[@]}"; do
  [ "$status" = 0 ] || [ "$status" = $NO_TESTS ] || exit "$status"
done
