"""Guided output: answers by a JSON schema, a regular expression and a list of choices."""

import json
import os

import decant

ADDRESS = os.environ.get("DECANT_ADDRESS", "127.0.0.1:50051")

SCHEMA = {
    "type": "object",
    "properties": {
        "language": {"enum": ["python", "rust", "go"]},
        "version": {"type": "integer", "minimum": 1, "maximum": 99},
        "tested": {"type": "boolean"},
    },
    "required": ["language", "version", "tested"],
    "additionalProperties": False,
}

with decant.Client(ADDRESS) as client:
    answer = client.generate("import json\n# ", json_schema=SCHEMA, max_tokens=400, timeout=60)
    print(json.loads(answer.text).keys(), "complete:", answer.finished.guide_completed)

    version = client.generate("version = ", regex="[0-9]{1,2}\\.[0-9]{1,2}", max_tokens=20, timeout=60)
    choice = client.generate("# the answer is ", choice=["yes", "no"], max_tokens=20, timeout=60)
    print(version.text, choice.text)

    try:
        client.generate("x = ", json_schema={"type": "array", "uniqueItems": True})
    except decant.InvalidArgument as error:
        print(error)
