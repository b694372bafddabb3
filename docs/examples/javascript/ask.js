// Streams an answer, resumes a lost stream, reads the details of an error, cancels: with a client that is generated from
// protos/. node.js calls it over gRPC, page.html in a browser over gRPC-Web.

import { create } from "@bufbuild/protobuf";
import { Code, ConnectError } from "@connectrpc/connect";
import { BadRequestSchema, ErrorInfoSchema } from "./gen/google/rpc/error_details_pb.js";
import { FinishReason, GenerateRequestSchema } from "./gen/inference_pb.js";

/** Show all four with a client of InferenceService; `print` appends a text to the output. */
export async function ask(client, print) {
  await stream(client, print);
  await resume(client, print);
  await refused(client, print);
  await cancel(client, print);
}

/** A greedy request with these fields. */
function newRequest(fields) {
  return create(GenerateRequestSchema, {
    requestId: crypto.randomUUID(),
    input: { case: "prompt", value: "def read_lines(path):\n" },
    sampling: { temperature: 0 },
    stopping: { maxTokens: 40 },
    ...fields,
  });
}

/** Print deltas as they arrive; the last message has usage and receipt. */
async function stream(client, print) {
  for await (const { event, usage, receipt } of client.generateStream(newRequest(), { timeoutMs: 60_000 })) {
    if (event.case === "delta") {
      print(event.value.text);
    } else if (event.case === "finished") {
      const reason = FinishReason[event.value.finishReason];
      print(`\n${reason}: ${usage.completionTokens} tokens in ${Math.round(receipt.e2eMs)} ms\n`);
    }
  }
}

/** Lose a stream in the middle of an answer, and read the rest by the request's id: on any router. */
async function resume(client, print) {
  const request = newRequest();
  let seq = 0n;
  let text = "";
  for await (const { event, seq: last } of client.generateStream(request)) {
    if (event.case === "delta") {
      text += event.value.text;
      seq = last;
      if (seq >= 10n) break; // as if the connection broke; the request goes on for `Limits.resume_grace_ms`
    }
  }
  const lost = seq;
  for await (const { event, seq: last } of client.resumeStream({ requestId: request.requestId, afterSeq: lost })) {
    if (event.case === "delta") {
      text += event.value.text;
      seq = last;
    }
  }
  print(`lost after ${lost} tokens, resumed to ${seq}: ${JSON.stringify(text)}\n`);
}

/** Read why a request was refused: details are typed messages. */
async function refused(client, print) {
  try {
    await client.generate(newRequest({ sampling: { temperature: -1 } }));
  } catch (thrown) {
    const error = ConnectError.from(thrown);
    const [info] = error.findDetails(ErrorInfoSchema);
    const [bad] = error.findDetails(BadRequestSchema);
    print(`${Code[error.code]} ${info.reason}: ${bad.fieldViolations[0].field}, ${info.metadata.limit}\n`);
  }
}

/** End a request by CancelGeneration, which ends the streams of other readers too, and by leaving the stream. */
async function cancel(client, print) {
  const request = newRequest({ stopping: { ignoreEos: true } });
  const abort = new AbortController();
  try {
    for await (const { event } of client.generateStream(request, { signal: abort.signal })) {
      if (event.case === "delta") {
        await client.cancelGeneration({ requestId: request.requestId });
        abort.abort();
      }
    }
  } catch (thrown) {
    print(`the stream ended: ${Code[ConnectError.from(thrown).code]}\n`);
  }
}
