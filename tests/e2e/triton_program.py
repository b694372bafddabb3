"""A program of tritonclient, in an environment without this checkout: prints what it got as JSON."""

# mypy: ignore-errors

import json
import sys
from queue import Queue

import numpy
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

ADDRESS, MODEL, PROMPT = sys.argv[1:]
SAMPLING = {"temperature": "0", "max_tokens": 24}


def tensor(name, kind, value):
    made = triton.InferInput(name, [1], kind)
    made.set_data_from_numpy(numpy.array([value], dtype=bool if kind == "BOOL" else numpy.object_))
    return made


def inputs(stream, **sampling):
    parameters = json.dumps({**SAMPLING, **sampling}).encode()
    more = [tensor("stream", "BOOL", stream)] if stream else [tensor("exclude_input_in_output", "BOOL", True)]
    return [tensor("text_input", "BYTES", PROMPT.encode()), *more, tensor("sampling_parameters", "BYTES", parameters)]


with triton.InferenceServerClient(ADDRESS) as client:
    found = {
        "ready": [client.is_server_live(), client.is_server_ready(), client.is_model_ready(MODEL)],
        "inputs": [each.name for each in client.get_model_metadata(MODEL).inputs],
        "server": client.get_server_metadata().name,
    }
    outputs = [triton.InferRequestedOutput("text_output")]
    whole = client.infer(MODEL, inputs(False), outputs=outputs, request_id="1")
    found["whole"] = [text.decode() for text in whole.as_numpy("text_output")]
    try:
        client.infer(MODEL, inputs(False, top_p=2))
    except InferenceServerException as error:
        found["error"] = [error.status(), error.message()]
    try:
        client.get_model_config(MODEL)
    except InferenceServerException as error:
        found["other method"] = error.status()

    results = Queue()
    client.start_stream(lambda result, error: results.put((result, error)))
    client.async_stream_infer(MODEL, inputs(True), request_id="s", enable_empty_final_response=True)
    pieces = []
    while True:
        result, error = results.get(timeout=60)
        assert error is None, error
        response = result.get_response()
        assert response.id == "s"
        if response.parameters["triton_final_response"].bool_param:
            break
        pieces.append(result.as_numpy("text_output")[0].decode())
    client.async_stream_infer(MODEL, inputs(True, top_p=2), request_id="w")
    _, error = results.get(timeout=60)
    found["stream error"] = str(error)
    client.stop_stream()
    found["pieces"] = pieces
print(json.dumps(found))
