"""GetGeneration: a request continues as a job; its state and its result can be fetched for an hour."""

import os
import time
import uuid

import decant

ADDRESS = os.environ.get("DECANT_ADDRESS", "127.0.0.1:50051")
REQUEST_ID = str(uuid.uuid4())

with decant.Client(ADDRESS) as client:
    options = decant.Options(request_id=REQUEST_ID, max_tokens=200, ignore_eos=True, on_disconnect="detach")
    with client.stream("import os\n", timeout=60, **options) as job:
        next(iter(job))  # it is running

    generation = client.generation(REQUEST_ID)
    print(generation.state, "with", generation.last_seq, "tokens")

    for _ in client.resume(REQUEST_ID):  # until it ends
        pass
    while not (generation := client.generation(REQUEST_ID)).state.is_end:
        time.sleep(0.05)  # the routers that did not run it learn of its end a moment later
    print(generation.state, "with", generation.last_seq, "tokens, kept until", generation.expire_time)
    for transition in generation.transitions:
        print(transition.time.time(), transition.state)
