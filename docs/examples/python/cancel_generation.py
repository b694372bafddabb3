"""CancelGeneration: end a request, also one that another client reads."""

import os
import uuid

import decant

ADDRESS = os.environ.get("DECANT_ADDRESS", "127.0.0.1:50051")

with decant.Client(ADDRESS) as client:
    request_id = str(uuid.uuid4())
    with client.stream("import os\n", request_id=request_id, ignore_eos=True, timeout=60) as answer:
        try:
            for _ in answer:
                print(client.cancel(request_id))
        except decant.Cancelled as error:
            print("the stream ended:", error.reason)
    print(client.cancel(request_id), client.cancel("unknown"))
