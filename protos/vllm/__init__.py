"""The protocol of vLLM's engines, from the wheel smg-grpc-proto, with the stubs that the build generates."""
