#!/bin/sh
# Compiles decant.v1, and the google.rpc messages that its errors carry, into gen/. Takes the folder that holds protos/.
#
# Needs Ruby 3 with gRPC: `apt install ruby ruby-grpc ruby-grpc-tools libprotobuf-dev`, or `gem install grpc grpc-tools`.
set -eu
root=${1:-../../..}

rm -rf gen
mkdir gen
grpc_tools_ruby_protoc -I "$root/protos" --ruby_out=gen --grpc_out=gen \
    inference.proto google/rpc/status.proto google/rpc/error_details.proto
