#!/usr/bin/env bash
# Lays build/types/splitserve/ with a link to each package: mypy then sees the top-level folders under their import names.
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p build/types/splitserve
for package in kernels kv_transfer prefill_node decode_node orchestrator configs; do
  ln -sfn "../../../$package" "build/types/splitserve/$package"
done
