#!/bin/sh
# Compiles decant.v1, and the google.rpc messages that its errors carry, into gen/. Takes the folder that holds protos/.
#
# Any protoc does; this one comes with `pip install grpcio-tools`. The folder has google/rpc too.
set -eu
root=${1:-../../..}
python=${PYTHON:-python3}

rm -rf gen
mkdir gen
"$python" -m grpc_tools.protoc -I "$root/protos" \
    --plugin=protoc-gen-es=node_modules/.bin/protoc-gen-es --es_out=gen --es_opt=target=js+dts,import_extension=js \
    inference.proto google/rpc/status.proto google/rpc/error_details.proto
