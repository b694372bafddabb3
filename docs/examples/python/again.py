"""Generate: the same id and payload again is the same request, not another one."""

import os
import uuid

import decant

ADDRESS = os.environ.get("DECANT_ADDRESS", "127.0.0.1:50051")
REQUEST_ID = str(uuid.uuid4())

with decant.Client(ADDRESS) as client:
    first = client.generate("import ", request_id=REQUEST_ID, max_tokens=20, temperature=1, timeout=60)
    again = client.generate("import ", request_id=REQUEST_ID, max_tokens=20, temperature=1, timeout=60)
    print("the same text:", again.text == first.text, "from the same seed:", again.seed == first.seed)

    try:
        client.generate("from ", request_id=REQUEST_ID, max_tokens=20, temperature=1, timeout=60)
    except decant.AlreadyExists as error:
        print(error.reason)
