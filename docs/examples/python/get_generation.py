"""GetGeneration: a request goes on as a job; how it stands can be asked, and its result fetched for an hour."""

import os
import uuid

import decant

ADDRESS = os.environ.get("DECANT_ADDRESS", "127.0.0.1:50051")
REQUEST_ID = str(uuid.uuid4())

with decant.Client(ADDRESS) as client:
    wanted = decant.Options(request_id=REQUEST_ID, max_tokens=200, ignore_eos=True, on_disconnect="detach")
    with client.stream("import os\n", timeout=60, **wanted) as job:
        next(iter(job))  # it is under way

    found = client.generation(REQUEST_ID)
    print(found.state, "with", found.last_seq, "tokens")

    for _ in client.resume(REQUEST_ID):  # to its end
        pass
    found = client.generation(REQUEST_ID)
    print(found.state, "with", found.last_seq, "tokens, kept until", found.expire_time)
    for change in found.transitions:
        print(change.time.time(), change.state)
