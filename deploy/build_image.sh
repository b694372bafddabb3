#!/usr/bin/env bash
# Build the images of deploy/Containerfile with buildah: `make image`.
#
# KINDS="router worker"   router: decant-router, without torch; worker: decant, every process on CPUs; cuda: decant-cuda,
#                         for NVIDIA GPUs, which downloads several GB
# TAG=latest              tag of the images
# BASE=                   an image of Debian with Python 3.11 or 3.12; "debian": made here with debootstrap, as root,
#                         where no registry can be reached
# EXTRAS=                 more of Decant's extras, such as "tracing"
# FLAGS=                  more flags of `buildah build`, such as --volume /etc/ssl/certs:/etc/ssl/certs:ro
#
# buildah's own variables work, such as BUILDAH_ISOLATION=chroot and STORAGE_DRIVER=vfs inside a container.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
KINDS=${KINDS:-router worker} TAG=${TAG:-latest} BASE=${BASE:-} EXTRAS=${EXTRAS:-} FLAGS=${FLAGS:-}
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

name_of() {
    case $1 in
        worker) echo decant ;;
        router | cuda) echo "decant-$1" ;;
        *) missing "KINDS: router, worker or cuda, got $1" ;;
    esac
}

command -v buildah >/dev/null || missing "needs buildah, which is not on PATH (Debian has it)"
buildah --version >/dev/null || missing "this buildah does not run"
for kind in $KINDS; do name_of "$kind" >/dev/null; done
if [ "$BASE" = debian ]; then
    buildah inspect --type image "$DEBIAN" >/dev/null 2>&1 || make_base
    BASE=$DEBIAN
fi
for kind in $KINDS; do
    stage=runtime
    [ "$kind" != cuda ] || stage=cuda
    # Only Docker's format has health checks.
    # shellcheck disable=SC2086 - several flags
    buildah build --format docker --layers $FLAGS ${BASE:+--build-arg BASE="$BASE"} --build-arg KIND="$kind" \
        --build-arg EXTRAS="$EXTRAS" --target "$stage" --file deploy/Containerfile --tag "$(name_of "$kind"):$TAG" .
done
for kind in $KINDS; do
    buildah images --filter reference="localhost/$(name_of "$kind"):$TAG" --format '{{.Name}}:{{.Tag}} {{.Size}}'
done
