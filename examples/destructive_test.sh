#!/bin/sh
# A destructive test: the important files are deleted, in a sandbox. Reality is proven to be what it was.
#
#     sh examples/destructive_test.sh
#
# It makes its own project, and leaves nothing.
set -eu

place=$(mktemp -d "${HOME:?}/elsewhere-destructive-XXXXXX")
trap 'rm -rf "$place"' EXIT
cd "$place"
mkdir src data
echo 'print("open")' > src/app.py
echo 'ledger of 1904' > data/ledger
echo 'KEY=value' > .env

fingerprint() { find . | sort | sha256sum; find . -type f -exec sha256sum {} + | sort; }
before=$(fingerprint)

echo "inside, everything is deleted:"
left=$(elsewhere run --discard -c 'rm -rf src data .env; find . -type f | wc -l' 2> /dev/null)
echo "   files left in the sandbox: $left"
test "$left" -eq 0

echo "inside, a restore is tried that overwrites what it should not:"
elsewhere run --discard -c 'echo nonsense | tee data/ledger src/app.py > /dev/null; cat data/ledger' 2> /dev/null

test "$(fingerprint)" = "$before"
echo "reality is byte for byte what it was: $(find . -type f | wc -l) files"
