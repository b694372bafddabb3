"""GenerateStream: the model may call tools; their results go back to it."""

import json
import os

import decant

ADDRESS = os.environ.get("DECANT_ADDRESS", "127.0.0.1:50051")

tools = [
    {
        "name": "weather",
        "description": "Today's weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Bern", "Zürich"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "strict": True,  # arguments fit the schema
    }
]
messages = [{"role": "user", "content": "Is it raining in Zürich?"}]

with decant.Client(ADDRESS) as client:
    try:
        calling = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
        answer = client.generate(messages, **calling, max_tokens=200, timeout=60)
        if answer.tool_calls:
            messages.append({"role": "assistant", "content": answer.text, "tool_calls": answer.tool_calls})
        for call in answer.tool_calls:
            print("call", call.name, json.loads(call.arguments))
            result = json.dumps({"rain": True})
            messages.append({"role": "tool", "name": call.name, "tool_call_id": call.id, "content": result})
        answer = client.generate(messages, tools=tools, tool_choice="none", max_tokens=200, timeout=60)
        print(answer.text)
    except decant.InvalidArgument as error:  # this model's template takes no tools
        print(f"refused: {error.field}: {error.limit}, got {error.value}")
