#!/bin/sh
# Compiles decant.v1 into decantv1/. Takes the folder that holds protos/.
#
# Needs Go, protoc and its two plugins. Debian: `apt install golang-go protobuf-compiler protoc-gen-go protoc-gen-go-grpc`,
# and for programs golang-google-grpc-dev, golang-google-genproto-dev and golang-github-golang-protobuf-1-5-dev.
# Elsewhere: `go install google.golang.org/protobuf/cmd/protoc-gen-go@latest google.golang.org/grpc/cmd/protoc-gen-go-grpc@latest`.
set -eu
root=${1:-../../..}

rm -rf decantv1
mkdir decantv1
protoc -I "$root/protos" \
    --go_out=decantv1 --go_opt=paths=source_relative --go-grpc_out=decantv1 --go-grpc_opt=paths=source_relative \
    inference.proto
