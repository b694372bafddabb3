// Calls a router over gRPC from Node.js:
//
//     npm ci && npm run generate && DECANT_ADDRESS=127.0.0.1:50051 npm start

import { createClient } from "@connectrpc/connect";
import { createGrpcTransport } from "@connectrpc/connect-node";
import { ask } from "./ask.js";
import { InferenceService } from "./gen/inference_pb.js";

const address = process.env.DECANT_ADDRESS ?? "127.0.0.1:50051";
const client = createClient(InferenceService, createGrpcTransport({ baseUrl: `http://${address}` }));
await ask(client, (text) => process.stdout.write(text));
