#!/bin/sh
# Compiles decant.v1, and the google.rpc messages that its errors carry, into gen/. Takes the folder that holds protos/.
#
# Any protoc does. This one comes with `pip install grpcio-tools googleapis-common-protos`, which has google/rpc too.
set -eu
root=${1:-../../..}
python=${PYTHON:-python3}
google=$("$python" -c 'from pathlib import Path; from google.rpc import status_pb2; print(Path(status_pb2.__file__).parents[2])')

rm -rf gen
mkdir gen
"$python" -m grpc_tools.protoc -I "$root" -I "$google" \
    --plugin=protoc-gen-es=node_modules/.bin/protoc-gen-es --es_out=gen --es_opt=target=js+dts,import_extension=js \
    protos/inference.proto google/rpc/status.proto google/rpc/error_details.proto
