"""ResumeStream: a stream is left and continued, by any client that knows its id, on any router."""

import os
import uuid

import decant

ADDRESS = os.environ.get("DECANT_ADDRESS", "127.0.0.1:50051")
REQUEST_ID = str(uuid.uuid4())

with decant.Client(ADDRESS) as client:
    options = decant.Options(request_id=REQUEST_ID, max_tokens=60, temperature=0, on_disconnect="detach")
    with client.stream("def read_lines(path):\n", timeout=60, **options) as answer:
        for delta in answer:
            print(delta.text, end="")
            if answer.seq >= 20:
                break

# This may be another process.
with decant.Client(ADDRESS) as client, client.resume(REQUEST_ID, after_seq=answer.seq) as rest:
    for delta in rest:
        print(delta.text, end="")

print()
print("left after", answer.seq, "tokens, read to the end after", rest.seq)
