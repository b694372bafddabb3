"""ResumeStream: a stream is left, and gone on with: by anybody who knows its id, on any router."""

import os
import uuid

import decant

ADDRESS = os.environ.get("DECANT_ADDRESS", "127.0.0.1:50051")
REQUEST_ID = str(uuid.uuid4())

with decant.Client(ADDRESS) as client:
    wanted = decant.Options(request_id=REQUEST_ID, max_tokens=60, temperature=0, on_disconnect="detach")
    with client.stream("def read_lines(path):\n", timeout=60, **wanted) as answer:
        for delta in answer:
            print(delta.text, end="")
            if answer.seq >= 20:
                break

# In another process, perhaps:
with decant.Client(ADDRESS) as client, client.resume(REQUEST_ID, after_seq=answer.seq) as rest:
    for delta in rest:
        print(delta.text, end="")

print()
print("left after", answer.seq, "tokens, read to the end after", rest.seq)
