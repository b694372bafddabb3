// Calls a router over gRPC from Node.js:
//
//     npm ci && npm run generate && DECANT_ADDRESS=127.0.0.1:50051 npm start

import { createClient } from "@connectrpc/connect";
import { createGrpcTransport, Http2SessionManager } from "@connectrpc/connect-node";
import { ask } from "./ask.js";
import { InferenceService } from "./gen/inference_pb.js";

const baseUrl = `http://${process.env.DECANT_ADDRESS ?? "127.0.0.1:50051"}`;
const sessionManager = new Http2SessionManager(baseUrl);
const client = createClient(InferenceService, createGrpcTransport({ baseUrl, sessionManager }));
await ask(client, (text) => process.stdout.write(text));
sessionManager.abort(); // otherwise Node.js runs until the router ends the connection
