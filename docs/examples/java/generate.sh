#!/bin/sh
# Compiles decant.v1, and the google.rpc messages that its errors carry, into gen/. Takes the folder that holds protos/.
#
# Needs Java 17, protoc and its plugin for Java. Debian: `apt install default-jdk-headless protobuf-compiler
# protobuf-compiler-grpc-java-plugin`. Elsewhere Maven and Gradle have plugins that run both.
set -eu
root=${1:-../../..}

rm -rf gen
mkdir gen
plugin=$(command -v protoc-gen-grpc-java || command -v grpc_java_plugin) # the second is the name in Debian
protoc -I "$root/protos" --plugin=protoc-gen-grpc-java="$plugin" --java_out=gen --grpc-java_out=gen \
    inference.proto google/rpc/status.proto google/rpc/error_details.proto
