#!/usr/bin/env bash
# Runs the tests: those that start no cluster side by side, then those that do one after the other, since clusters share ports
# and pin their engines to cores. Both run even if the first fail.
#
# usage: PYTEST=.venv/bin/pytest scripts/test.sh [pytest's options]     (make test)

set -uo pipefail
cd "$(dirname "$0")/.."

NO_TESTS=5 # pytest's exit status when its options leave none over
processes=$(nproc)
clusters=(tests/end_to_end tests/browser)

"$PYTEST" --numprocesses "$((processes < 8 ? processes : 8))" --dist loadfile "${clusters[@]/#/--ignore=}" "$@"
together=$?
"$PYTEST" "${clusters[@]}" "$@"
apart=$?

[ $together = $NO_TESTS ] && [ $apart = $NO_TESTS ] && exit $NO_TESTS
for status in $together $apart; do
  [ "$status" = 0 ] || [ "$status" = $NO_TESTS ] || exit "$status"
done
