// Streams an answer, reads the details of an error, cancels: with a client that is generated from protos/.
//
//     npm ci && npm run generate && DECANT_ADDRESS=127.0.0.1:50051 npm start

import { randomUUID } from "node:crypto";
import { create } from "@bufbuild/protobuf";
import { Code, ConnectError, createClient } from "@connectrpc/connect";
import { createGrpcTransport } from "@connectrpc/connect-node";
import { BadRequestSchema, ErrorInfoSchema } from "./gen/google/rpc/error_details_pb.js";
import { FinishReason, GenerateRequestSchema, InferenceService } from "./gen/inference_pb.js";

const address = process.env.DECANT_ADDRESS ?? "127.0.0.1:50051";
const client = createClient(InferenceService, createGrpcTransport({ baseUrl: `http://${address}` }));

/** A request that is greedy, and whatever else is given. */
function asking(fields) {
  return create(GenerateRequestSchema, {
    requestId: randomUUID(),
    input: { case: "prompt", value: "def read_lines(path):\n" },
    sampling: { temperature: 0 },
    stopping: { maxTokens: 40 },
    ...fields,
  });
}

/** Prints deltas as they come; the last message has usage and receipt. */
async function stream() {
  for await (const { event, usage, receipt } of client.generateStream(asking(), { timeoutMs: 60_000 })) {
    if (event.case === "delta") {
      process.stdout.write(event.value.text);
    } else if (event.case === "finished") {
      const reason = FinishReason[event.value.finishReason];
      console.log(`\n${reason}: ${usage.completionTokens} tokens in ${Math.round(receipt.e2eMs)} ms`);
    }
  }
}

/** Why a request was refused: details are typed messages. */
async function refused() {
  try {
    await client.generate(asking({ sampling: { temperature: -1 } }));
  } catch (thrown) {
    const error = ConnectError.from(thrown);
    const [info] = error.findDetails(ErrorInfoSchema);
    const [bad] = error.findDetails(BadRequestSchema);
    console.log(`${Code[error.code]} ${info.reason}: ${bad.fieldViolations[0].field}, ${info.metadata.limit}`);
  }
}

/** Ends a request: by CancelGeneration, which other readers hear of too, and by leaving the stream. */
async function cancel() {
  const request = asking({ stopping: { ignoreEos: true } });
  const left = new AbortController();
  try {
    for await (const { event } of client.generateStream(request, { signal: left.signal })) {
      if (event.case === "delta") {
        await client.cancelGeneration({ requestId: request.requestId });
        left.abort();
      }
    }
  } catch (thrown) {
    console.log("the stream ended:", Code[ConnectError.from(thrown).code]);
  }
}

await stream();
await refused();
await cancel();
