"""Generate: errors are exceptions with all details that the server sent."""

import os

import decant

ADDRESS = os.environ.get("DECANT_ADDRESS", "127.0.0.1:50051")

with decant.Client(ADDRESS) as client:
    try:
        client.generate("x = ", temperature=-1)
    except decant.InvalidArgument as error:
        print(f"{error.field}: {error.limit}, got {error.value}")

    try:
        client.generate("x = ", model="no-such-model")
    except decant.NotFound as error:
        print(error.code.name, error.reason, error.detail.resource.name)

    try:
        client.generate("x = ", ignore_eos=True, timeout=0.001)
    except (decant.DeadlineExceeded, decant.QueueFull) as error:  # it refuses at once what would end too late
        print("too late:", error)

    try:
        print(client.generate("x = ", max_tokens=8, timeout=60).text)
    except decant.ServiceError as error:
        if error.retryable:  # the client library has tried again already
            print("later, in", error.retry_after, "s")
        else:
            raise
