#!/usr/bin/env bash
# Make the archive and the manifest of the krew plugin: build.sh VERSION URI-OF-THE-ARCHIVE HOMEPAGE FOLDER
set -euo pipefail
version=$1 uri=$2 homepage=$3 out=$4
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$out"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
sed "s/@VERSION@/$version/g" "$here/kubectl-htj" > "$scratch/kubectl-htj"
chmod +x "$scratch/kubectl-htj"
cp "$here/../../LICENSE" "$scratch/"
tar --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner -C "$scratch" -cf - kubectl-htj LICENSE \
  | gzip -n > "$out/kubectl-htj.tar.gz"
sum=$(sha256sum "$out/kubectl-htj.tar.gz" | cut -d' ' -f1)
sed -e '/^# /d' -e "s|@VERSION@|$version|; s|@URI@|$uri|; s|@SHA256@|$sum|; s|@HOMEPAGE@|$homepage|" "$here/htj.yaml" > "$out/htj.yaml"
