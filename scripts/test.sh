#!/usr/bin/env bash
# Runs the tests: those that start no cluster side by side, then those that do one after the other, since clusters pin their
# engines to cores. Both run even if the first fail.
#
# usage: PYTEST=.venv/bin/pytest scripts/test.sh [pytest's options]     (make test)

set -uo pipefail
cd "$(dirname "$0")/.."

NO_TESTS=5 # pytest's exit status when its options leave none over
processes=$(nproc)
alone=(tests/end_to_end)
[ -d tests/browser ] && alone+=(tests/browser)

"$PYTEST" --numprocesses "$((processes < 8 ? processes : 8))" --dist loadfile "${alone[@]/#/--ignore=}" "$@"
together=$?
"$PYTEST" "${alone[@]}" "$@"
clusters=$?

[ $together = $NO_TESTS ] && [ $clusters = $NO_TESTS ] && exit $NO_TESTS
for status in $together $clusters; do
  [ "$status" = 0 ] || [ "$status" = $NO_TESTS ] || exit "$status"
done
