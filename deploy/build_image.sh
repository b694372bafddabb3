#!/usr/bin/env bash
# Build the image of deploy/Containerfile with buildah: `make image`.
#
# EXTRAS=worker      what is installed: "worker" for every process, "router" for a small image of routers alone
# TARGET=            "cuda" for NVIDIA GPUs
# TAG=decant         name of the image
# BASE=              an image of Debian with Python 3.11 or 3.12; "debian": made here with debootstrap, as root, where no
#                    registry can be reached
# FLAGS=             more flags of `buildah build`, such as --volume /etc/ssl/certs:/etc/ssl/certs:ro
#
# buildah's own variables work, such as BUILDAH_ISOLATION=chroot and STORAGE_DRIVER=vfs inside a container.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
EXTRAS=${EXTRAS:-worker} TARGET=${TARGET:-} TAG=${TAG:-decant} BASE=${BASE:-} FLAGS=${FLAGS:-}
DEBIAN=localhost/decant-base

missing() {
    echo "make image: $1" >&2
    exit 1
}

make_base() {
    command -v debootstrap >/dev/null || missing "BASE=debian needs debootstrap, which is not on PATH"
    [ "$(id -u)" = 0 ] || missing "BASE=debian needs root, for debootstrap"
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
    debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates bookworm "$folder"
    container=$(buildah from scratch)
    buildah add --quiet "$container" "$folder" /
    buildah commit --quiet --rm "$container" "$DEBIAN"
}

command -v buildah >/dev/null || missing "needs buildah, which is not on PATH (Debian has it)"
buildah --version >/dev/null || missing "this buildah does not run"
if [ "$BASE" = debian ]; then
    make_base
    BASE=$DEBIAN
fi
# shellcheck disable=SC2086 - several flags
buildah build $FLAGS ${BASE:+--build-arg BASE="$BASE"} ${TARGET:+--target "$TARGET"} --build-arg EXTRAS="$EXTRAS" \
    --file deploy/Containerfile --tag "$TAG" .
buildah images --filter reference="$TAG" --format '{{.Name}}:{{.Tag}} {{.Size}}'
