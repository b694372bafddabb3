"""GetServerInfo: over TLS, with a client certificate if the server wants one."""

import os

import decant

ADDRESS = os.environ.get("DECANT_ADDRESS", "localhost:50051")

tls = decant.Tls(
    ca=os.environ["DECANT_CA"],  # roots of the server's certificate
    certificate=os.environ.get("DECANT_CERTIFICATE"),  # mutual TLS: this client's, and its key
    key=os.environ.get("DECANT_KEY"),
)
with decant.Client(ADDRESS, tls=tls) as client:
    print("over TLS:", client.server_info().version)
