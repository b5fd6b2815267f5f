#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Run tests/accelerate with one release of every minor version of Accelerate that Holmes supports, or with those given:
#   make test-accelerate-versions            tests/accelerate/versions.sh 1.11.0 1.15.0
# Each release gets a small virtual environment of its own, which sees everything else of the one that runs this
# ($VENV, .venv by default); words for pytest go into $ARGS. Exit status 1 if any release fails.
set -uo pipefail
cd "$(dirname "$0")/../.."

VENV="${VENV:-.venv}"
PYTHON="$(cd "$VENV" && pwd)/bin/python"
WHERE="${WHERE:-$VENV-accelerate}"
RELEASES=("$@")
[ ${#RELEASES[@]} -gt 0 ] || RELEASES=(1.10.0 1.10.1 1.11.0 1.12.0 1.13.0 1.14.0 1.15.0)

make_environment() { # release, folder
  local site
  "$PYTHON" -m venv --without-pip "$2" || return 1
  site="$("$2/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
  # addsitedir, not a plain path: the .pth files of the other environment (an editable Holmes) count too.
  printf 'import site; site.addsitedir(%s)\n' \
    "$("$PYTHON" -c 'import sysconfig; print(repr(sysconfig.get_path("purelib")))')" >"$site/base.pth"
  "$PYTHON" -m pip --python "$2/bin/python" install -q --no-deps "accelerate==$1" || return 1
  { echo "#!$2/bin/python" && sed 1d "$VENV/bin/holmes"; } >"$2/bin/holmes" && chmod +x "$2/bin/holmes"
  touch "$2/.ready"
}

failed=()
for release in "${RELEASES[@]}"; do
  folder="$(mkdir -p "$WHERE" && cd "$WHERE" && pwd)/$release"
  [ -e "$folder/.ready" ] || { rm -rf "$folder" && make_environment "$release" "$folder"; } || {
    failed+=("$release: cannot be installed") && continue
  }
  echo "== accelerate $("$folder/bin/python" -c 'import accelerate; print(accelerate.__version__)')"
  # shellcheck disable=SC2086  # words
  OMP_NUM_THREADS=1 "$folder/bin/python" -m pytest -q tests/accelerate ${ARGS:-} || failed+=("$release: tests failed")
done
[ ${#failed[@]} -eq 0 ] || { printf '%s\n' "${failed[@]}" >&2 && exit 1; }
